"""The optimum of a graph without views, pinned ops or random states, by Dijkstra's algorithm.

A state is which ops have run and which values are live, as bits. `BruteForce` knows more rules, and is slow on ten ops.
"""

from __future__ import annotations

import heapq
from functools import cache

from checkmate import Problem


def optimum(problem: Problem) -> int | None:
    """The least cost of any order and any number of recomputations; None where no plan keeps the budget.

    Args:
        problem: The problem.
    """
    graph = problem.graph
    sizes = [value.size_bytes for value in graph.values]
    kept = sum(1 << v for v, value in enumerate(graph.values) if value.kept)
    reads = [sum(1 << v for v in set(op.inputs)) for op in graph.ops]
    makes = [sum(1 << v for v in op.outputs) for op in graph.ops]
    assert all(value.base is None for value in graph.values)
    assert all(op.recomputable and not op.replay_bytes and not op.clobbered_by for op in graph.ops)
    room, every = problem.budget_bytes - graph.resident_bytes, (1 << len(graph.ops)) - 1
    held = cache(lambda live: sum(size for v, size in enumerate(sizes) if live >> v & 1))
    best, queue = {(0, 0): 0}, [(0, (0, 0))]
    while queue:
        cost, (done, live) = heapq.heappop(queue)
        if cost > best[done, live]:
            continue
        if done == every and live & kept == kept:
            return cost
        following = [(cost, (done, live & ~(1 << v))) for v in range(len(sizes)) if live >> v & 1]
        for o, (op, read, made) in enumerate(zip(graph.ops, reads, makes, strict=True)):
            if live & read == read and live & made != made and held(live | made) + op.workspace_bytes <= room:
                following.append((cost + op.cost, (done | 1 << o, live | made)))
        for reached, state in following:
            if reached < best.get(state, reached + 1):
                best[state] = reached
                heapq.heappush(queue, (reached, state))
    return None
