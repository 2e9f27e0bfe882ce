"""Simulated annealing over orders: the same computations, with fewer bytes over a budget.

The eviction search keeps the order of first computations that it is given; this gives it others. It matters at tight
budgets and on graphs that are no training steps: a layered graph of 100 ops at 0.8 of its peak came from an overhead of
1.0118 to 1.0000, ResNet-50 at 3 % of its range from 1.196 to 1.160, while at moderate budgets bounds show that no order gains
more than 0.05 %.

Annealing after Kirkpatrick et al. (1983), with the move of scheduling: one computation to another place between its last
predecessor and its first successor. Compared with an annealing that also adds and removes computations, which is
slower a move, the division of work is: order here, what to compute again in the eviction search.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from checkmate.core.graph import Graph
from checkmate.solvers.alarm import Flag, no_alarm
from checkmate.solvers.backends.kernels import kernel
from checkmate.solvers.evict.decode import copy_range, next_random, random_below, seed_random
from checkmate.solvers.evict.instance import Floats, Ints, rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ReorderParameters:
    """Parameters of `reorder`.

    Attributes:
        moves: Most moves tried.
        work: Most places passed in all moves together, which limits long moves on large graphs: about a second.
        temperature: Rise of the excess that a move may make at first, as a share of the room. The result depends on it more than
            on the time: in the prototype a start at 1e-3 of the cost gained 0.1 % in 23 s, one at 1e-4 gained 0.4 % in 5 s.
        cooling: Temperature at the end, as a share of that at the start; it falls geometrically.
    """

    moves: int = 200_000
    work: int = 40_000_000
    temperature: float = 0.02
    cooling: float = 0.01


PARAMETERS = ReorderParameters()


def reorder(graph: Graph, order: Sequence[int], room_bytes: float, seed: int, time_up: Flag | None = None) -> list[int]:
    """An order of the same computations whose steps hold fewer bytes over a room.

    Args:
        graph: A graph whose views are folded.
        order: Ops in an order that can run; an op may be computed again.
        room_bytes: Bytes above resident ones that a step may hold at no penalty. The penalty is the sum over all steps of what
            exceeds it: a smoother aim than the peak, which most moves leave as it is.
        seed: Seed of the moves.
        time_up: Ends the moves when it is raised; by default nothing does.

    Returns:
        The order of the least penalty seen; ``order`` itself if none is lower.
    """
    computations = _Computations(graph, order)
    random = np.zeros(1, dtype=np.uint64)
    seed_random(random, seed)
    best = np.arange(len(order), dtype=np.int64)
    hot = PARAMETERS.temperature * max(1.0, room_bytes)
    settings = Annealing(
        room=float(room_bytes), moves=PARAMETERS.moves, work=PARAMETERS.work, hot=hot, cold=PARAMETERS.cooling * hot
    )
    work = Work(best.copy(), best.copy(), np.zeros(len(order) + 1))
    anneal(computations.arrays(), work, settings, random, no_alarm() if time_up is None else time_up, best)
    return [order[k] for k in best.tolist()]


class Nodes(NamedTuple):
    """The computations of an order as flat arrays for the kernels; lists are in compressed sparse rows (`rows`).

    Attributes:
        before_start: Start of each node's predecessors in ``before``. Shape ``[node + 1]``.
        before: Nodes that come before it.
        after_start: Start of each node's successors in ``after``. Shape ``[node + 1]``.
        after: Nodes that come after it.
        read_start: Start of the instances that each node reads in ``reads``. Shape ``[node + 1]``.
        reads: Those instances.
        make_start: Start of the instances that each node makes in ``makes``. Shape ``[node + 1]``.
        makes: Those instances.
        last: Place that reads each instance last; kept up to date by the kernels. Shape ``[instance]``.
        size: Bytes of each instance. Shape ``[instance]``.
        workspace: Workspace of each node, in bytes. Shape ``[node]``.
    """

    before_start: Ints
    before: Ints
    after_start: Ints
    after: Ints
    read_start: Ints
    reads: Ints
    make_start: Ints
    makes: Ints
    last: Ints
    size: Floats
    workspace: Floats


class Work(NamedTuple):
    """Working arrays of the kernels.

    Attributes:
        order: Node at each place. Shape ``[node]``.
        place: Place of each node. Shape ``[node]``.
        held_after: Bytes held after each place. Shape ``[node + 1]``.
    """

    order: Ints
    place: Ints
    held_after: Floats


class Annealing(NamedTuple):
    """How to anneal. All fields are of these very types: others would make numba compile another version.

    Attributes:
        room: Bytes that a step may hold at no penalty.
        moves: Most moves.
        work: Most places passed.
        hot: Temperature at the start, in bytes.
        cold: Temperature at the end, in bytes.
    """

    room: float
    moves: int
    work: int
    hot: float
    cold: float


class _Computations:
    """An order as a graph with a node for each computation and an instance for each value that one makes.

    Every read stays with its instance, so all orders of this graph compute the same and cost the same.

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
        self.workspace = [graph.ops[o].workspace_bytes for o in order]
        newest: dict[int, int] = {}  # value that owns storage -> instance
        made_at: dict[int, int] = {}  # value -> node that made it last
        read_by: dict[int, list[int]] = {}  # value -> nodes that have read it since
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
                # A plan reads the newest instance. So a computation of v comes after all reads of the instance before it,
                # or these would read another; and so one instance of a value is live at a time.
                if v in made_at:
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
        # `order` is about first computations alone; an op that overwrites comes after all computations of what it disturbs.
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

    def arrays(self) -> Nodes:
        return Nodes(
            *rows(self.before),
            *rows(self.after),
            *rows(self.reads),
            *rows(self.makes),
            last=np.array(self.last, dtype=np.int64),
            size=np.array(self.size, dtype=np.float64),
            workspace=np.array(self.workspace, dtype=np.float64),
        )


