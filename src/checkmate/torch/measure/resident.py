"""Resident bytes that a graph does not show: gradients, parameters that others read, and other allocations on a CUDA device."""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from checkmate.torch.graph.storages import current_bytes, storage_key, strided_parts, unique_bytes
from checkmate.torch.options import Options


def gradient_bytes(example_inputs: Sequence[Any], accumulate: bool) -> int:
    """Bytes of the gradients of a graph's parameters that are held while it runs.

    Args:
        example_inputs: Inputs of the graph, its parameters among them.
        accumulate: Whether gradients of earlier backwards may exist when the graph runs, so that those missing now count.
    """
    leaf = [t for t in example_inputs if isinstance(t, torch.Tensor) and t.is_leaf]
    coming = [t for t in leaf if t.requires_grad and t.grad is None] if accumulate else []
    return unique_bytes(t.grad for t in leaf if t.grad is not None) + unique_bytes(coming)


def other_allocated_bytes(example_inputs: Sequence[Any], options: Options) -> int:
    """Bytes on the device that are neither inputs of a graph nor their gradients.

    Args:
        example_inputs: Inputs of the graph.
        options: Options of the backend; ``device`` names the device, by default that of the inputs.

    Returns:
        Bytes, from the CUDA allocator's count; 0 on a CPU, whose allocator keeps none.
    """
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    device = cuda_device(tensors, options)
    if device is None:
        return 0
    gc.collect()  # compilation leaves cycles, and with them models of before, which would be taken for resident
    seen = unique_bytes(tensors, current_bytes) + gradient_bytes(example_inputs, accumulate=False)
    return max(0, torch.cuda.memory_allocated(device) - seen)


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device now; unlimited where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_available_bytes(), _left_in_container_bytes())


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not a Linux
        return sys.maxsize


def _left_in_container_bytes() -> int:
    try:
        most, used = (int((Path("/sys/fs/cgroup") / name).read_text()) for name in ("memory.max", "memory.current"))
    except (OSError, ValueError):  # no cgroup, or "max"
        return sys.maxsize
    return most - used


def cuda_device(inputs: Sequence[Any], options: Options) -> torch.device | None:
    """The CUDA device that a graph is planned for; None on a CPU.

    Args:
        inputs: Inputs of the graph.
        options: Options of the backend; ``device`` names the device, by default that of the inputs.
    """
    if options.device:
        device = torch.device(options.device)
        return device if device.type == "cuda" else None
    return next((t.device for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "cuda"), None)


WeakStorage = Callable[[], torch.UntypedStorage | None]
"""A storage that is not kept alive."""


def unread_storages(example_inputs: Sequence[Any], options: Options) -> dict[int, WeakStorage]:
    """Parameters and buffers of the modules that are running now which a graph does not read.

    A CPU has no count of allocated bytes. A model takes them all, although other graphs, eager code or none may read some.

    Args:
        example_inputs: Inputs of the graph.
        options: Options of the backend; ``device`` names the device, by default that of the inputs.

    Returns:
        Storages by their keys; none on CUDA, where `other_allocated_bytes` counts them.
    """
    inputs = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    if cuda_device(inputs, options) is not None:
        return {}
    read = {storage_key(part) for t in inputs for part in strided_parts(t)}
    tensors = {id(t): t for module in _running_modules() for t in (*module.parameters(), *module.buffers())}
    parts = [p for t in tensors.values() if type(t) in _PLAIN for p in strided_parts(t) if p.device.type == "cpu"]
    return {key: weakref.ref(part.untyped_storage()) for part in parts if (key := storage_key(part)) not in read}


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
"""Types of tensors that hold their own storage. A DTensor of FSDP2 does not: its shards belong to the memory of the wrappers."""


def _running_modules() -> Iterator[nn.Module]:
    """Modules one of whose methods is on the stack of this thread."""
    frame = sys._getframe()
    while frame is not None:
        module = _local_of(frame, "self")
        if isinstance(module, nn.Module):
            yield module
        frame = frame.f_back


def _local_of(frame: FrameType, name: str) -> Any:
    """A local variable of a running function, or None.

    Before Python 3.13 (PEP 667) ``f_locals`` of a function is a dict with all its variables that the frame keeps until the
    function returns. A training loop then held its first batch until its end. The dict is emptied, unless it is also the result
    of a call of `locals`, which is the same one.
    """
    variables = frame.f_locals
    value = variables.get(name)
    function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if function and isinstance(variables, dict) and sys.getrefcount(variables) == _REFERENCES:
        variables.clear()
    return value


_REFERENCES = 3
"""Those of the frame, of a local variable and of the argument of `sys.getrefcount`."""
