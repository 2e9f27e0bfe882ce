"""Maximum flow in whole numbers (Dinic 1970). It can stop at any moment: every flow so far is a lower bound on the cut."""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.solvers.backends.kernels import kernel
from checkmate.solvers.clocks import Flag

Ints = npt.NDArray[np.int64]
Pairs = Sequence[tuple[Ints, Ints]]
"""Arcs in parts, each with the nodes at their tails and at their heads."""


class _Arcs(NamedTuple):
    """Arcs and their reverses, node after node."""

    start: Ints  # first arc of each node, shape [node + 1]
    head: Ints  # node that each arc leads to
    back: Ints  # the reverse of each arc


class Network:
    """Arcs between nodes, from a source to a sink. Some arcs have capacities, which each flow sets; the others are unlimited.

    `size` counts arcs and nodes: the work of a flow grows with it.
    """

    SOURCE: Final = 0
    SINK: Final = 1
    FIRST: Final = 2  # the first of the other nodes
    UNLIMITED: Final = 2**61  # more than any cut of interest

    def __init__(self, nodes: int, limited: Pairs, unlimited: Pairs = ()) -> None:
        none = np.zeros(0, dtype=np.int64)
        tails, heads = (np.concatenate([none, *part]) for part in zip(*limited, *unlimited, strict=True))
        self._unlimited = sum(len(tail) for tail, _ in unlimited)
        count = len(tails)
        tail = np.concatenate([tails, heads])
        order = np.argsort(tail, kind="stable")
        place = np.empty(2 * count, dtype=np.int64)
        place[order] = np.arange(2 * count)
        partner = (np.arange(2 * count) + count) % max(1, 2 * count)
        start = np.zeros(nodes + 1, dtype=np.int64)
        np.cumsum(np.bincount(tail, minlength=nodes), out=start[1:])
        self._given = place[:count]  # place of each given arc among all
        self._arcs = _Arcs(start, np.concatenate([heads, tails])[order], place[partner[order]])
        self.size = 2 * count + nodes + 1

    def flow(self, capacity: Ints, time_up: Flag) -> tuple[int, npt.NDArray[np.bool_]]:
        """The largest flow, or a smaller one if the time is up before it is found, for the capacity of each limited arc.

        Also returns whether each node can still be reached from the source: the source's side of a smallest cut, if the flow is
        the largest.
        """
        left = np.zeros(len(self._arcs.head), dtype=np.int64)
        left[self._given] = np.append(capacity, np.full(self._unlimited, self.UNLIMITED))
        nodes = len(self._arcs.start) - 1
        level = np.empty(nodes, dtype=np.int32)
        # Nodes in the order of their distances; the current arc of each; the arcs from the source to the search's node.
        work = tuple(np.empty(nodes + 1, dtype=np.int64) for _ in range(3))
        flow = _dinic(self._arcs, left, self.SOURCE, self.SINK, level, work, time_up)
        return int(flow), level >= 0


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
        # A depth-first search with an explicit stack. Each node remembers its current arc, so that no arc is tried twice
        # in a phase; after an augmentation the search continues from the first full arc.
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
