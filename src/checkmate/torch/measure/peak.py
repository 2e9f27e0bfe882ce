"""Measured peaks of allocated memory: of a function, and of trial steps on the real batch. Trial steps restore all state."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from checkmate.core.errors import CheckmateError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.result import Measured
from checkmate.core.units import seconds
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.aot import overwritten_inputs
from checkmate.torch._compat.dispatch import no_modes
from checkmate.torch._compat.profiler import memory_trace, outside_of_profilers, profiler_running
from checkmate.torch.graph.rng import generators_restored
from checkmate.torch.graph.storages import storage_key, unique_bytes
from checkmate.torch.measure.resident import cuda_device

_MARK = "checkmate::mark"


class ProfilerBusyError(CheckmateError, RuntimeError):
    """Memory on the CPU cannot be measured while another torch profiler is active."""


def measure_peak(fn: Callable[[], object], *, device: str | torch.device | None = None) -> int:
    """Peak of allocated bytes during a call, above the bytes allocated when it begins.

    On the CPU this comes from the allocator's reports to torch's profiler, on CUDA from
    ``torch.cuda.max_memory_allocated``; both are exact. Call a compiled function once or twice before
    measuring it: the first call compiles.

    Args:
        fn: The function; it is called once, without arguments.
        device: The device whose memory is measured; CUDA if it is in use, else the CPU.

    Returns:
        Bytes.

    Raises:
        ProfilerBusyError: The device is the CPU and another torch profiler is active.
        OptionError: ``fn`` is no function.

    Examples:
        >>> import torch
        >>> measure_peak(lambda: torch.ones(1000))
        4000
    """
    if not callable(fn):
        raise OptionError(f"{type(fn).__name__} cannot be called", hint="give a function: measure_peak(lambda: step(x, y))")
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    where = torch.device(device) if device is not None else torch.device("cuda" if in_use else "cpu")
    gc.collect()
    if where.type != "cuda" and profiler_running():
        raise ProfilerBusyError(
            "the peak cannot be measured while a torch profiler is active", hint="call measure_peak outside of the profiler"
        )
    with peaks(where) as (parts, _):
        fn()
    return parts[0][0]


def measure_time_and_memory(run: Callable[[], object], graph: Graph, cost: int) -> Measured:
    """Run a planned step five times: to warm up, three times by the clock, of which the shortest counts, and for its memory."""
    device = torch.device("cuda" if torch.cuda.is_available() and torch.cuda.is_initialized() else "cpu")
    run()
    times: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    curve: list[tuple[float, int]] = []
    if device.type == "cuda":
        peak_bytes = graph.resident_bytes + measure_peak(run, device=device)
    else:
        gc.collect()
        with memory_trace() as trace:
            run()
        peak_bytes = graph.resident_bytes + trace.peak()
        curve = _curve(trace.changes, graph.resident_bytes)
    planned_s = seconds(cost, graph.cost_unit)
    return Measured(peak_bytes=peak_bytes, seconds=min(times), planned_s=planned_s, curve=tuple(curve))


def _curve(changes: Sequence[tuple[float, int]], held: int, parts: int = 500) -> list[tuple[float, int]]:
    """The most bytes in each part of a step and the bytes at its end, for parts in which some were allocated or freed."""
    found: dict[int, tuple[int, int]] = {}
    for share, change in changes:
        held += change
        part = int(share * parts)
        found[part] = max(found.get(part, (0, 0))[0], held), held
    return [
        (at, size) for part, sizes in found.items() for at, size in zip((part / parts, (part + 0.5) / parts), sizes, strict=True)
    ]


@contextmanager
def peaks(device: torch.device, *, reserved: bool = False) -> Iterator[tuple[list[tuple[int, int]], Callable[[], None]]]:
    """Measure a block on a device; yields a list that is filled at the end of the block, and a function that ends a part of it.

    The list has the peak of each part, with ``reserved`` of what the allocator holds, and the bytes held at its end, above the
    bytes allocated when the block begins.
    """
    parts: list[tuple[int, int]] = []

    def mark() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            parts.append((most(device) - before, torch.cuda.memory_allocated(device) - before))
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with torch.profiler.record_function(_MARK):
                pass

    if device.type == "cuda":
        torch.cuda.synchronize(device)
        if reserved:
            torch.cuda.empty_cache()
        most = torch.cuda.max_memory_reserved if reserved else torch.cuda.max_memory_allocated
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield parts, mark
        mark()
        return
    with memory_trace() as trace:
        yield parts, mark
        mark()
    held = peak = 0
    for what, amount in trace.events:
        if what == "push" and amount == _MARK:
            parts.append((peak, held))
            peak = held
        elif what == "alloc":
            held += amount  # type: ignore[operator]
            peak = max(peak, held)


_log = logging.getLogger("checkmate.torch")


def measure_step(run: Callable[..., Any], inputs: Sequence[Any], *, hold_outputs: bool, reserved: bool = False) -> StepMemory:
    """Run two steps and measure the second; the first loads kernels and allocates buffers that stay.

    Inputs are passed as new leaf tensors that alias them: no gradient reaches a parameter, and no hook is called. Storages that
    the forward overwrites and the states of random generators are restored. A step that runs out of memory counts with all memory
    of the CUDA device: more than any budget. With ``reserved`` peaks are those of the memory that the device's allocator holds,
    all of which CUDA graphs would keep.
    """

    def measured() -> StepMemory:
        _step(run, inputs, hold_outputs, lambda: None)
        with peaks(cuda_device(inputs) or torch.device("cpu"), reserved=reserved) as (parts, mark):
            gradients = _step(run, inputs, hold_outputs, mark)
        (forward, between), (backward, _) = parts
        return StepMemory(forward_peak_bytes=forward, saved_bytes=between, backward_peak_bytes=backward, gradient_bytes=gradients)

    return outside_of_profilers(lambda: _on_trial(inputs, measured, everything=False))


def measure_whole_step(run: Callable[..., Any], inputs: Sequence[Any]) -> StepMemory:
    """Run two whole steps, with their updates, and measure the second; see `measure_step`. All inputs are restored."""

    def measured() -> StepMemory:
        run(*inputs)
        return StepMemory.of_whole_step(measure_peak(lambda: run(*inputs), device=cuda_device(inputs) or "cpu"))

    # AOTAutograd's metadata does not name parameters: updates were only marks in the traced step.
    return outside_of_profilers(lambda: _on_trial(inputs, measured, everything=True))


def _on_trial(inputs: Sequence[Any], measured: Callable[[], StepMemory], *, everything: bool) -> StepMemory:
    with _put_back(inputs, everything=everything), no_modes(), torch.enable_grad():
        try:
            return measured()
        except torch.OutOfMemoryError as error:  # a smaller plan may still fit
            _log.info("a measured step ran out of memory: %s", error)
        torch.cuda.empty_cache()
        _, most = torch.cuda.mem_get_info()
        return StepMemory(forward_peak_bytes=most, saved_bytes=most, backward_peak_bytes=most, gradient_bytes=0)


def _step(run: Callable[..., Any], inputs: Sequence[Any], hold_outputs: bool, between: Callable[[], None]) -> int:
    """Run a forward and a backward; return the bytes of the gradients that the backward leaves."""
    leaves = [t.data.requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t for t in inputs]
    results = [r for r in run(*leaves) if isinstance(r, torch.Tensor)]
    losses = [r for r in results if r.requires_grad]
    # A scalar output is the loss, and AOTAutograd itself makes zero gradients for the other outputs, as in the user's step.
    # Without one this is a part of a step, and the graph that follows it supplies the gradients: expanded scalars allocate
    # nothing before the backward reads them.
    losses = [r for r in losses if not r.ndim] or losses
    seeds = [torch.ones((), dtype=r.dtype, device=r.device).expand(r.shape) for r in losses]
    edges = [torch.autograd.graph.get_gradient_edge(r) for r in losses]
    del losses
    if not hold_outputs:
        results.clear()
    between()
    torch.autograd.backward(edges, seeds)
    return unique_bytes(t.grad for t in leaves if isinstance(t, torch.Tensor) and t.grad is not None)


@contextmanager
def _put_back(inputs: Sequence[Any], *, everything: bool = False) -> Iterator[None]:
    """Restore, on leaving, every random generator, and the inputs that the step overwrites by AOTAutograd's metadata."""
    written = None if everything else overwritten_inputs(len(inputs))
    chosen = [t for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and (written is None or i in written)]
    storages = {storage_key(t): t.untyped_storage() for t in chosen}
    saved = {key: storage.cpu() if storage.device.type == "cuda" else storage.clone() for key, storage in storages.items()}
    with generators_restored():
        try:
            yield
        finally:
            # Write the storage, not the tensor: writing a tensor raises its version counter, and autograd would then refuse the
            # backward of an earlier graph that saved the tensor.
            for key, storage in storages.items():
                storage.copy_(saved[key])
