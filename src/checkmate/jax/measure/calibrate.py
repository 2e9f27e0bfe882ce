"""Calibration: plan, compile, read the bytes of temporary values, and plan again until the budget is kept. Nothing runs."""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import jax

from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.evaluate import evaluate
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.frontend import progress
from checkmate.frontend.calibration import Calibration, Proportional, Trial
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.plan_store import MeasuredPlan, PlanStore, sources_digest
from checkmate.frontend.planner import Replanner, planner_for
from checkmate.frontend.step_memory import StepMemory
from checkmate.jax.apply_plan import PlannedProgram
from checkmate.jax.graph.capture import Capture
from checkmate.jax.measure.compiled import MOST_COMPILATIONS, temp_bytes
from checkmate.jax.measure.profiler import environment, signature

_log = logging.getLogger("checkmate.jax")

_MOST_PLANS: Final = 7
"""Most plans of a request: one that saves too little beside an earlier one is not compiled."""

_LEAST_SAVING: Final = 0.002
"""Share of the cost by which a plan must be cheaper than one that fits to be compiled, which takes seconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A captured function with its plan.

    Attributes:
        capture: The captured function.
        result: The plan, with its proof.
        budget_bytes: The budget in bytes, or None.
        temp_bytes: Bytes of temporary values as XLA compiled the plan; None if it was not compiled.
        exact: Whether every op stands alone.
    """

    capture: Capture
    result: Result
    budget_bytes: int | None
    temp_bytes: int | None
    exact: bool

    @property
    def program(self) -> PlannedProgram:
        """The plan, ready to run."""
        return PlannedProgram(self.capture, self.result.plan, exact=self.exact)


class Compilation:
    """Compiles plans of one capture, each once: what was compiled in earlier processes is read from a store.

    Args:
        capture: The captured function.
        donated: Positions of arguments whose buffers results may reuse.
        exact: Whether every op stands alone.
    """

    def __init__(self, capture: Capture, donated: Sequence[int] = (), *, exact: bool = False) -> None:
        self.capture, self.donated, self.exact = capture, donated, exact
        self.store = PlanStore(_key(capture, donated, exact))

    @functools.cached_property
    def known(self) -> dict[tuple[int, ...], int]:
        """Bytes of temporary values of each plan that was compiled, by its order."""
        return {plan.order: plan.memory.peak_bytes for plan in self.store.all()}

    def temp_bytes(self, result: Result) -> int:
        """Bytes of temporary values of a plan."""
        order = result.plan.order
        if order not in self.known:
            with progress.shown("compiling a plan"):
                self.known[order] = temp_bytes(self._function(result), specs_of(self.capture), self.donated)
            self.store.add(MeasuredPlan(order, StepMemory.of_whole_step(self.known[order])))
        return self.known[order]

    def cheapest_within(self, most_bytes: int) -> Result | None:
        """The cheapest plan that was compiled before and needs no more; its bound is that of keeping everything.

        Args:
            most_bytes: The most bytes of temporary values.
        """
        graph = self.capture.graph
        orders = [order for order, needed in self.known.items() if needed <= most_bytes]
        results = [evaluate(graph, Plan.from_order(graph, order)) for order in orders]
        return min(results, key=lambda result: result.cost, default=None)

    def _function(self, result: Result) -> Any:
        program = PlannedProgram(self.capture, result.plan, exact=self.exact)
        return lambda *arguments: program(arguments)


def specs_of(capture: Capture) -> list[jax.ShapeDtypeStruct]:
    """Shapes and types of the arguments of a captured function."""
    types = [capture.trace.types[v] for v in capture.trace.arguments]
    return [jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=getattr(t, "weak_type", False)) for t in types]


def without_calibration(capture: Capture, options: PlanningOptions, *, exact: bool) -> Planned:
    """Plan a captured function, and compile nothing."""
    result = planner_for(options)(capture.graph)
    return Planned(capture, result, None if options.budget is None else result.budget_bytes, None, exact)


