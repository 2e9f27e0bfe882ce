"""Simulated annealing over orders: the same computations, less held where too much is."""

# The kernel is compiled by numba and written as it wants it: loops over flat arrays.
# pyright: basic

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from checkmate.core.graph import Graph
from checkmate.solvers.evict.decode import next_random, random_below, seed_random
from checkmate.solvers.evict.instance import rows

_MOVES = 200_000
_WORK = 40_000_000
"""Most places to pass, in all moves: about a second."""
_HEAT = 0.02
"""Share of the room by which the excess may rise in one move, at first."""


def reorder(graph: Graph, order: Sequence[int], room_bytes: float, seed: int) -> list[int]:
    """An order of the same computations that exceeds a room by less: fewer bytes, at fewer steps.

    Args:
        graph: A graph whose views are folded.
        order: Ops in an order that can run; an op may be computed again.
        room_bytes: Bytes above resident ones that a step may hold at no penalty.
        seed: Seed of the moves.
    """
    nodes = _Nodes(graph, order)
    random = np.zeros(1, dtype=np.uint64)
    seed_random(random, seed)
    best = np.arange(len(order), dtype=np.int64)
    heat = _HEAT * max(1.0, room_bytes)
    anneal(
        *rows(nodes.before), *rows(nodes.after), *rows(nodes.reads), *rows(nodes.makes),
        np.array(nodes.last, dtype=np.int64), np.array(nodes.size, dtype=np.float64),
        np.array([graph.ops[o].workspace_bytes for o in order], dtype=np.float64),
        float(room_bytes), _MOVES, _WORK, heat, 0.01 * heat, random, best,
    )  # fmt: skip
    return [order[k] for k in best.tolist()]


def first_computations(order: Sequence[int]) -> list[int]:
    """Each op of an order once, where it is computed first."""
    return list(dict.fromkeys(order))


class _Nodes:
    """An order as a graph of its own: a node a computation, an instance a value that it makes.

    Attributes:
        before: Nodes that come before each node. Shape ``[node]`` of lists.
        after: Nodes that come after it.
        reads: Instances that it reads, each once.
        makes: Instances that it makes.
        last: Node that reads each instance last, its maker if none does, or the number of nodes if it is kept.
        size: Bytes of each instance.
    """

    def __init__(self, graph: Graph, order: Sequence[int]) -> None:
        count = len(order)
        before: list[set[int]] = [set() for _ in order]
        self.reads: list[list[int]] = []
        self.makes: list[list[int]] = []
        self.last: list[int] = []
        self.size: list[int] = []
        newest: dict[int, int] = {}  # value that owns storage -> instance
        made_at: dict[int, int] = {}  # value -> node that made it last
        read_by: dict[int, list[int]] = {}  # value -> nodes that read it since
        first: dict[int, int] = {}
        runs: dict[int, list[int]] = {}
        for k, o in enumerate(order):
            op = graph.ops[o]
            first.setdefault(o, k)
            runs.setdefault(o, []).append(k)
            for v in op.inputs:
                before[k].add(made_at[v])
                read_by[v].append(k)
            read = list(dict.fromkeys(newest[graph.root[v]] for v in op.inputs))
            self.reads.append(read)
            for instance in read:
                self.last[instance] = k
            made: list[int] = []
            for v in op.outputs:
                if v in made_at:  # what still reads the old instance comes first
                    before[k].update(read_by[v])
                    before[k].add(made_at[v])
                made_at[v], read_by[v] = k, []
                if graph.values[v].base is None:
                    newest[v] = len(self.last)
                    made.append(len(self.last))
                    self.last.append(k)
                    self.size.append(graph.values[v].size_bytes)
            self.makes.append(made)
            before[k].discard(k)
        for v, value in enumerate(graph.values):
            if value.kept:
                self.last[newest[graph.root[v]]] = count
        for a, b in graph.order:
            before[first[b]].add(first[a])
        for o, op in enumerate(graph.ops):
            for c in op.clobbered_by:
                before[first[c]].update(runs[o])
        self.before = [sorted(nodes) for nodes in before]
        self.after: list[list[int]] = [[] for _ in order]
        for k, nodes in enumerate(self.before):
            for p in nodes:
                self.after[p].append(k)


@njit(cache=True, error_model="numpy")
def _sweep(order, low, high, held, read_start, reads, make_start, makes, last, size, workspace, room, held_after):
    """Excess of the places ``low`` to ``high``. ``held`` is live before them; what is after each goes to ``held_after``."""
    for place in range(low, high + 1):
        node = order[place]
        for q in range(read_start[node], read_start[node + 1]):
            if last[reads[q]] <= high:
                last[reads[q]] = place
        for q in range(make_start[node], make_start[node + 1]):
            if last[makes[q]] <= high:
                last[makes[q]] = place
    excess = 0.0
    for place in range(low, high + 1):
        node = order[place]
        freed = 0.0
        for q in range(make_start[node], make_start[node + 1]):
            held += size[makes[q]]
            if last[makes[q]] == place:
                freed += size[makes[q]]
        excess += max(0.0, held + workspace[node] - room)
        for q in range(read_start[node], read_start[node + 1]):
            if last[reads[q]] == place:
                freed += size[reads[q]]
        held -= freed
        held_after[place] = held
    return excess


@njit(cache=True, error_model="numpy")
def _shift(order, place, source, target):
    node = order[source]
    step = 1 if target > source else -1
    k = source
    while k != target:
        order[k] = order[k + step]
        place[order[k]] = k
        k += step
    order[target] = node
    place[node] = target


@njit(cache=True, error_model="numpy")
def anneal(
    before_start, before, after_start, after, read_start, reads, make_start, makes, last, size, workspace,
    room, moves, work, hot, cold, random, best,
):  # fmt: skip
    """Fill ``best`` with the order of least excess; returns it. A node moves between its last parent and first child."""
    count = len(best)
    order = best.copy()
    place = best.copy()
    after_place = np.zeros(count + 1)  # bytes held after each place
    excess = _sweep(order, 0, count - 1, 0.0, read_start, reads, make_start, makes, last, size, workspace, room, after_place)
    least = excess
    passed = 0
    for k in range(moves):
        done = max(k / moves, passed / work)
        if least <= 0.0 or done >= 1.0:
            break
        node = random_below(random, count)
        source = place[node]
        low, high = 0, count - 1
        for q in range(before_start[node], before_start[node + 1]):
            low = max(low, place[before[q]] + 1)
        for q in range(after_start[node], after_start[node + 1]):
            high = min(high, place[after[q]] - 1)
        if low >= high:
            continue
        target = low + random_below(random, high - low + 1)
        if target == source:
            continue
        low, high = min(source, target), max(source, target)
        held = after_place[low - 1] if low > 0 else 0.0
        old = _sweep(order, low, high, held, read_start, reads, make_start, makes, last, size, workspace, room, after_place)
        _shift(order, place, source, target)
        new = _sweep(order, low, high, held, read_start, reads, make_start, makes, last, size, workspace, room, after_place)
        heat = hot * (cold / hot) ** done
        passed += high - low + 1
        if new <= old or next_random(random) < np.exp((old - new) / heat):
            excess += new - old
            if excess < least - 1e-6:
                least = excess
                best[:] = order
        else:
            _shift(order, place, target, source)
            _sweep(order, low, high, held, read_start, reads, make_start, makes, last, size, workspace, room, after_place)
    return least
