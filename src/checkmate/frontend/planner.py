"""Planners: callables that return the plan of a captured graph.

Frameworks call back with a graph while they compile. A front end therefore takes a planner as an argument. A planner can wrap
another one: rank 0 of a distributed job plans for all ranks, or several graphs share one budget.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from checkmate.core.budget import Budget, keep_all_bytes
from checkmate.core.errors import PlanError, PlanNotFoundError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Fetch, Free, HostMemory, Offload, Plan, with_frees
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget, Result
from checkmate.core.units import format_bytes
from checkmate.frontend import progress
from checkmate.frontend.counted_memory import cheapest_counted, resolved_budget
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.plan_store import PLANNED_BEFORE, SolvedPlans
from checkmate.solvers.auto import Auto
from checkmate.solvers.evict.smallest import quick_peak, smallest_peak
from checkmate.solvers.offload.streams import smallest_with_fetches
from checkmate.solvers.reductions.unread import needed_steps, plan_of_needed
from checkmate.solvers.session import Solver
from checkmate.solvers.solve import solve
from checkmate.studies.min_budget import min_budget

_log = logging.getLogger("checkmate.frontend")

_LAST_SHARE: Final = 0.05
"""Share of the time limit that every solve has, even if earlier solves have used up the limit."""

Planner = Callable[[Graph], Result]
"""Returns a checked plan of a graph, or raises `InfeasibleBudgetError`, `PlanNotFoundError` or `PlanError`."""


def planner_for(options: PlanningOptions) -> Planner:
    """The planner that options ask for: the given plan, else the cheapest within the budget, else keeping everything."""
    if options.plan is not None:
        return GivenPlan(options.plan, options.budget)
    return keep_everything if options.budget is None else functools.partial(_cheapest_within, options, options.budget)


def keep_everything(graph: Graph) -> Result:
    """The result of computing every op once, in the graph's own order; a `Planner`."""
    return evaluate(graph, Plan.from_order(graph, range(len(graph.ops))))


def _cheapest_within(options: PlanningOptions, budget: Budget, graph: Graph) -> Result:
    """The cheapest plan found within a budget; here the budget becomes bytes, once per graph."""
    total = budget.with_total(resolved_budget(budget, graph, options.counted))
    problem, limits = Problem(graph, total, host=options.host), Limits(time_s=options.time_limit_s)
    if options.counted is None:
        return cheapest(problem, options.solver, limits)
    return cheapest_counted(problem, options.counted, lambda p, spent_s: cheapest(p, options.solver, limits, spent_s))


def cheapest(problem: Problem, solver: Solver | None, limits: Limits, spent_s: float = 0.0) -> Result:
    """The result of `solve`, or of an earlier solve of the same problem with the same solver and as much time.

    An earlier solve that had less time, and proved no optimum, gives the plan to start from. The search has the part of the limit
    that other searches left; its plan is stored as a plan of the whole limit.
    """
    left = limits if limits.time_s is None else replace(limits, time_s=_left_s(limits.time_s, spent_s))

    def search(start: Plan | None) -> Result:
        with progress.planning(problem.graph) as improved:
            return solve(problem, solver or Auto(), limits=left, initial=start, on_progress=improved)

    return _solved(problem, solver or Auto(), limits, search)


def _solved(problem: Problem, solver: Solver, limits: Limits, search: Callable[[Plan | None], Result]) -> Result:
    """The result of an earlier search with as much time, or of a new search that starts from an earlier plan, if any.

    The result is stored under the limits. `solve` returns the best plan so far if the user presses Ctrl-C, for a user who waits
    for a plan. While a framework compiles, the user wants to stop the script: the plan is stored, and `KeyboardInterrupt` is
    raised.
    """
    # A stored plan is an order of computations; the places of its copies are not stored.
    plans = SolvedPlans.of_user() if problem.host is None else None
    known = plans.get(problem, repr(solver), limits) if plans is not None else None
    if known is not None and known[1]:
        _log_planned(problem, known[0])
        return known[0]
    result = search(None if known is None else known[0].plan)
    interrupted = result.termination.limit == "interrupt"
    if plans is not None:  # an interrupted search had less time than it was given
        plans.add(problem, Limits(time_s=result.elapsed_s) if interrupted else limits, result)
    _log_planned(problem, result)
    if interrupted:
        raise KeyboardInterrupt
    return result


