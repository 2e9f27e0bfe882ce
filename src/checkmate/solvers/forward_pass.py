"""The forward pass as the segment heuristics see it: points to cut at, and plans from what is dropped until when."""

# The kernels of the eviction search are compiled by numba and have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.core.units import format_bytes
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session

Points = Literal["articulation", "linearized"]

NEVER = 1 << 30
"""A stage that is never reached."""


def check_points(points: str) -> None:
    """Refuse what names no kind of points.

    Raises:
        OptionError: ``points`` is neither ``"articulation"`` nor ``"linearized"``.
    """
    if points not in ("articulation", "linearized"):
        raise OptionError(f"points={points!r} is neither 'articulation' nor 'linearized'")


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a code gives.

    Attributes:
        cost: Cost of all computations.
        peak_bytes: Most bytes held, resident bytes included.
        order: Ops of the folded graph as they are computed.
    """

    cost: int
    peak_bytes: int
    order: list[int]


class ForwardPass:
    """Forward ops in order, when the backward pass asks for each, and the plan of dropping some until then.

    All segment heuristics reduce to this: a value that is not dropped is held from its op to its last
    use; one that is dropped goes after its last forward use and is computed again on demand, for
    that stage alone before a given stage and to be held from then on. Values that may not be computed
    again are never dropped.

    Args:
        problem: A problem whose views are folded.
        on_demand: Ops that run only when somebody asks; they take no part in the segments.

    Attributes:
        ops: Forward ops in order.
        asked: First stage outside the forward pass that reads an output of each op, or `NEVER`. Shape ``[op]``.
    """

    def __init__(self, problem: Problem, on_demand: frozenset[int]) -> None:
        from checkmate.solvers.evict.instance import build_scratch
        from checkmate.solvers.evict.search import PARAMETERS, Search

        self.graph = graph = problem.graph
        self.ops = [o for o, op in enumerate(graph.ops) if op.phase == "forward" and o not in on_demand]
        self._search = Search(problem, on_demand, seed=0)
        self._instance: Any = self._search.instance
        self._scratch: Any = build_scratch(self._instance, PARAMETERS.stretch)
        stage = self._search.stage
        forward = set(self.ops)
        self.asked = [NEVER] * len(graph.ops)
        self._touched = [stage.get(o, NEVER) for o in range(len(graph.ops))]
        for o in self.ops:
            readers = {r for v in graph.ops[o].outputs for r in graph.readers[v] if r in stage}
            self._touched[o] = max([stage[o], *(stage[r] for r in readers if r in forward)])
            self.asked[o] = min((stage[r] for r in readers - forward), default=NEVER)
            if self.asked[o] == NEVER and any(graph.values[v].kept for v in graph.ops[o].outputs):
                self.asked[o] = len(stage) - 1

    def size_bytes(self, o: int) -> int:
        """Bytes of an op's outputs."""
        return sum(self.graph.values[v].size_bytes for v in self.graph.ops[o].outputs)

    def points(self, kind: Points) -> list[int]:
        """Forward ops at which the pass may be cut, in order."""
        return list(self.ops) if kind == "linearized" else articulation_points(self.graph, self.ops)

    def schedule(self, until: Mapping[int, int]) -> Schedule | None:
        """Plan that drops the outputs of some ops until a stage; None if it becomes too long.

        Args:
            until: Stage from which the outputs of each dropped op are held again.
        """
        from checkmate.solvers.evict import decode as kernels

        stages = len(self._instance.targets)
        code = self._search.empty_code()
        for o, stop in until.items():
            if self._instance.last_stage[o] <= stages:
                continue
            for v in self.graph.ops[o].outputs:
                if self._instance.evictable[v]:
                    self._search.evict(code, v, self._touched[o] + 1, min(stop, stages) - 1)
        length: int = kernels.decode(self._instance, self._scratch, code)
        if length < 0:
            return None
        measured: tuple[float, float, int] = kernels.measure(self._instance, self._scratch, length)
        if measured[0] < 0:
            return None
        order: list[int] = self._scratch.sequence[: length - 1].tolist()
        return Schedule(int(measured[0]), int(measured[1]) + self.graph.resident_bytes, order)


Drops = Mapping[int, int]
"""Stage until which the outputs of each dropped op are not held."""


def sweep(problem: Problem, session: Session, choices: Callable[[ForwardPass], Iterable[Drops]]) -> Termination:
    """Offer the plans that a heuristic finds within the budget, trying every setting of its parameter.

    Args:
        problem: The problem.
        session: The session.
        choices: What to drop until when, for each setting.
    """
    from checkmate.solvers.targets import load_kernels, target_lists

    session.prepare(load_kernels)
    fold = FoldViews.of(problem.graph)
    folded = fold.apply(problem)
    if all(op.phase == "forward" for op in folded.graph.ops):
        return Termination(Reason.NOT_FOUND, detail="the graph has no backward ops, so there is no forward pass to cut")
    lowest = math.inf
    for late in target_lists(folded):
        forward = ForwardPass(folded, late)
        best = math.inf
        for until in choices(forward):
            if session.left_s() <= 0 or session.gap <= 0:
                break
            schedule = forward.schedule(until)
            if schedule is None:
                continue
            lowest = min(lowest, schedule.peak_bytes)
            if schedule.peak_bytes <= problem.budget_bytes and schedule.cost < best:
                best = schedule.cost
                session.offer(fold.invert(schedule.order))
    if session.plan is not None:
        return Termination(Reason.FEASIBLE)
    limit = "time" if session.left_s() <= 0 else ""
    found = "no setting gives a plan" if math.isinf(lowest) else f"no setting peaks below {format_bytes(int(lowest))}"
    return Termination(Reason.NOT_FOUND, limit, found)


def articulation_points(graph: Graph, ops: Iterable[int]) -> list[int]:
    """Ops whose removal disconnects the undirected graph of some ops, in order (Tarjan 1972).

    Examples:
        >>> chain = Graph.from_dag(cost=[1] * 4, size_bytes=[1] * 4, edges=[(0, 1), (1, 2), (2, 3)])
        >>> articulation_points(chain, range(4))
        [1, 2]
        >>> skip = Graph.from_dag(cost=[1] * 4, size_bytes=[1] * 4, edges=[(0, 1), (1, 2), (0, 2), (2, 3)])
        >>> articulation_points(skip, range(4))
        [2]
    """
    inside = list(ops)
    beside: dict[int, list[int]] = {o: [] for o in inside}
    for o in inside:
        for p in {graph.producer[v] for v in graph.ops[o].inputs} & beside.keys():
            beside[o].append(p)
            beside[p].append(o)
    found_at: dict[int, int] = {}
    lowest: dict[int, int] = {}
    points: set[int] = set()
    for start in inside:
        if start in found_at:
            continue
        found_at[start] = lowest[start] = len(found_at)
        branches = 0
        stack = [(start, -1, iter(beside[start]))]
        while stack:
            o, parent, rest = stack[-1]
            p = next(rest, None)
            if p is None:
                stack.pop()
                if stack:
                    above = stack[-1][0]
                    lowest[above] = min(lowest[above], lowest[o])
                    if above == start:
                        branches += 1
                    elif lowest[o] >= found_at[above]:
                        points.add(above)
            elif p not in found_at:
                found_at[p] = lowest[p] = len(found_at)
                stack.append((p, o, iter(beside[p])))
            elif p != parent:
                lowest[o] = min(lowest[o], found_at[p])
        if branches > 1:
            points.add(start)
    return sorted(points)
