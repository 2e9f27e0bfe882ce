"""A bound for rows of ops whose values are read back from the last to the first: the fewest computations in all.

In f[0], ..., f[n-1] each op reads the value v of the op before it. In g[n-1], ..., g[0] each op reads a value of the op before
it, and g[j] also reads v[j]: the layers of a network and their gradients. Follow a computation of g[0] back: it reads an
instance that a computation of g[1] made, g[1] reads an instance of g[2], and so on. Between two of these computations the
instance is in memory. When g[j] runs, v[j] is live. Therefore memory holds at most c other values v in addition to the needs of
g[j]; when an f runs in between, at most c in addition to its own two. This is the reversal of n steps with c checkpoints. It
takes at least

    P(n, c) = 1 + ... + 1 + 2 + ... + 2 + 3 + ...      (n terms, k occurs binomial(c + k, c) times)

computations of the f, the first n included (Griewank 1992; Griewank and Walther 2000, whose `revolve` reaches it).
Each recomputation costs at least the least cost of an f. Nothing is assumed about other ops or the order, so the bound
holds for every plan. The bound is exact for unit chains; if bytes or costs differ, it uses the least ones.
"""

from __future__ import annotations

import math
from itertools import pairwise

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem

Link = tuple[int, int]
"""One layer of a row: the op g, and the value v that it reads."""


def row_bound(problem: Problem) -> float:
    """Bound the recomputation cost of every plan by the best row found; infinite if no plan exists."""
    graph = problem.graph
    if len(graph.ops) > 10_000:  # finding a row would take seconds
        return 0.0
    read = {v for v in range(len(graph.values)) if len(graph.readers[v]) > 1 and graph.values[v].base is None}
    sizes = sorted({graph.values[v].size_bytes for v in read} - {0})
    count = min(4, len(sizes))  # least sizes to try: a row of fewer, larger values can prove more
    tried = sorted({sizes[k * len(sizes) // count] for k in range(count)})
    return max((_bound_of(problem, _longest_row(graph, size)) for size in tried), default=0.0)


def computations(steps: int, checkpoints: int) -> int:
    """P: fewest computations that reverse a row of steps."""
    total, left, times = 0, steps, 1
    while left > 0:
        some = min(left, math.comb(checkpoints + times, checkpoints))
        total += some * times
        left -= some
        times += 1
    return total


def _longest_row(graph: Graph, size: int) -> list[Link]:
    """A longest row whose values have a least size, its last layer first.

    A link is a pair of an op and a value that the op reads. Link (b, w) can follow link (a, v) if b reads a value of a, and the
    op that makes v reads w. One pass over the ops in their order finds the longest path.
    """
    best: dict[Link, tuple[int, Link | None]] = {}
    longest: Link | None = None
    inputs = [set(op.inputs) for op in graph.ops]
    large = [[v for v in op.inputs if graph.values[v].size_bytes >= size and graph.values[v].base is None] for op in graph.ops]
    for g, op in enumerate(graph.ops):
        for v in large[g]:
            link = (g, v)
            length, _ = best.setdefault(link, (1, None))
            if longest is None or length > best[longest][0]:
                longest = link
            earlier = inputs[graph.producer[v]]
            for h in {h for w in op.outputs for h in graph.readers[w]}:
                for u in large[h]:
                    if u in earlier and (length + 1, link) > best.get((h, u), (1, link)):
                        best[(h, u)] = (length + 1, link)
    row: list[Link] = []
    while longest is not None:
        row.append(longest)
        longest = best[longest][1]
    return row[::-1]


def _bound_of(problem: Problem, row: list[Link]) -> float:
    """The bound of a row, its last layer first."""
    graph = problem.graph
    values = {v for _, v in row}
    steps = [graph.producer[v] for _, v in row]
    # All ops differ: the first reader reads the last step's value; from there reader indices only rise and step indices fall.
    if len(row) < 2:
        return 0.0
    budget = problem.budget_bytes - graph.resident_bytes
    unit = min(graph.values[v].size_bytes for v in values)
    # Follow one instance from each reader to the next: the largest, if a reader takes several values.
    carried = min(
        max(graph.values[w].size_bytes for w in {*graph.ops[g].outputs} & {*graph.ops[h].inputs})
        for (g, _), (h, _) in pairwise(row)
    )
    room = [budget - _needs(graph, g, values, v) for g, v in row]
    # A step after the first reads the value before its own; the first has none, and one more fits while it runs.
    for f, (_, above) in zip(steps[:-1], row[1:], strict=True):
        room.append(budget - carried - _needs(graph, f, values, above))
    first = budget - carried - _needs(graph, steps[-1], values, None)
    checkpoints = max(max(room) // unit, first // unit - 1)
    if checkpoints < 0:
        return math.inf
    return float((computations(len(row), checkpoints) - len(row)) * min(graph.ops[f].cost for f in steps))


def _needs(graph: Graph, o: int, values: set[int], read: int | None) -> int:
    """Bytes of an op, without those ``values`` of the row that it may not read at this moment; it surely reads ``read``."""
    op = graph.ops[o]
    own = {v for v in (*op.inputs, *op.outputs) if v not in values or v == read or v in op.outputs}
    return op.workspace_bytes + sum(graph.values[v].size_bytes for v in own if graph.values[v].base is None)
