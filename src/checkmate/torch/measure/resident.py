"""Gradients that exist while a graph runs, the device that it runs on, and the bytes that are free there."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch

from checkmate.torch.graph.storages import unique_bytes

T = TypeVar("T")


def gradient_bytes(example_inputs: Sequence[Any], accumulate: bool) -> int:
    """Bytes of the gradients of a graph's parameters that are held while it runs.

    If it may accumulate, gradients of earlier backwards may exist then: the bytes of missing gradients count too.
    """
    leaf = [t for t in example_inputs if isinstance(t, torch.Tensor) and t.is_leaf]
    coming = [t for t in leaf if t.requires_grad and t.grad is None] if accumulate else []
    return unique_bytes(t.grad for t in leaf if t.grad is not None) + unique_bytes(coming)


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Generator[None]:
    """Context in which a variable has a value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


_ROOM: ContextVar[int] = ContextVar("room", default=sys.maxsize)


def within_room(size_bytes: int) -> AbstractContextManager[None]:
    """Context in which measurements take no more memory than a budget or an outer context leaves."""
    return holding(_ROOM, min(size_bytes, _ROOM.get()))


_BEYOND: ContextVar[bool | None] = ContextVar("beyond", default=None)


def beyond_room(allowed: bool) -> AbstractContextManager[None]:
    """Context in which comparisons of bits may take more memory than a budget leaves, unless an outer context forbids it."""
    return holding(_BEYOND, allowed and _BEYOND.get() is not False)


def beyond_bytes(size_bytes: int, device: torch.device) -> int | None:
    """Bytes by which ``size_bytes`` exceeds the rest of a budget; None if there is no room for the excess."""
    excess = max(0, size_bytes - _ROOM.get())
    if excess and not _BEYOND.get():
        return None
    return excess if size_bytes <= _free_on_system_bytes(device) else None


def free_bytes(device: torch.device) -> int:
    """Bytes that can be allocated on a device now, within the budget and the free memory of the system."""
    return min(_ROOM.get(), _free_on_system_bytes(device))


def _free_on_system_bytes(device: torch.device) -> int:
    """Bytes that the system has free on a device; unlimited if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not a Linux
        available = sys.maxsize
    return min(available, left_in_container_bytes())


def left_in_container_bytes(folder: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that are left of the limit of a container; unlimited without a limit."""
    try:
        most, used, stat = ((folder / name).read_text() for name in ("memory.max", "memory.current", "memory.stat"))
        cached = next(int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file "))
        return int(most) - int(used) + cached  # the system frees the cache of files if memory is short
    except (OSError, ValueError, StopIteration):  # no cgroup, or "max"
        return sys.maxsize


def cuda_device(inputs: Sequence[Any], named: str | None = None) -> torch.device | None:
    """The CUDA device of a graph: a named one, else that of its inputs; None on a CPU."""
    if named:
        device = torch.device(named)
        return device if device.type == "cuda" else None
    return next((t.device for t in inputs if isinstance(t, torch.Tensor) and t.device.type == "cuda"), None)
