"""Reserved memory of a plan: device memory that PyTorch's CUDA caching allocator holds, allocated or not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from checkmate.allocators import CachingAllocator, Chunk
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.studies.requests import Request, requests

_STEPS: Final = 3
"""Runs of the plan. The first starts without cached segments; the second reaches the layout that later runs keep."""

_GRANULE: Final = 2 << 20
"""Sizes of arenas that are tried are multiples of it, as those of large segments are."""

_TRIES: Final = 8
"""Sizes of arenas that are tried, between the smallest conceivable and the smallest known to be large enough."""


class AllocatorPeaks(NamedTuple):
    """Counts of an allocator while a plan runs repeatedly.

    Attributes:
        allocated_bytes: Peak of the blocks in use. A block can be larger than what was requested: by up to 511 bytes, and in a
            large segment by up to 1 MiB, which the allocator does not split off.
        reserved_bytes: Bytes of all segments.
    """

    allocated_bytes: int
    reserved_bytes: int


class Arena(NamedTuple):
    """One large segment that is allocated and freed before the first step, so that the large requests of a plan are cut from it.

    Attributes:
        size_bytes: Its size.
        reserved_bytes: Bytes of all segments then: the arena, those of what is resident, and those of small requests.
    """

    size_bytes: int
    reserved_bytes: int


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
    return allocator_peaks(graph, plan, resident).reserved_bytes


def allocator_peaks(graph: Graph, plan: Plan, resident: Iterable[int] = (), *, arena_bytes: int = 0) -> AllocatorPeaks:
    """Allocated and reserved bytes when a plan is run repeatedly, as PyTorch's native caching allocator counts them.

    Args:
        graph: The graph.
        plan: The plan.
        resident: Sizes of resident tensors; see `reserved_bytes`.
        arena_bytes: Size of a block that is allocated and freed before the first step; 0 for none.

    Raises:
        PlanError: The plan cannot be run.

    Examples:
        >>> graph = Graph.from_dag(cost=[1, 2], size_bytes=[3 << 20, 30 << 20], edges=[(0, 1)], kept=[1])
        >>> plan = Plan.from_order(graph, [0, 1])
        >>> [peak >> 20 for peak in allocator_peaks(graph, plan, arena_bytes=36 << 20)]
        [33, 36]
    """
    return _replayed(requests(graph, plan), _resident(graph, resident), arena_bytes)


def smallest_arena(graph: Graph, plan: Plan, resident: Iterable[int] = ()) -> Arena:
    """The smallest arena found from which a plan is served without another large segment.

    All large requests of a plan are known before it runs, and come in the same order in every step. Cut from one segment by
    best fit they leave less unused than in a segment each.

    Args:
        graph: The graph.
        plan: The plan.
        resident: Sizes of resident tensors; see `reserved_bytes`.

    Returns:
        The arena. It reserves no more than the plan does without one; if none does, its size is 0.

    Raises:
        PlanError: The plan cannot be run.

    Examples:
        >>> graph = Graph.from_dag(cost=[1, 2], size_bytes=[3 << 20, 30 << 20], edges=[(0, 1)], kept=[1])
        >>> [size >> 20 for size in smallest_arena(graph, Plan.from_order(graph, [0, 1]))]
        [34, 34]
    """
    sequence, sizes = requests(graph, plan), _resident(graph, resident)
    alone = _replayed(sequence, sizes, 0)
    before = _replayed([], sizes, 0).reserved_bytes
    best = Arena(0, alone.reserved_bytes)
    # Whether an arena is large enough does not rise with its size at every byte, but it does by and large.
    low, high = -(-(alone.allocated_bytes - before) // _GRANULE), (alone.reserved_bytes - before) // _GRANULE
    for _ in range(_TRIES):
        if low >= high:
            break
        middle = max(1, (low + high) // 2)
        reserved = _replayed(sequence, sizes, middle * _GRANULE).reserved_bytes
        if reserved < best.reserved_bytes:
            best, high = Arena(middle * _GRANULE, reserved), middle
        else:
            low = middle + 1
    return best


def _resident(graph: Graph, resident: Iterable[int]) -> list[int]:
    sizes = list(resident)
    return [size for size in (*sizes, graph.resident_bytes - sum(sizes)) if size > 0]


def _replayed(sequence: Sequence[Request], resident: Sequence[int], arena_bytes: int) -> AllocatorPeaks:
    allocator = CachingAllocator()
    for size in resident:
        allocator.allocate(size)
    if arena_bytes:
        allocator.release(allocator.allocate(arena_bytes))
    allocator.peak = allocator.in_use
    for _ in range(_STEPS):
        held: dict[int, Chunk] = {}
        for request in sequence:
            if request.size_bytes:
                held[request.block] = allocator.allocate(request.size_bytes)
            else:
                allocator.release(held.pop(request.block))
        for block in held.values():  # gradients and outputs are freed before the next step
            allocator.release(block)
    return AllocatorPeaks(allocator.peak, allocator.held)
