"""Reserved memory of a plan: device memory that PyTorch's CUDA caching allocator holds, allocated or not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from checkmate.allocators.heap import Chunk
from checkmate.allocators.pytorch import CachingAllocator
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.studies.requests import requests

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
