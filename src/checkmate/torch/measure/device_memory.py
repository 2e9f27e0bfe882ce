"""Bytes of all tensors on a device, and the state of optimizers, existing or to come.

On CUDA the caching allocator counts the bytes. PyTorch has no such count on a CPU: there a look at all objects that Python's
garbage collector tracks finds the tensors, in a tenth of a second or more. The process therefore looks only when the C library's
count of allocated memory, read in 40 to 500 microseconds, has grown (`LookDue`). Tensors that only C++ holds, for example those
that autograd has saved for an eager graph, are found through the graphs of the tensors that Python holds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import optim

from checkmate.torch._compat.dispatch import dispatches_in_python
from checkmate.torch._compat.engine import saved_by_autograd
from checkmate.torch.graph.host_weights import ON_HOST
from checkmate.torch.graph.optimizer_ops import initial_state, temporary_count, updates_parameters_separately
from checkmate.torch.graph.rng import cpu_rng_state_bytes
from checkmate.torch.graph.storages import CUDA_ALIGNMENT_BYTES, leaves, storage_bytes, storage_key, strided_parts, unique_bytes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The tensors on a device at some moment."""

    total_bytes: int
    storages: Mapping[int, int] | None  # bytes of each by its key; None on CUDA, where the allocator only has the total

    def besides(self, known: Mapping[int, int]) -> int:
        """Bytes without those of the ``known`` storages: a map from key to bytes."""
        if self.storages is None:
            return max(0, self.total_bytes - sum(known.values()))
        return self.total_bytes - sum(size for key, size in self.storages.items() if key in known)


def device_memory(device: torch.device) -> DeviceMemory:
    """The tensors on a CUDA device or the CPU now."""
    if device.type == "cuda":  # in every step: `torch.cuda.memory_allocated` sorts all 200 counts in Python
        stats = torch.cuda.memory_stats_as_nested_dict(device)
        return DeviceMemory(stats["allocated_bytes"]["all"]["current"] if stats else 0, None)
    held = [t for t in instances(torch.Tensor) if not dispatches_in_python(t)]  # tensors inside of others are tracked too
    storages: dict[int, int] = {}
    gradients = [t.grad for t in held if t.is_leaf and t.grad is not None]  # C++ alone may hold them
    for tensor in itertools.chain(held, gradients, saved_by_autograd(held)):
        if tensor.dtype is torch.uint8 and tensor.numel() == cpu_rng_state_bytes():
            continue  # the state of a generator, which Dynamo keeps while it compiles
        with contextlib.suppress(RuntimeError):  # a tensor without a storage, as in functorch and lazy modules
            parts = [p for p in strided_parts(tensor) if p.device.type == "cpu" and storage_key(p) not in ON_HOST]
            storages.update((storage_key(p), storage_bytes(p)) for p in parts)
    return DeviceMemory(sum(storages.values()), storages)


def instances(kind: type) -> Iterator[Any]:
    """All objects of a kind in the process. Checked by type, because proxies of other libraries claim to be of other classes."""
    objects = gc.get_objects()
    kinds = {t for t in set(map(type, objects)) if issubclass(t, kind)}
    return (o for o in objects if type(o) in kinds)


