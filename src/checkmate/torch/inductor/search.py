"""Which plan to compile next, when what a compiler makes of a plan is known only by measuring it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import msgspec

from checkmate.core.errors import CheckmateError, GraphError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes
from checkmate.cost.plan_store import MeasuredPlan, MeasuredPlans
from checkmate.solvers.given import check_given, keep_everything, load_plan, run_order
from checkmate.studies.min_budget import min_budget
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.compilation.planning import plan_graph
from checkmate.torch.inductor.fusion import Fused, fuse
from checkmate.torch.measure.trial_step import DryStep

_log = logging.getLogger("checkmate.torch")

_T = TypeVar("_T")

MOST_COMPILATIONS = 4
_SAFETY = 0.985
"""Share of the budget to aim at when what was learnt from one plan is used for the next."""
_LEAST_GAIN = 0.25
"""Bytes that a compiled step is taken to lose at least for each byte that its plan loses."""
_WORTH = 0.01
"""Share of the cost that another compilation has to promise to save, once there is one that fits."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A plan that was compiled.

    Attributes:
        order: Its computations, of the fused graph.
        cost: Its cost there.
        predicted_bytes: Its peak there, above what is resident.
        step: What was measured.
    """

    order: tuple[int, ...]
    cost: int
    predicted_bytes: int
    step: DryStep


class Fitting:
    """The plans of one graph that are compiled until a measured peak keeps the budget.

    Where several ranks plan together, rank 0 chooses for all, by the most that any of them was measured to take.

    Args:
        compilation: What was asked for, and who plans together.
        compiled_how: All besides the graph that decides what a compiler makes of its plans, as text.
    """

    def __init__(self, compilation: Compilation, compiled_how: str) -> None:
        self.tried: list[Tried] = []
        self._compilation = compilation
        self._options = compilation.options
        self._ranks = compilation.ranks
        self._how = compiled_how
        self._original = ""
        self._settled = False
        self._order: tuple[int, ...] = ()
        self._fused: Fused | None = None

    @property
    def fused(self) -> Fused:
        """The graph with its chains contracted, once `plan` has seen it."""
        assert self._fused is not None
        return self._fused

    @property
    def measures(self) -> bool:
        """Whether there is a budget, so that steps have to be measured."""
        return self._options.budget is not None

    def plan(self, graph: Graph) -> tuple[Graph, Result]:
        """The plan, of the graph as captured, that the compilation under way is to run; and that graph.

        Raises:
            GraphError: The step traces to another graph than at the last compilation.
            CheckmateError: A given plan is of another graph.
        """
        graph, result = self._compilation.agreed(graph, self._chosen)
        if not self._leads:
            self._follow(graph, result)
        return graph, result

    def _chosen(self, graph: Graph, in_flight_bytes: int) -> Result:
        if self._fused is None:
            self._begin(graph)
        if graph.digest != self._original:
            raise GraphError("the step traces to another graph each time", hint="make what the model does not depend on chance")
        if self._options.plan is not None:
            return check_given(graph, load_plan(self._options.plan), None)
        return run_order(graph, self.fused.expand(self._order))

    def current(self, graph: Graph, result: Result) -> tuple[Graph, Plan]:
        """The graph and the plan that count for the compilation under way: the fused one's, unless a plan was given."""
        if self._options.plan is not None:
            assert result.plan is not None
            return graph, result.plan
        return self.fused.graph, Plan.from_order(self.fused.graph, self._order)

    def learn(self, step: DryStep) -> DryStep:
        """Note what the plan that was compiled last takes: the most that any rank says."""
        step = self._most(step)
        graph = self.fused.graph
        timeline = simulate(graph, Plan.from_order(graph, self._order))
        self.tried.append(Tried(self._order, timeline.cost, timeline.peak_bytes - graph.resident_bytes, step))
        _log.info("compiled: predicted %s, measured %s", *map(format_bytes, (self.tried[-1].predicted_bytes, step.peak_bytes)))
        if self._options.plan is None and self._leads:
            self._plans.add(MeasuredPlan(self._order, step.peak_bytes))
        return step

    def again(self) -> bool:
        """Whether another plan is worth compiling; it is the next that `plan` returns."""
        return self._said("whether to compile again", self._again)

    def best(self) -> int | None:
        """Index of the cheapest plan that was measured to keep the budget, and remember it; None if there is none."""
        return self._said("which compilation runs", self._best)

    def _again(self) -> bool:
        if self._settled or len(self.tried) >= MOST_COMPILATIONS:
            return False
        order = self._next()
        if order is None or any(order == t.order for t in self.tried):
            return False
        self._order = order
        return True

    def _best(self) -> int | None:
        fitting = [i for i, t in enumerate(self.tried) if t.step.peak_bytes <= self.room_bytes]
        if self._settled:  # a plan that was given, or a division's: what it takes beside others is checked when it runs
            return 0 if self._options.plan is None or fitting else None
        least, most = self._window
        monotone = [i for i in fitting if least <= self.tried[i].step.peak_bytes <= most]
        found = min(monotone or fitting, key=lambda i: (self.tried[i].cost, i), default=None)
        if found is not None:
            self._plans.answer(self.room_bytes, self.tried[found].step.peak_bytes)
        return found

    @property
    def _leads(self) -> bool:
        return self._ranks is None or self._ranks.rank == 0

    def _said(self, topic: str, answer: Callable[[], _T]) -> _T:
        """An answer: that of rank 0."""
        if self._ranks is None:
            return answer()
        return msgspec.msgpack.decode(self._ranks.decide(topic, b"", lambda said: msgspec.msgpack.encode(answer())))

    def _most(self, step: DryStep) -> DryStep:
        if self._ranks is None:
            return step

        def decide(said: Sequence[bytes]) -> bytes:
            steps = [msgspec.msgpack.decode(each) for each in said]
            return msgspec.msgpack.encode({key: max(s[key] for s in steps) for key in steps[0]})

        body = self._ranks.decide("what a compiled step takes", msgspec.msgpack.encode(asdict(step)), decide)
        return DryStep(**msgspec.msgpack.decode(body))

    def _follow(self, graph: Graph, result: Result) -> None:
        """Take over what rank 0 chose."""
        assert result.plan is not None
        fused = self._fused or self._contract(graph)
        if self._options.plan is None:
            self._order = fused.contract(result.plan.order)
        else:
            self._order = keep_everything(fused.graph).plan.order  # type: ignore[union-attr]

    def _contract(self, graph: Graph) -> Fused:
        fused = self._fused = fuse(graph)
        contracted, budget = fused.graph, self._options.budget
        self.room_bytes = 0 if budget is None else Problem(contracted, budget).budget_bytes - contracted.resident_bytes
        return fused

    def _begin(self, graph: Graph) -> None:
        self._original = graph.digest
        contracted = self._contract(graph).graph
        alone = msgspec.structs.replace(contracted, resident_bytes=0)
        self._plans = MeasuredPlans(f"{alone.digest} {self._how}")
        budget = self._options.budget
        if budget is None or self._options.plan is not None:
            self._settled, self._order = True, keep_everything(contracted).plan.order  # type: ignore[union-attr]
            return
        self._window = self._plans.window(self.room_bytes)
        shared = self._compilation.shared_order(contracted)
        self._settled = shared is not None
        order = shared or self._remembered() or self._next()
        assert order is not None
        self._order = order

    def _remembered(self) -> tuple[int, ...] | None:
        """The cheapest plan that was measured to fit before."""
        graph = self.fused.graph
        least, most = self._window
        known: list[tuple[int, tuple[int, ...]]] = []
        for plan in self._plans.all():
            if least <= plan.peak_bytes <= most:
                try:
                    known.append((simulate(graph, Plan.from_order(graph, plan.order)).cost, plan.order))
                except (CheckmateError, IndexError):
                    _log.warning("a remembered plan does not fit its graph and is not used")
        return min(known, default=(0, None))[1]

    def _next(self) -> tuple[int, ...] | None:
        """The next order to compile; None if no other is worth it."""
        graph = self.fused.graph
        target = self._window[1]
        asked = target
        fitting = [t for t in self.tried if t.step.peak_bytes <= target]
        over = [t for t in self.tried if t.step.peak_bytes > target]
        worth = (1 - _WORTH) * min((t.cost for t in fitting), default=math.inf)  # cost up to which another plan is compiled
        if graph.cost > worth or any(t.step.peak_bytes >= _SAFETY * target for t in fitting):
            return None
        if self.tried:
            last = max(fitting, key=lambda t: t.predicted_bytes) if fitting else min(over, key=lambda t: t.predicted_bytes)
            asked = int(_SAFETY * target * last.predicted_bytes / max(1, last.step.peak_bytes))
            if fitting and over:  # between the two
                asked = min(asked, (last.predicted_bytes + min(t.predicted_bytes for t in over)) // 2)
            elif over:
                asked = min(asked, int(_SAFETY * last.predicted_bytes), _secant(over, _SAFETY * target))
        try:
            result = plan_graph(graph, replace(self._options, budget=graph.resident_bytes + asked, plan=None))
        except (InfeasibleBudgetError, PlanNotFoundError):
            if fitting:
                return None
            result = min_budget(graph, limits=Limits(time_s=self._options.time_limit_s))
        return None if result.plan is None or result.cost is None or result.cost > worth else result.plan.order


def _secant(over: Sequence[Tried], aim_bytes: float) -> int:
    """The prediction at which the line through the two plans that came nearest would be measured to take what is aimed at.

    What a compiler adds to a plan does not shrink with it, so that a share of the prediction falls short again and again.
    """
    low, *others = sorted(over, key=lambda t: t.predicted_bytes)
    high = next((t for t in others if t.predicted_bytes > low.predicted_bytes), None)
    if high is None:
        return low.predicted_bytes
    gain = (high.step.peak_bytes - low.step.peak_bytes) / (high.predicted_bytes - low.predicted_bytes)
    return max(0, int(low.predicted_bytes - (low.step.peak_bytes - aim_bytes) / max(_LEAST_GAIN, min(1.0, gain))))