def _left_s(limit_s: float, spent_s: float) -> float:
    """Seconds that are left of a time limit for one more search."""
    return max(_LAST_SHARE * limit_s, limit_s - spent_s)


def near_smallest(graph: Graph, time_s: float, enough_bytes: int | None = None, host: HostMemory | None = None) -> Result:
    """A plan of nearly the smallest peak, found now or in an earlier process; its seconds are the search's.

    The quick search comes within some per cent of the smallest peak. If its plan takes more than ``enough_bytes``, resident bytes
    included, another search takes the rest of the time. With a host, weights are fetched from there.
    """
    problem, limits = Problem(graph, keep_all_bytes(graph), host=host), Limits(time_s=time_s)
    if host is not None:
        return evaluate(graph, smallest_with_fetches(problem, limits, near=enough_bytes or 0).plan)
    quick = _found_before_or_now(problem, limits, "quick_peak", quick_peak)
    if enough_bytes is None or quick.peak_bytes <= enough_bytes:
        return quick
    search = functools.partial(smallest_peak, enough=enough_bytes, known=quick.plan)
    left = Limits(time_s=_left_s(time_s, quick.elapsed_s))
    found = _found_before_or_now(problem, left, f"smallest_peak(enough={enough_bytes - graph.resident_bytes})", search)
    return msgspec.structs.replace(found, elapsed_s=quick.elapsed_s + found.elapsed_s)


def _found_before_or_now(problem: Problem, limits: Limits, name: str, search: Callable[[Problem, Limits], MinBudget]) -> Result:
    """The plan of a search for a small peak; a stored plan counts even if its search had less time."""
    plans = SolvedPlans.of_user()
    known = plans.get(problem, name, limits) if plans is not None else None
    if known is not None:
        return known[0]
    with progress.shown(f"planning {len(problem.graph.ops)} ops"):
        found = search(problem, limits)
    result = msgspec.structs.replace(evaluate(problem.graph, found.plan), solver=name, elapsed_s=found.elapsed_s)
    if plans is not None:
        plans.add(problem, limits, result)
    return result


@dataclass(frozen=True, slots=True)
class GivenPlan:
    """A planner that returns a given plan, or refuses it if it does not hold.

    Compiled programs drop computations whose outputs are never read, and free every value after its last read. The result is that
    of the plan that runs. A plan that names the structure of its graph stays valid if workspace or resident bytes have changed:
    they depend on the process. The result has the figures of the current graph.
    """

    plan: Plan
    budget: Budget | None = None  # the plan has to keep it
    copies: bool = False  # whether the program makes the copies of a plan to and from the host

    def __call__(self, graph: Graph) -> Result:
        """The figures of the plan."""
        if self.plan.host is not None and not self.copies:
            raise PlanError(
                "the plan copies values to the host, which this program does not",
                hint="run it with checkmate.torch.compile(model, loss, optimizer, example=..., plan=...), or plan without a host",
            )
        plan = self.plan
        if not plan.is_for(graph) and plan.is_for_structure_of(graph):
            _log.info("the plan was made where ops took other workspace, or other memory was resident: its peak is counted again")
            plan = msgspec.structs.replace(plan, graph_digest=graph.digest)
        if plan.host is None:  # with copies, the peak of the program that runs is compared with the plan's
            evaluate(graph, plan)
            plan = plan_of_needed(Problem(graph, graph.resident_bytes), plan.order)
        return evaluate(graph, plan, self.budget)


