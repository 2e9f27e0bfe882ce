"""PyTorch's CUDA allocator: its settings in this process, and the bytes of a plan that count against a budget."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch

from checkmate.allocators import CachingAllocator
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.frontend.counted_memory import Counted
from checkmate.oom.snapshot import Segment, snapshot_of
from checkmate.studies.reserved import Arena, allocator_peaks, smallest_arena
from checkmate.torch._compat.dispatch import no_modes
from checkmate.torch.graph.storages import storage_sizes
from checkmate.torch.options import BudgetOf

_log = logging.getLogger("checkmate.torch")


def allocator_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allocator's settings by name, from the environment; empty if all are the defaults.

    Examples:
        >>> allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True, max_split_size_mb:128"})
        {'expandable_segments': 'True', 'max_split_size_mb': '128'}
    """
    given = os.environ if environment is None else environment
    # The variable that overrides the others comes first (c10/core/AllocatorConfig.cpp).
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    text = next((given[name] for name in names if given.get(name)), "")
    return {name: value.strip() for name, value in re.findall(r"([^\s,:]+)\s*:\s*(\[[^\]]*\]|[^,]*)", text)}


def has_expandable_segments() -> bool:
    """Whether segments grow and shrink page by page, in place of segments of fixed sizes."""
    return allocator_settings().get("expandable_segments", "").lower() == "true"


def counted_memory(
    budget_of: BudgetOf, device: torch.device | None, resident: Iterable[torch.Tensor] = (), *, whole: Apart = False
) -> Counted | None:
    """The function that counts a plan against a budget on a CUDA device or a CPU; None if only the live bytes count.

    With segments of fixed sizes a block can be up to 1 MiB larger than its request. ``torch.cuda.max_memory_allocated`` counts
    whole blocks, and therefore the budget does too. ``resident`` has the tensors that exist before a step. The allocator gives
    the blocks of a stream to no other: ``whole`` is the stream of a whole step, or True if it is the caller's.
    """
    # These, and the settings of pinned memory, leave the segments of a device as they are.
    harmless = ("expandable_segments", "release_lock_on_", "graph_capture_", "per_process_", "throw_on_", "backend", "pinned_")
    others = ", ".join(name for name in allocator_settings() if not name.startswith(harmless))
    native = device is None or torch.cuda.get_allocator_backend() == "native"
    if budget_of == "reserved":
        if others or not native:
            raise OptionError(
                f"budget_of='reserved' cannot be kept with {others or 'another backend'} in the settings of PyTorch's allocator",
                hint="take it out of PYTORCH_CUDA_ALLOC_CONF or PYTORCH_ALLOC_CONF, where expandable_segments may stay",
            )
        return ReservedMemory(device, resident, whole=whole)
    if device is None or not native:
        return None
    if others:
        _log.warning("blocks may be larger than plans count them, with %s in the settings of PyTorch's allocator", others)
    return None if has_expandable_segments() else lambda graph, plan: allocator_peaks(graph, plan).allocated_bytes


class _Reserved(NamedTuple):
    address: int
    size_bytes: int
    pool: Any  # the `torch.cuda.MemPool` that it is in; None for the pool of all other tensors


Apart: TypeAlias = bool | torch.cuda.Stream
_RESERVED: dict[tuple[int | None, Apart], _Reserved] = {}
"""The last arena of each device, in and out of a memory pool, and of each stream: plans of several graphs share it."""


