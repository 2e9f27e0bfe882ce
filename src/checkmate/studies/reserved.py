"""Reserved memory of a plan: device memory that PyTorch's CUDA caching allocator holds, allocated or not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.cost.heap import Chunk, Heap
from checkmate.studies.requests import requests

_MIB: Final = 2**20

# PyTorch's constants, with its names: c10/core/AllocatorConfig.h, PyTorch 2.13. They are part of what is simulated.
_MIN_BLOCK: Final = 512
"""kMinBlockSize: every size is rounded up to a multiple of it."""
_SMALL_SIZE: Final = 1 * _MIB
"""kSmallSize: the largest request that is served from small segments."""
_SMALL_BUFFER: Final = 2 * _MIB
"""kSmallBuffer: size of a small segment."""
_MIN_LARGE_ALLOC: Final = 10 * _MIB
"""kMinLargeAlloc: smaller requests share segments of `_LARGE_BUFFER`; others have a segment each."""
_LARGE_BUFFER: Final = 20 * _MIB
"""kLargeBuffer: size of a shared large segment."""
_ROUND_LARGE: Final = 2 * _MIB
"""kRoundLarge: other segments are rounded up to a multiple of it."""

_STEPS: Final = 3
"""Runs of the plan. The first starts without cached segments; the second reaches the layout that later runs keep."""


def reserved_bytes(graph: Graph, plan: Plan, resident: Iterable[int] = ()) -> int:
    """Bytes that the allocator reserves on the device when a plan is run repeatedly.

    PyTorch's native caching allocator with default settings. It keeps every segment while the device has room; only
    when an allocation fails does it release unused segments and try again, so that a plan may run in less than this. Source:
    c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, PyTorch 2.13.

    Args:
        graph: The graph.
        plan: The plan.
        resident: Sizes in bytes of resident tensors, in the order of their allocation; the rest of the graph's resident
            bytes counts as one more.

    Returns:
        Bytes of all segments: at least the allocated peak.

    Raises:
        PlanError: The plan cannot be run.

    Examples:
        >>> graph = Graph.from_dag(cost=[1, 2], size_bytes=[3 << 20, 30 << 20], edges=[(0, 1)], kept=[1])
        >>> reserved_bytes(graph, Plan.from_order(graph, [0, 1])) >> 20
        50
    """
    allocator = CachingAllocator()
    sizes = list(resident)
    for size in (*sizes, graph.resident_bytes - sum(sizes)):
        if size > 0:
            allocator.allocate(size)
    sequence = requests(graph, plan)
    for _ in range(_STEPS):
        held: dict[int, Chunk] = {}
        for request in sequence:
            if request.size_bytes:
                held[request.block] = allocator.allocate(request.size_bytes)
            else:
                allocator.release(held.pop(request.block))
        for block in held.values():  # gradients and outputs are freed before the next step
            allocator.release(block)
    return allocator.held


@dataclass(slots=True)
class CachingAllocator(Heap):
    """PyTorch's caching allocator: separate pools for small and large requests, and no segment is released.

    Examples:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(1000)
        >>> allocator.in_use, allocator.held
        (1024, 2097152)
    """

    def allocate(self, size_bytes: int) -> Chunk:
        """Allocate the smallest free block that is large enough, or one in a new segment.

        The rest of the block is split off if it is at least 512 bytes in a small segment, or more than 1 MiB in a large one
        (should_split): smaller rests stay with it as internal fragmentation.

        Args:
            size_bytes: Bytes requested.
        """
        size = max(_MIN_BLOCK, -(-size_bytes // _MIN_BLOCK) * _MIN_BLOCK)
        small = size <= _SMALL_SIZE
        block = self._smallest(size, small) or self._extend(_segment_bytes(size), small)
        rest = block.size - size
        if rest >= _MIN_BLOCK if small else rest > _SMALL_SIZE:
            self._cut(block, size)
        return self._hand_out(block)


def _segment_bytes(size: int) -> int:
    if size <= _SMALL_SIZE:
        return _SMALL_BUFFER
    return _LARGE_BUFFER if size < _MIN_LARGE_ALLOC else -(-size // _ROUND_LARGE) * _ROUND_LARGE