class Replanner:
    """Plans of one graph within several budgets. A search within a smaller budget may start from each plan found.

    The time limit bounds all searches together: the first has a share of it, and each later one another share. A search after the
    limit is used up has `_LAST_SHARE` of it: enough for a good plan, since the search starts from the plans found so far.
    """

    def __init__(self, graph: Graph, options: PlanningOptions, gap: float = Limits().gap) -> None:
        self.graph = graph
        self.found: list[Result] = []
        self._options = options
        self._share, self._next_share = 0.5, 0.25
        self._gap = gap  # a solve may stop at it
        self._spent_s = 0.0

    def __call__(self, budget_bytes: int) -> Result:
        """The cheapest plan within an amount of live bytes, resident bytes included."""
        progress.say(f"planning {len(self.graph.ops)} ops")
        try:
            result = self._solve(budget_bytes)
        except PlanNotFoundError:
            # The search for the smallest peak finds plans that a search within this budget misses.
            self.smallest()
            if self._start(budget_bytes) is None:
                raise
            result = self._solve(budget_bytes)
        self.found.append(result)
        return result

    def smallest(self) -> Result:
        """The plan with the smallest peak found in the rest of the time."""
        with self._timed(self._next_share) as limits:
            found = min_budget(self.graph, limits=limits)
        self.found.append(evaluate(self.graph, found.plan))
        return self.found[-1]

    def _solve(self, budget_bytes: int) -> Result:
        problem, solver, limit_s = Problem(self.graph, budget_bytes), self._options.solver or Auto(), self._options.time_limit_s
        share, self._share = self._share, self._next_share
        # The limits without the time of earlier searches: stored plans must not depend on time that this process has spent.
        asked = Limits(time_s=None if limit_s is None else max(share, _LAST_SHARE) * limit_s, gap=self._gap)

        def search(start: Plan | None) -> Result:
            initial = self._start(budget_bytes)
            with self._timed(share) as limits:
                return solve(problem, solver, limits=limits, initial=start if initial is None else initial)

        return _solved(problem, solver, asked, search)

    @contextmanager
    def _timed(self, share: float) -> Generator[Limits]:
        """Limits of a search with a share of the time limit; its seconds count as spent."""
        limit_s, began = self._options.time_limit_s, time.perf_counter()
        most_s = None if limit_s is None else min(max(share, _LAST_SHARE) * limit_s, _left_s(limit_s, self._spent_s))
        try:
            yield Limits(time_s=most_s, gap=self._gap)
        finally:
            # Time above the share compiles kernels, once per machine, and does not count.
            self._spent_s += min(time.perf_counter() - began, most_s or 0.0)

    def _start(self, budget_bytes: int) -> Plan | None:
        """The cheapest plan found so far within a budget."""
        fits = [r for r in self.found if r.peak_bytes <= budget_bytes]
        return min(fits, key=lambda r: r.cost).plan if fits else None


def order_of(plan: Plan) -> tuple[int | Fetch, ...]:
    """The order of a plan without copies to the host: its computations, by op, and its fetches.

    Raises:
        PlanError: The plan has copies to the host.
    """
    if any(isinstance(step, Offload) for step in plan.steps):
        raise PlanError(
            "the plan copies values to the host, and the graphs of a loop only fetch frozen weights from there",
            hint="raise the budget, or plan a whole step: checkmate.torch.compile(model, loss, optimizer, example=..., host=...)",
        )
    steps = (step for step in plan.steps if not isinstance(step, Free))
    return tuple(step.op if isinstance(step, Compute) else step for step in steps)  # type: ignore[misc]


def result_of_order(graph: Graph, order: Sequence[int | Fetch], host: HostMemory | None = None) -> Result:
    """The result of a known order without the computations and fetches whose values are never read."""
    problem = Problem(graph, graph.resident_bytes, host=host)
    if host is None:
        return evaluate(graph, plan_of_needed(problem, [step for step in order if not isinstance(step, Fetch)]))
    steps = needed_steps(problem, [step if isinstance(step, Fetch) else Compute(step) for step in order])
    return evaluate(graph, with_frees(graph, steps, host))


def _log_planned(problem: Problem, result: Result) -> None:
    progress.planned(problem.graph, result)
    before = " before:" if result.termination.detail == PLANNED_BEFORE else ""
    _log.info(
        "planned%s %d ops in %.1f s: peak %s of %s, overhead %.4f, gap %.2f %%",
        before,
        len(problem.graph.ops),
        result.elapsed_s,
        format_bytes(result.peak_bytes),
        problem.describe_budget(),
        result.overhead,
        100 * result.gap,
    )
