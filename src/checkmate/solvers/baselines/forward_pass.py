"""The forward pass for the checkpointing heuristics: points to cut at, and plans that drop values until a given stage.

Chen et al. (2016) and Griewank and Walther (2000) are stated for chains of layers, each of which runs forward once and
backward once. On a graph with skips, several outputs and views, their rules still choose the forward values to drop and the
stages from which to hold them again. The decoder of the eviction search turns these choices into an order on any graph.
Therefore all heuristics share one memory account, and their plans compare with other solvers' byte by byte.
"""

# The kernels of the eviction search are compiled by numba and have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.core.units import format_bytes
from checkmate.solvers.flat_graph import NEVER
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session, searched

Points = Literal["articulation", "linearized"]

Drops = Mapping[int, int]
"""Dropped op -> stage from which its outputs are held again."""


class ForwardPass:
    """Forward ops in order, the stage of each op's first backward read, and plans that drop some values until then.

    All checkpointing heuristics reduce to this: a value that is not dropped is held from its op to its last
    use. A dropped value is freed after its last forward use and computed again on demand: before a given stage for one
    stage only, from then on to be held. Values that may not be computed again are never dropped.

    The problem's views are folded. Ops that are computed on demand are not part of the segments.
    `first_backward_read` is the first stage outside the forward pass that reads an output of an op, or `NEVER`; for outputs
    that are only kept, the last stage.
    """

    def __init__(self, problem: Problem, on_demand: frozenset[int]) -> None:
        from checkmate.solvers.evict.search import Search

        self.graph = graph = problem.graph
        self.ops = [o for o, op in enumerate(graph.ops) if op.phase == "forward" and o not in on_demand]
        self._search = Search(problem, on_demand, seed=0)
        stage = self._search.stage
        forward = set(self.ops)
        self.first_backward_read = [NEVER] * len(graph.ops)
        self._touched = [stage.get(o, NEVER) for o in range(len(graph.ops))]
        # Values are dropped after the last forward read. Readers on demand have no stage; they run when a target needs them.
        for o in self.ops:
            readers = {r for v in graph.ops[o].outputs for r in graph.readers[v] if r in stage}
            self._touched[o] = max([stage[o], *(stage[r] for r in readers if r in forward)])
            self.first_backward_read[o] = min((stage[r] for r in readers - forward), default=NEVER)
            if self.first_backward_read[o] == NEVER and any(graph.values[v].kept for v in graph.ops[o].outputs):
                self.first_backward_read[o] = len(stage) - 1

    def size_bytes(self, o: int) -> int:
        """Bytes of an op's outputs."""
        return sum(self.graph.values[v].size_bytes for v in self.graph.ops[o].outputs)

    def points(self, kind: Points) -> list[int]:
        """Forward ops at which the pass may be cut, in order: all, or those through which every path goes."""
        return list(self.ops) if kind == "linearized" else articulation_points(self.graph, self.ops)

    def schedule(self, until: Drops) -> tuple[int, int, list[int]] | None:
        """Cost, peak with resident bytes, and order of a plan with some drops; None if it exceeds the kernels' arrays."""
        from checkmate.solvers.evict.profile import add_interval

        search, g = self._search, self._search.flat
        code, stages = search.empty_code(), len(g.targets)
        for o, stop in until.items():
            # Overwritten inputs: the op could be computed again only up to some stage, which these rules ignore.
            if g.last_stage[o] <= stages:
                continue
            for v in self.graph.ops[o].outputs:
                if g.evictable[v]:
                    add_interval(code, v, self._touched[o] + 1, min(stop, stages) - 1)
        order, peak_bytes = search.order_and_peak(code)
        return (sum(self.graph.ops[o].cost for o in order), peak_bytes, order) if order else None


@dataclass(frozen=True, slots=True)
class Heuristic:
    """A checkpointing heuristic with one parameter; all settings are tried.

    The papers choose the parameter by a formula for equal layers, such as the square root of the number of layers. Since
    decoding a plan takes milliseconds, all settings are tried here and the cheapest plan within the budget is kept.
    """

    points: Points = "articulation"

    def __post_init__(self) -> None:
        if self.points not in ("articulation", "linearized"):
            raise OptionError(
                f"points={self.points!r} is neither 'articulation' nor 'linearized'",
                hint="choose 'articulation' to cut where every path passes, or 'linearized' to cut anywhere in the graph's order",
            )

    def choices(self, forward: ForwardPass) -> Iterator[Drops]:
        """The drops of each setting."""
        raise NotImplementedError

    def run(self, problem: Problem, session: Session) -> Termination:
        """Offer the plans of every setting that keep the budget."""
        from checkmate.solvers.evict.starts import target_lists

        fold = FoldViews.of(problem.graph)
        folded = fold.apply(problem)
        if all(op.phase == "forward" for op in folded.graph.ops):
            return Termination(Reason.NOT_FOUND, detail="the graph has no backward ops, so there is no forward pass to cut")
        # The lowest peak of any setting is only for the message.
        lowest = math.inf
        for late in target_lists(folded):
            forward = ForwardPass(folded, late)
            best = math.inf
            for until in self.choices(forward):
                if session.left_s() <= 0 or session.gap <= 0:
                    break
                found = forward.schedule(until)
                if found is None:
                    continue
                cost, peak_bytes, order = found
                lowest = min(lowest, peak_bytes)
                if peak_bytes <= problem.budget_bytes and cost < best:
                    best = cost
                    session.offer(fold.invert(order))
        none = "no setting gives a plan" if math.isinf(lowest) else f"no setting peaks below {format_bytes(int(lowest))}"
        return searched(session, none)


def articulation_points(graph: Graph, ops: Iterable[int]) -> list[int]:
    """Ops whose removal disconnects the undirected graph of some ops, in order (Hopcroft and Tarjan 1973).

    An op is an articulation point if a branch below it in a depth-first search reaches nothing above it; the root is one if it
    has several branches.

    Examples:
        >>> chain = Graph.from_dag(cost=[1] * 4, size_bytes=[1] * 4, edges=[(0, 1), (1, 2), (2, 3)])
        >>> articulation_points(chain, range(4))
        [1, 2]
        >>> skip = Graph.from_dag(cost=[1] * 4, size_bytes=[1] * 4, edges=[(0, 1), (1, 2), (0, 2), (2, 3)])
        >>> articulation_points(skip, range(4))
        [2]
    """
    inside = list(ops)
    neighbours: dict[int, list[int]] = {o: [] for o in inside}
    for o in inside:
        for p in {graph.producer[v] for v in graph.ops[o].inputs} & neighbours.keys():
            neighbours[o].append(p)
            neighbours[p].append(o)
    found_at: dict[int, int] = {}
    parent: dict[int, int] = {}
    for start in inside:
        stack = [(start, -1)]
        while stack:
            o, above = stack.pop()
            if o not in found_at:
                found_at[o], parent[o] = len(found_at), above
                stack += [(p, o) for p in neighbours[o] if p not in found_at]
    lowest = dict(found_at)
    branches = Counter(parent.values())
    points = {o for o in inside if parent[o] == -1 and branches[o] > 1}
    for o in reversed(found_at):
        above = parent[o]
        lowest[o] = min([lowest[o], *(found_at[p] for p in neighbours[o] if p != above)])
        if above != -1:
            lowest[above] = min(lowest[above], lowest[o])
            if parent[above] != -1 and lowest[o] >= found_at[above]:
                points.add(above)
    return sorted(points)