def calibrate(capture: Capture, options: PlanningOptions, compilation: Compilation) -> Planned:
    """The cheapest plan found whose compiled bytes keep the budget.

    Args:
        capture: The captured function.
        options: Budget, solver and time limit, or the plan that is given.
        compilation: Compiles plans.

    Raises:
        InfeasibleBudgetError: No plan was compiled that keeps the budget.
    """
    if options.plan is not None or options.budget is None:
        result = planner_for(options)(capture.graph)
        budget = None if options.budget is None else result.budget_bytes
        return Planned(capture, result, budget, compilation.temp_bytes(result), compilation.exact)
    graph = capture.graph
    budget = options.budget.resolve(graph)
    replan = Replanner(graph, options)
    # What is resident does not change with the plan: the ratio of compiled and planned bytes is that of the rest.
    room = max(0, budget - graph.resident_bytes)
    policy = Proportional(least_cost=graph.cost, most_trials=_MOST_PLANS, least_saving=_LEAST_SAVING)
    calibration: Calibration[Planned | None] = Calibration(room, policy)
    compiled: set[tuple[int, ...]] = set()
    failure: CheckmateError | None = None
    while len(compiled) < MOST_COMPILATIONS and (target := calibration.next_target()) is not None:
        best = calibration.best()
        try:
            result = replan(graph.resident_bytes + target)
        except (InfeasibleBudgetError, PlanNotFoundError) as error:
            if failure is not None or best is not None:
                break
            failure, result = error, replan.smallest()  # XLA may need less than was planned
        if best is not None and result.cost > policy.worthwhile_cost(calibration.trials, room):
            calibration.record(_not_compiled(target, best))
            continue
        compiled.add(result.plan.order)
        needed, planned = compilation.temp_bytes(result), result.peak_bytes - graph.resident_bytes
        _log.info("planned %s, compiled %s of %s, overhead %.4f", *map(format_bytes, (planned, needed, room)), result.overhead)
        trial = Trial.of(target, result, needed, Planned(capture, result, budget, needed, compilation.exact))
        calibration.record(replace(trial, planned_bytes=planned))
    best = calibration.best()
    if best is None or best.outcome is None:
        known = compilation.cheapest_within(room)  # such as the plan that an earlier refusal named
        if known is None:
            raise _refusal(calibration, graph.resident_bytes, budget, failure)
        return Planned(capture, known, budget, compilation.temp_bytes(known), compilation.exact)
    return best.outcome


def _not_compiled(target_bytes: int, best: Trial[Planned | None]) -> Trial[Planned | None]:
    """The trial of a target within which no plan is worth compiling beside the best: the next one has to be above it.

    It is taken to need as much more than the best as it is planned for: where that fills the room, there is no next one.
    """
    assert best.needed_bytes is not None and best.planned_bytes is not None
    needed = max(best.needed_bytes, best.needed_bytes * target_bytes // max(1, best.planned_bytes))
    return replace(
        best,
        target_bytes=target_bytes,
        planned_bytes=target_bytes,
        needed_bytes=needed,
        cost=math.inf,
        overhead=math.inf,
        measured=False,
        outcome=None,
    )


def _refusal(
    calibration: Calibration[Planned | None], resident_bytes: int, budget_bytes: int, failure: CheckmateError | None
) -> InfeasibleBudgetError:
    """The error to raise where no compiled plan keeps the budget, in total bytes."""
    needs = [t.needed_bytes for t in calibration.trials if t.needed_bytes is not None]
    whole = Calibration[Planned | None](budget_bytes, calibration.policy)
    for trial in calibration.trials:
        if trial.needed_bytes is not None and trial.needed_bytes == min(needs) and trial.outcome is not None:
            whole.record(Trial.of(budget_bytes, trial.outcome.result, resident_bytes + trial.needed_bytes, trial.outcome))
    refused = whole.refusal(failure)
    assert isinstance(refused, InfeasibleBudgetError)
    return refused


def _key(capture: Capture, donated: Sequence[int], exact: bool) -> str:
    """Text of all that decides on the bytes of a plan as it is compiled."""
    program = "\n".join(signature(chain) for chain in capture.members if chain)
    settings = f"{sources_digest()} {capture.graph.digest} {tuple(donated)} {environment()}{' exact' if exact else ''}"
    return hashlib.sha256(f"jax {settings}\n{program}".encode()).hexdigest()
