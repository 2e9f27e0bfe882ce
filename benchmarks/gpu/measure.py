"""What is measured of a step on a GPU, and on a CPU in its place."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from fresh import digest, hardware

import checkmate
from checkmate.torch import measure_peak


def give_back() -> None:
    """Return the memory that the allocator only keeps, which other parts may need."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def machine(device: str) -> dict[str, Any]:
    """What it runs on: processor, GPU with driver and memory, and the settings that matter."""
    found = hardware()
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        }
    return found


def software() -> dict[str, str]:
    """Versions; Checkmate's own is that of the source tree, which need not be installed."""
    others = {name: importlib.metadata.version(name) for name in ("transformers", "numpy", "highspy")}
    return {"python": platform.python_version(), "torch": torch.__version__, **others, "checkmate-remat": checkmate.__version__}


def settle() -> None:
    """Free what the last variant left."""
    gc.collect()
    torch._dynamo.reset()
    from checkmate.torch.steps.coordinator import coordinator

    coordinator().forget_steps()
    give_back()


def peaks(
    step: Callable[[], Any],
    model: torch.nn.Module,
    batch: Iterable[torch.Tensor],
    device: str,
    *,
    emptied: bool = True,
    record: str | None = None,
) -> dict[str, int]:
    """Peak of the next step with everything that is allocated, and what the allocator reserves; gradients are freed before.

    ``requested_bytes`` is the peak of what was asked for, before the allocator rounds: a block of a GPU can be 1 MiB larger.

    With ``emptied`` segments that nothing uses are given back before; not where they were reserved on purpose. A history of the
    two steps is written to ``record``.
    """
    model.zero_grad(set_to_none=True)
    if device != "cuda":
        held = [*model.parameters(), *model.buffers(), *batch]
        resident = sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}.values())
        peak = resident + measure_peak(step)
        return {"allocated_bytes": peak, "requested_bytes": peak}
    gc.collect()
    torch.cuda.synchronize()
    if emptied:
        torch.cuda.empty_cache()
    with contextlib.nullcontext() if record is None else history(f"{record}.history.pickle"):
        step()
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return {
        "allocated_bytes": stats["allocated_bytes.all.peak"],
        "requested_bytes": stats["requested_bytes.all.peak"],
        "reserved_bytes": stats["reserved_bytes.all.peak"],
    }


def times(step: Callable[[], Any], model: torch.nn.Module, device: str, rounds: int) -> dict[str, float]:
    """Seconds of some steps, by events on a GPU, else by the clock; and of the processor."""
    took, busy = list[float](), list[float]()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if device == "cuda" else []
    for _ in range(rounds):
        model.zero_grad(set_to_none=True)
        if events:
            torch.cuda.synchronize()  # the processor is busy while it waits: that does not count
            events[0].record()
        began = time.perf_counter(), time.process_time()
        step()
        busy.append(time.process_time() - began[1])
        took.append(time.perf_counter() - began[0])
        if events:
            events[1].record()
            events[1].synchronize()
            took[-1] = events[0].elapsed_time(events[1]) / 1e3
    return {"time_s": min(took), "median_s": statistics.median(took), "processor_s": min(busy)}


def kernels(step: Callable[[], Any], model: torch.nn.Module, device: str) -> dict[str, Any]:
    """Seconds of all kernels of a step, their number, and those that take the most time; of ops on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    model.zero_grad(set_to_none=True)
    with profile(activities=activities) as found:
        step()
        give_back()
    by_name: dict[str, float] = {}
    # What a user names, as `Optimizer.step` does, is an event of the device too, as long as all kernels in it.
    events = [e for e in found.events() or () if e.device_type.name == device.upper() and not e.is_user_annotation]
    for event in events:
        took_s = (event.time_range.elapsed_us() if device == "cuda" else event.self_cpu_time_total) / 1e6
        by_name[event.name[:60]] = by_name.get(event.name[:60], 0.0) + took_s
    most = sorted(by_name, key=by_name.__getitem__, reverse=True)[:10]
    longest = "; ".join(f"{name} {1e3 * by_name[name]:.3f} ms" for name in most)
    return {"kernels_s": sum(by_name.values()), "kernels": len(events), "longest": longest}


@contextlib.contextmanager
def history(path: str) -> Iterator[None]:
    """Write what the allocator of a GPU does meanwhile, to be replayed elsewhere; without stacks, which would take minutes."""
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    try:
        yield
        torch.cuda.memory._dump_snapshot(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def fingerprint(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A number that tells a tensor from others by any bit, made where it lies: the host would hash for seconds."""
    if tensor is None:
        return None
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    words = tensor.detach().contiguous().reshape(-1).view(kinds[tensor.element_size()]).long()
    places = torch.arange(words.numel(), device=words.device) * 0x9E3779B97F4A7C1 + 1
    return (words * ((places ^ (places >> 29)) | 1)).sum()  # odd factors: no change of one word is lost


def bits(step: Callable[[], Any], model: torch.nn.Module) -> str:
    """A hash of loss, parameters, gradients, buffers and random state of one step from a fixed seed."""
    torch.manual_seed(1)
    before = [b.clone() for b in model.buffers()]
    model.zero_grad(set_to_none=True)
    loss = step()
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    parameters = list(model.parameters())
    found = digest(*map(fingerprint, (loss, *parameters, *(p.grad for p in parameters), *model.buffers(), *states)))
    with torch.no_grad():
        for buffer, old in zip(model.buffers(), before, strict=True):
            buffer.copy_(old)
    model.zero_grad(set_to_none=True)
    return found
