"""What PyTorch's CUDA allocator keeps of the device for a plan: *reserved* memory, beyond what is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.cost.heap import Chunk, Heap
from checkmate.studies.requests import requests

_MIB = 2**20
_LEAST = 512  # every size is a multiple of it
_SMALL = 1 * _MIB  # up to here requests share segments of `_SMALL_SEGMENT`
_SMALL_SEGMENT = 2 * _MIB
_LARGE = 10 * _MIB  # up to here they share segments of `_LARGE_SEGMENT`; beyond, each has its own
_LARGE_SEGMENT = 20 * _MIB
_ROUND = 2 * _MIB  # to which segments of their own are rounded up
_STEPS = 3  # a plan settles into a layout in its second run


def reserved_bytes(graph: Graph, plan: Plan, resident: Iterable[int] = ()) -> int:
    """Bytes that the allocator takes of the device while a plan runs again and again.

    Its policy is that of PyTorch's native caching allocator with default settings, which never gives a segment back while the
    device has room; where it has none, it first gives back what is free. Source: c10/cuda/CUDACachingAllocator.cpp and
    c10/core/AllocatorConfig.h, PyTorch 2.13.

    Args:
        graph: The graph.
        plan: The plan.
        resident: Sizes in bytes of what is resident, in the order in which it was allocated; what they lack of the
            graph's resident bytes counts as one more.

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
    asked = requests(graph, plan)
    for _ in range(_STEPS):
        held: dict[int, Chunk] = {}
        for request in asked:
            if request.size_bytes:
                held[request.block] = allocator.allocate(request.size_bytes)
            else:
                allocator.release(held.pop(request.block))
        for block in held.values():  # gradients and outputs, gone before the next step
            allocator.release(block)
    return allocator.held


@dataclass(slots=True)
class CachingAllocator(Heap):
    """PyTorch's caching allocator: small and large requests apart, and segments that are kept.

    Examples:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(1000)
        >>> allocator.in_use, allocator.held
        (1024, 2097152)
    """

    def allocate(self, size_bytes: int) -> Chunk:
        """Hand out the smallest free block that is large enough, or one of a new segment; its rest is split off."""
        size = max(_LEAST, -(-size_bytes // _LEAST) * _LEAST)
        small = size <= _SMALL
        block = self._smallest(size, small) or self._extend(_segment_bytes(size), small)
        rest = block.size - size
        if rest >= _LEAST if small else rest > _SMALL:
            self._cut(block, size)
        return self._hand_out(block)


def _segment_bytes(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _LARGE else -(-size // _ROUND) * _ROUND