class ReservedMemory:
    """Memory that the CUDA allocator holds while a plan runs, if one block, the arena, was reserved for the plan before.

    Whole steps have a memory pool, to which no other tensor belongs; expandable segments need neither pool nor arena.
    """

    def __init__(self, device: torch.device | None, resident: Iterable[torch.Tensor] = (), *, whole: Apart = False) -> None:
        index = None if device is None else torch.cuda.current_device() if device.index is None else device.index
        self._device, self._steps = None if index is None else torch.device("cuda", index), 0
        pooled = index is not None and not has_expandable_segments() and hasattr(torch.cuda, "MemPool")
        self._key = index, pooled and whole
        self._before = storage_sizes(resident) if device is None else self._held()

    def __call__(self, graph: Graph, plan: Plan) -> int:
        """Predicted bytes of all segments."""
        return self._arena(graph, plan).reserved_bytes

    def prepare(self, graph: Graph, result: Result) -> None:
        """Reserve the memory for a plan in one piece, from which the allocator cuts its blocks."""
        if self._is_in_use():
            return
        size, last = self._arena(graph, result.plan).size_bytes, _RESERVED.pop(self._key, None)
        if last is not None and last.size_bytes > size:  # of another plan, which may run again
            peaks = allocator_peaks(graph, result.plan, self._before, arena_bytes=last.size_bytes)
            size = last.size_bytes if peaks.reserved_bytes <= result.budget_bytes else size
        del last  # with its pool
        if self._device is not None:
            torch.cuda.empty_cache()
        if size:
            arena = _RESERVED[self._key] = _Reserved(0, size, torch.cuda.MemPool(use_on_oom=True) if self._key[1] else None)
            with self.running():  # no mode sees a storage without a tensor: AOTAutograd traces now
                address = torch.UntypedStorage(size, device=self._device or "cpu").data_ptr()
            _RESERVED[self._key] = arena._replace(address=address)

    @property
    def pool(self) -> Any:
        """The memory pool of a step; None if its memory comes from the pool of all other tensors."""
        return _RESERVED[self._key].pool if self._key in _RESERVED else None

    def running(self) -> AbstractContextManager[Any]:
        """Context of a step: its memory comes from the pool of its arena, if that has one."""
        return nullcontext() if self.pool is None else torch.cuda.use_mem_pool(self.pool, self._device)

    def check(self, budget_bytes: int) -> None:
        """Warn if the device holds more than the budget after the first step; called at the beginning of each."""
        self._steps += 1
        held = torch.cuda.memory_reserved(self._device) if self._device is not None and self._steps == 2 else 0
        if held > budget_bytes:
            _log.warning(
                "the allocator holds %s after the first step, more than the budget of %s: what ran beside the plan is not in its "
                "prediction\nhint: call torch.cuda.empty_cache() once after the first step, or lower the budget by %s",
                *map(format_bytes, (held, budget_bytes, held - budget_bytes)),
            )

    def _arena(self, graph: Graph, plan: Plan) -> Arena:
        """The arena for a plan: the last one for as long as blocks are in use there, such as the gradients of an earlier step."""
        if not self._is_in_use():
            return smallest_arena(graph, plan, self._before)
        size = _RESERVED[self._key].size_bytes
        return Arena(size, allocator_peaks(graph, plan, self._before, arena_bytes=size).reserved_bytes)

    def _segments(self) -> list[Segment]:
        segments = snapshot_of({"segments": torch.cuda.memory_snapshot()}).segments
        return [segment for segment in segments if segment.device == self._key[0]]

    def _is_in_use(self) -> bool:
        arena = None if self._device is None else _RESERVED.get(self._key)
        if arena is None:
            return False
        captured = arena.pool is not None and arena.pool.use_count() > 1  # a CUDA graph keeps the memory of its pool
        return captured or any(s.address == arena.address and s.in_use for s in self._segments())

    def _held(self) -> CachingAllocator:
        """The allocator as it is now without cached segments, and without arenas: what is in use there belongs to steps."""
        torch.cuda.empty_cache()  # blocks of earlier work; segments with resident memory stay, unused parts included
        found = CachingAllocator(expandable=has_expandable_segments())
        arena = _RESERVED.get(self._key)
        for segment in self._segments():
            if arena is None or (segment.address != arena.address and (arena.pool is None or segment.pool != arena.pool.id)):
                found.hold(segment.total_size, segment.in_use, small=segment.segment_type == "small")
        return CachingAllocator(held=found.held, in_use=found.in_use) if self._key[1] else found


@functools.cache
def warm_up(device: torch.device | None, stream: torch.cuda.Stream | None = None) -> None:
    """Have the matrix library of a CUDA device allocate its workspaces, and thereby count them as resident bytes.

    cuBLAS and cuBLASLt keep a workspace of 8 to 32 MiB for each handle and stream, from the first product on, and PyTorch has a
    handle for each thread (aten/src/ATen/cuda/CublasHandlePool.cpp). This is one product in the thread of the forward and one in
    that of the backward, by both libraries, for the dtypes of training.
    """
    if device is None:
        return
    with no_modes(), torch.enable_grad(), torch.cuda.stream(stream):  # type: ignore[arg-type]  # None: the caller's
        for dtype in (torch.float32, torch.bfloat16):
            try:
                x, weight = (torch.zeros(64, 64, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
                bias = torch.zeros(64, dtype=dtype, device=device, requires_grad=True)
                (torch.nn.functional.linear(x, weight, bias) @ weight).sum().backward()
            except RuntimeError as error:  # a type that the device does not know
                _log.debug("no products of %s to warm up with: %s", dtype, error)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
