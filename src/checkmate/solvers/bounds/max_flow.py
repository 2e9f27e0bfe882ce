"""Maximum flow in whole numbers (Dinic 1970), interrupted at any moment: every flow on the way is a lower bound on the cut."""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.solvers.alarm import Flag
from checkmate.solvers.backends.kernels import kernel

Ints = npt.NDArray[np.int64]


class Arcs(NamedTuple):
    """Arcs and their reverses, node after node.

    Attributes:
        start: First arc of each node. Shape ``[node + 1]``.
        head: Node that each arc leads to. Shape ``[arc]``.
        back: The reverse of each arc. Shape ``[arc]``.
        given: Place of each given arc among all. Shape ``[given arc]``.
    """

    start: Ints
    head: Ints
    back: Ints
    given: Ints


def build_arcs(nodes: int, tails: Ints, heads: Ints) -> Arcs:
    """Arcs in rows.

    Args:
        nodes: Number of nodes.
        tails: Node that each arc leaves. Shape ``[given arc]``.
        heads: Node that it leads to. Shape ``[given arc]``.
    """
    count = len(tails)
    tail = np.concatenate([tails, heads])
    order = np.argsort(tail, kind="stable")
    place = np.empty(2 * count, dtype=np.int64)
    place[order] = np.arange(2 * count)
    partner = (np.arange(2 * count) + count) % max(1, 2 * count)
    start = np.zeros(nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(tail, minlength=nodes), out=start[1:])
    return Arcs(start, np.concatenate([heads, tails])[order], place[partner[order]], place[:count])


def max_flow(arcs: Arcs, capacity: Ints, source: int, sink: int, time_up: Flag) -> tuple[int, npt.NDArray[np.bool_]]:
    """The largest flow, or a smaller one if the time is up before it is found.

    Args:
        arcs: The arcs.
        capacity: Capacity of each given arc, zero or more; no cut of interest has 2^62 in all. Shape ``[given arc]``.
        source: Node that the flow leaves.
        sink: Node that it goes to.
        time_up: Ends the search when it is raised.

    Returns:
        The flow, and whether each node can still be reached from the source: the source's side of a smallest cut, if the flow
        is a largest one. Shape ``[node]``.
    """
    left = np.zeros(len(arcs.head), dtype=np.int64)
    left[arcs.given] = capacity
    nodes = len(arcs.start) - 1
    level = np.empty(nodes, dtype=np.int32)
    work = _Work(*(np.empty(nodes + 1, dtype=np.int64) for _ in range(3)))
    flow = _dinic(arcs, left, source, sink, level, work, time_up)
    return int(flow), level >= 0


class _Work(NamedTuple):
    """Working arrays of the kernels.

    Attributes:
        queue: Nodes in the order of their distances. Shape ``[node + 1]``.
        place: Arc that each node is at. Shape ``[node + 1]``.
        path: Arcs from the source to the node that the search is at. Shape ``[node + 1]``.
    """

    queue: Ints
    place: Ints
    path: Ints


@kernel
def _levels(arcs, left, source, level, queue):
    """Distance of each node from the source along arcs with capacity left, or -1."""
    level[:] = -1
    level[source] = 0
    queue[0] = source
    first, count = 0, 1
    while first < count:
        u = queue[first]
        first += 1
        for e in range(arcs.start[u], arcs.start[u + 1]):
            v = arcs.head[e]
            if left[e] > 0 and level[v] < 0:
                level[v] = level[u] + 1
                queue[count] = v
                count += 1


@kernel
def _dinic(arcs, left, source, sink, level, work, time_up):
    """Augment along shortest paths until there is none. Changes ``left``; fills ``level``."""
    nodes = len(arcs.start) - 1
    queue, place, path = work
    total = 0
    while True:
        _levels(arcs, left, source, level, queue)
        if level[sink] < 0 or time_up[0] != 0:
            return total
        # A depth-first search with an explicit stack. Each node remembers the arc that it is at, so that none is tried twice
        # in a phase; after an augmentation the search goes on from the first arc that is full.
        for u in range(nodes):
            place[u] = arcs.start[u]
        depth = 0
        u = source
        while True:
            if u == sink:
                amount = left[path[0]]
                for k in range(1, depth):
                    amount = min(amount, left[path[k]])
                total += amount
                full = depth
                for k in range(depth - 1, -1, -1):
                    left[path[k]] -= amount
                    left[arcs.back[path[k]]] += amount
                    if left[path[k]] == 0:
                        full = k
                depth = full
                u = arcs.head[arcs.back[path[full]]]
                if time_up[0] != 0:
                    return total
                continue
            while place[u] < arcs.start[u + 1]:
                e = place[u]
                if left[e] > 0 and level[arcs.head[e]] == level[u] + 1:
                    break
                place[u] += 1
            if place[u] < arcs.start[u + 1]:
                path[depth] = place[u]
                depth += 1
                u = arcs.head[place[u]]
            elif depth == 0:
                break
            else:
                # A dead end: no path leads through it in this phase.
                level[u] = -1
                depth -= 1
                u = arcs.head[arcs.back[path[depth]]]
                place[u] += 1
