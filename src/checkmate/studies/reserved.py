"""The requests that a plan makes of an allocator, and the memory that PyTorch's CUDA caching allocator reserves for them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from checkmate.allocators import CachingAllocator, Chunk
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.studies.lifetimes import replays, storage_lifetimes


class AllocatorPeaks(NamedTuple):
    """Counts of an allocator while a plan runs repeatedly.

    A block can be larger than its request: by up to 511 bytes, and in a large segment by up to 1 MiB, which is not split off.
    """

    allocated_bytes: int  # peak of the blocks in use
    reserved_bytes: int  # of all segments


class Arena(NamedTuple):
    """One large segment, allocated and freed before the first step: the allocator then cuts a plan's large requests from it."""

    size_bytes: int
    reserved_bytes: int  # of all segments with this arena: the arena, segments of resident tensors and of small requests


Resident: TypeAlias = Iterable[int] | CachingAllocator


def allocator_peaks(graph: Graph, plan: Plan, resident: Resident = (), *, arena_bytes: int = 0) -> AllocatorPeaks:
    """Allocated and reserved bytes when a plan is run repeatedly, as PyTorch's native caching allocator counts them.

    It keeps every segment while the device has room. Only when an allocation fails does it release unused segments and try again,
    so a plan may run in fewer bytes. Source: c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h, PyTorch 2.13.

    ``resident`` has the sizes of resident tensors, in the order of their allocation, or is an allocator that holds them, which is
    not changed. The rest of the graph's resident bytes counts as one more. A block of ``arena_bytes`` is allocated and freed
    before the first step.

    Examples:
        >>> graph = Graph.from_dag(cost=[1, 2], size_bytes=[3 << 20, 30 << 20], edges=[(0, 1)], kept=[1])
        >>> plan = Plan.from_order(graph, [0, 1])
        >>> [peak >> 20 for peak in allocator_peaks(graph, plan, arena_bytes=36 << 20)]
        [33, 36]
    """
    return _replayed(requests(graph, plan), _resident(graph, resident), arena_bytes)


def smallest_arena(graph: Graph, plan: Plan, resident: Resident = ()) -> Arena:
    """The smallest arena found with which a plan needs no other large segment.

    All large requests of a plan are known before it runs, and come in the same order in every step. Blocks cut from one segment
    by best fit leave fewer bytes unused than a segment for each request.

    It reserves no more than the plan does without one; if none does, its size is 0. Expandable segments need none.

    Examples:
        >>> graph = Graph.from_dag(cost=[1, 2], size_bytes=[3 << 20, 30 << 20], edges=[(0, 1)], kept=[1])
        >>> [size >> 20 for size in smallest_arena(graph, Plan.from_order(graph, [0, 1]))]
        [34, 34]
    """
    sequence, start = requests(graph, plan), _resident(graph, resident)
    alone, before = _replayed(sequence, start, 0), start.held
    best = Arena(0, alone.reserved_bytes)
    if start.expandable:
        return best
    unit = 2 << 20  # of the size of a large segment
    # A larger arena is not always large enough if a smaller one is, but nearly always.
    low, high = -(-(alone.allocated_bytes - before) // unit), (alone.reserved_bytes - before) // unit
    for _ in range(8):
        if low >= high:
            break
        middle = max(1, (low + high) // 2)
        reserved = _replayed(sequence, start, middle * unit).reserved_bytes
        if reserved < best.reserved_bytes:
            best, high = Arena(middle * unit, reserved), middle
        else:
            low = middle + 1
    return best


class Request(NamedTuple):
    """One request to an allocator."""

    step: int  # of the plan, which makes the request
    block: int  # number of the block that is allocated or freed
    size_bytes: int  # bytes to allocate; 0 frees the block


def requests(graph: Graph, plan: Plan) -> list[Request]:
    """Requests for all storages, workspaces and replay states of a plan, in the order in which they are made.

    A block is allocated in its first step and freed in its last one. Within a step allocations come before frees, because
    an op's inputs are freed after the op has run. Empty storages and resident bytes make no requests.

    Examples:
        >>> graph = Graph.from_dag(cost=[1, 2], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> [(r.step, r.block, r.size_bytes) for r in requests(graph, Plan.from_order(graph, [0, 1]))]
        [(0, 0, 4), (1, 1, 2), (1, 0, 0)]
    """
    blocks = [(life.made_at, life.gone_at - 1, graph.values[life.value].size_bytes) for life in storage_lifetimes(graph, plan)]
    blocks += [(replay.first, replay.last, graph.ops[replay.op].replay_bytes) for replay in replays(graph, plan)]
    blocks += [(p, p, graph.ops[step.op].workspace_bytes) for p, step in enumerate(plan.steps) if isinstance(step, Compute)]
    found = [Request(made, k, size) for k, (made, _, size) in enumerate(blocks) if size]
    found += [Request(gone, k, 0) for k, (_, gone, size) in enumerate(blocks) if size and gone < len(plan.steps)]
    return sorted(found, key=lambda r: (r.step, not r.size_bytes))


def _resident(graph: Graph, resident: Resident) -> CachingAllocator:
    """The allocator that holds the resident bytes of a graph."""
    allocator, sizes = (
        (copy.deepcopy(resident), ()) if isinstance(resident, CachingAllocator) else (CachingAllocator(), tuple(resident))
    )
    for size in (*sizes, graph.resident_bytes - allocator.in_use - sum(sizes)):
        if size > 0:
            allocator.allocate(size)
    return allocator


def _replayed(sequence: Sequence[Request], start: CachingAllocator, arena_bytes: int) -> AllocatorPeaks:
    allocator = copy.deepcopy(start)
    if arena_bytes:
        allocator.release(allocator.allocate(arena_bytes))
    allocator.peak = allocator.in_use
    for _ in range(3):  # step 1 starts without cached segments; step 2 reaches the layout that later steps keep
        held: dict[int, Chunk] = {}
        for request in sequence:
            if request.size_bytes:
                held[request.block] = allocator.allocate(request.size_bytes)
            else:
                allocator.release(held.pop(request.block))
        for block in held.values():  # gradients and outputs are freed before the next step
            allocator.release(block)
    return AllocatorPeaks(allocator.peak, allocator.held)