def state_to_come_bytes(parameters: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of state that the optimizers of some parameters on a device will allocate in their first step."""
    alignment = CUDA_ALIGNMENT_BYTES if device.type == "cuda" else 1
    return sum(missing_state_bytes(optimizer, alignment) or 0 for optimizer in optimizers_without_state(parameters))


def optimizers_without_state(parameters: Iterable[torch.Tensor]) -> list[optim.Optimizer]:
    """The optimizers of some parameters that have not made a step."""
    trained, owners = {id(p) for p in parameters}, instances(optim.Optimizer)
    return [o for o in owners if not o.state and any(id(p) in trained for g in o.param_groups for p in g["params"])]


_LEAST_GROWTH_BYTES = 1 << 15
"""Growth of allocated memory that is no reason for a look. Python itself allocates less than a kilobyte from step to step."""


@dataclass(slots=True)
class LookDue:
    """Whether the process has allocated enough memory since the last look to make another one due.

    If the C library has no count of its allocations, looks are in steps 1, 2, 4, 8 and so on.
    """

    heap_bytes: int = -_LEAST_GROWTH_BYTES  # allocated memory at the last look
    growth_bytes: int = _LEAST_GROWTH_BYTES  # makes a look due; doubled by each look that found no more tensors
    steps: int = 0
    _total_bytes: int = 0

    def __bool__(self) -> bool:
        """Whether a look is due; called once in each step."""
        self.steps += 1
        now = allocated_bytes()
        if now is None:
            return self.steps & (self.steps - 1) == 0
        due = now >= self.heap_bytes + self.growth_bytes or self.steps == 2
        self.heap_bytes = min(self.heap_bytes, now)  # memory that is freed must not hide memory that is allocated later
        return due

    def looked(self, total_bytes: int) -> None:
        """Note the bytes of all tensors that a look found."""
        self.growth_bytes = _LEAST_GROWTH_BYTES if total_bytes > self._total_bytes else 2 * self.growth_bytes
        self.heap_bytes, self._total_bytes = allocated_bytes() or 0, max(total_bytes, self._total_bytes)


def allocated_bytes() -> int | None:
    """Bytes that this process has allocated from the C library, which PyTorch's CPU allocator calls; None if it has no count."""
    count = _mallinfo()
    if count is None:
        return None
    found = count()
    return found.uordblks + found.hblkhd


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


@functools.cache
def _mallinfo() -> Callable[[], Any] | None:
    try:
        function = ctypes.CDLL(None).mallinfo2  # since glibc 2.33
    except (OSError, AttributeError, TypeError):
        return None
    function.restype = _MallInfo
    return function


_log = logging.getLogger("checkmate.torch")


def state_bytes(optimizer: optim.Optimizer, alignment: int = 1) -> int:
    """Bytes of an optimizer's state, including state that its first step has yet to allocate.

    Exact for torch's optimizers that update each parameter independently of the others. Other optimizers' state that does not
    exist yet is unknown: it counts as zero, with a warning in the log. Tensors are rounded up to the allocator's alignment.
    """
    missing = missing_state_bytes(optimizer, alignment)
    if missing is None:
        _log.warning(
            "the state that %s allocates at its first step is unknown and not reserved: pass its size as `reserve`, or run one "
            "step before compiling",
            type(optimizer).__name__,
        )
    return unique_bytes(t for state in optimizer.state.values() for t in leaves(state)) + (missing or 0)


def step_temporary_bytes(optimizer: optim.Optimizer, kind: str) -> int:
    """Bytes of temporary tensors during ``optimizer.step()`` on a type of device.

    On ``"cuda"`` torch's default ``foreach`` implementation has the temporaries of all parameters at once; on ``"cpu"`` the step
    loops over parameters and has the temporaries of one.
    """
    sizes = [
        (temporary_count(optimizer, group) or 0) * p.numel() * p.element_size()
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    ]
    return sum(sizes) if kind == "cuda" else max(sizes, default=0)


def missing_state_bytes(optimizer: optim.Optimizer, alignment: int = 1) -> int | None:
    """Bytes of the state that an optimizer has yet to allocate; None if they are unknown before its first step."""
    missing = [
        (group, p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad and not optimizer.state.get(p)
    ]
    if not missing:
        return 0
    if not updates_parameters_separately(optimizer):
        return None
    states = [initial_state(optimizer, group, torch.empty_like(p, device="meta")) for group, p in missing]
    tensors = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
    # Step counters may be in host memory.
    return sum(-(-t.nbytes // alignment) * alignment for t in tensors if t.is_meta or alignment == 1)