@kernel
def _sweep(nodes, order, low, high, held, room, held_after):
    """Excess of the places ``low`` to ``high``, both included.

    Only these places change in a move between them: what is live before ``low`` and after ``high`` depends on which
    computations are there, not on their order. So a move costs its distance, not the length of the plan.

    Args:
        nodes: The computations; ``last`` is updated for instances whose last reader is among these places.
        order: Node at each place.
        low: First place.
        high: Last place.
        held: Bytes live before ``low``.
        room: Bytes at no penalty.
        held_after: Filled with the bytes live after each of the places. Shape ``[place + 1]``.
    """
    last, size = nodes.last, nodes.size
    for place in range(low, high + 1):
        node = order[place]
        for q in range(nodes.read_start[node], nodes.read_start[node + 1]):
            if last[nodes.reads[q]] <= high:
                last[nodes.reads[q]] = place
        for q in range(nodes.make_start[node], nodes.make_start[node + 1]):
            if last[nodes.makes[q]] <= high:
                last[nodes.makes[q]] = place
    excess = 0.0
    for place in range(low, high + 1):
        node = order[place]
        freed = 0.0
        for q in range(nodes.make_start[node], nodes.make_start[node + 1]):
            held += size[nodes.makes[q]]
            if last[nodes.makes[q]] == place:
                freed += size[nodes.makes[q]]
        excess += max(0.0, held + nodes.workspace[node] - room)
        for q in range(nodes.read_start[node], nodes.read_start[node + 1]):
            if last[nodes.reads[q]] == place:
                freed += size[nodes.reads[q]]
        held -= freed
        held_after[place] = held
    return excess


@kernel
def _shift(order, place, source, target):
    """Move the node at one place to another; those between move up by one."""
    node = order[source]
    step = 1 if target > source else -1
    k = source
    while k != target:
        order[k] = order[k + step]
        place[order[k]] = k
        k += step
    order[target] = node
    place[node] = target


@kernel
def anneal(nodes, work, settings, random, time_up, best):
    """Fill ``best`` with the order of least excess seen, and return its excess.

    Args:
        nodes: The computations, numbered by their places in the order to start from.
        work: Working arrays, the order to start from and its inverse in them.
        settings: How to anneal.
        random: State of the random numbers.
        time_up: Ends the moves when it is not 0. Shape ``[1]``.
        best: The order to start from; changed in place. Shape ``[node]``.
    """
    count = len(best)
    room = settings.room
    order, place, held_after = work
    excess = _sweep(nodes, order, 0, count - 1, 0.0, room, held_after)
    least = excess
    passed = 0
    for k in range(settings.moves):
        done = max(k / settings.moves, passed / settings.work)
        if least <= 0.0 or done >= 1.0 or time_up[0] != 0:
            break
        node = random_below(random, count)
        source = place[node]
        low, high = 0, count - 1
        for q in range(nodes.before_start[node], nodes.before_start[node + 1]):
            low = max(low, place[nodes.before[q]] + 1)
        for q in range(nodes.after_start[node], nodes.after_start[node + 1]):
            high = min(high, place[nodes.after[q]] - 1)
        if low >= high:
            continue
        target = low + random_below(random, high - low + 1)
        if target == source:
            continue
        low, high = min(source, target), max(source, target)
        held = held_after[low - 1] if low > 0 else 0.0
        old = _sweep(nodes, order, low, high, held, room, held_after)
        _shift(order, place, source, target)
        new = _sweep(nodes, order, low, high, held, room, held_after)
        temperature = settings.hot * (settings.cold / settings.hot) ** done
        passed += high - low + 1
        if new <= old or next_random(random) < np.exp((old - new) / temperature):
            excess += new - old
            if excess < least - 1e-6:  # bytes are whole: less is the rounding of the sums
                least = excess
                copy_range(order, 0, count, best, 0)
        else:
            _shift(order, place, target, source)
            _sweep(nodes, order, low, high, held, room, held_after)  # sets ``last`` and ``held_after`` back
    return least
