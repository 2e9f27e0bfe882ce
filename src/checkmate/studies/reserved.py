"""What PyTorch's CUDA allocator keeps of the device for a plan: *reserved* memory, beyond what is allocated."""

from __future__ import annotations

from collections.abc import Iterable

from checkmate.allocators.heap import Chunk
from checkmate.allocators.pytorch import CachingAllocator
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.studies.requests import requests

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
