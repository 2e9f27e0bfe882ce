"""One solve under way: the clock, the best plan, the best bound and their history."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Protocol

from checkmate.core.errors import PlanError, SolverError
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget, Progress, Reason, Termination
from checkmate.core.simulate import simulate
from checkmate.solvers.clocks import Alarm, Flag, prepared_s
from checkmate.solvers.reductions.unread import plan_of_needed

_log = logging.getLogger(__name__)

OnProgress = Callable[[Progress], None]


class Solver(Protocol):
    """Interface of solvers: a frozen dataclass of options with a method `run`."""

    def run(self, problem: Problem, session: Session) -> Termination:
        """Search until a limit of the session is met.

        A solver passes plans to `Session.offer` and proven bounds to `Session.prove` as soon as it finds them:
        nothing is lost if the user interrupts.

        Args:
            problem: The problem.
            session: Takes plans and bounds, and knows the limits.

        Returns:
            Why the search ended.
        """
        ...


class Session:
    """A solve in progress: takes a solver's plans and bounds, and tells the solver when to stop.

    Args:
        problem: The problem.
        limits: The limits of the solve.
        on_progress: Called at each improvement.

    Attributes:
        problem: The problem.
        limits: The limits of the solve.
        plan: The best plan so far that keeps the budget, or None.
        cost: Its cost, or None.
        bound: The best proven lower bound so far; infinite if no plan keeps the budget.
        smallest: The smallest peak found, if the solver looked for it.
        history: Improvements so far.
        remarks: Notes of the solver for the user.
    """

    def __init__(self, problem: Problem, limits: Limits, on_progress: OnProgress | None = None) -> None:
        self.problem = problem
        self.limits = limits
        self.plan: Plan | None = None
        self.cost: int | None = None
        self.smallest: MinBudget | None = None
        self.bound: float = _rounded_down(problem.graph.cost)
        self.history: list[Progress] = []
        self.remarks: list[str] = []
        self._on_progress = on_progress
        self._started = time.perf_counter() - prepared_s()
        self._checking_s = 0.0
        self._until = math.inf
        self._alarm = Alarm(lambda: min(self.left_s(), self._until - self.elapsed_s()))

    @property
    def time_up(self) -> Flag:
        """A flag for kernels that is raised when the time is up; `close` ends the thread behind it."""
        if not self._alarm.is_set:
            self._alarm.set()
        return self._alarm.flag

    @contextmanager
    def within(self, until_s: float) -> Generator[None]:
        """A context in which `time_up` is raised at a given moment, before the session's end.

        Args:
            until_s: The moment, on the clock of `elapsed_s`.
        """
        self._until = until_s
        self._alarm.set()
        try:
            yield
        finally:
            self._until = math.inf
            self._alarm.set()

    def close(self) -> None:
        """Stop raising flags."""
        self._alarm.off()

    def elapsed_s(self) -> float:
        """Wall seconds since the solve began, without preparations."""
        return time.perf_counter() - prepared_s() - self._started

    def left_s(self) -> float:
        """Wall seconds left to a solver, possibly infinite, never negative.

        One and a half times the time of making and checking a plan is reserved, because the best plan is checked once more at
        the end: seconds on 100,000 ops.
        """
        if self.limits.time_s is None:
            return math.inf
        return max(0.0, self.limits.time_s - 1.5 * self._checking_s - self.elapsed_s())

    @contextmanager
    def checking(self) -> Generator[None]:
        """A context in which a plan is made and offered; the longest time of one so far is reserved from the time left."""
        began = self.elapsed_s()
        try:
            yield
        finally:
            self._checking_s = max(self._checking_s, self.elapsed_s() - began)

    @property
    def gap(self) -> float:
        """Largest share of the best cost that another plan could save according to the bound; 1 without a plan."""
        if self.cost is None:
            return 1.0
        return max(0.0, (self.cost - self.bound) / self.cost) if self.cost else 0.0

    @property
    def done(self) -> bool:
        """Whether the search may stop: gap or target is met, the time is up or the budget is proven too small."""
        return self.gap <= self.limits.gap or self.decided or self.left_s() <= 0 or math.isinf(self.bound)

    @property
    def decided(self) -> bool:
        """Whether a plan as cheap as the target is found, or proven not to exist."""
        target = self.limits.target_cost
        return target is not None and ((self.cost is not None and self.cost <= target) or self.bound > target)

    def offer(self, order: Iterable[int]) -> bool:
        """Take the plan of an order if it keeps the budget and is the cheapest so far.

        Computations whose outputs are not read are left out first (`plan_of_needed`).

        Args:
            order: Ops in the order of their computations.

        Returns:
            Whether it was taken.

        Raises:
            SolverError: The order cannot be run.
        """
        with self.checking():
            try:
                plan = plan_of_needed(self.problem, tuple(order))
            except PlanError as error:
                raise SolverError(f"a solver offered an order that cannot be run: {error.message}") from error
            self.offer_plan(plan)
            return self.plan is plan

    def offer_plan(self, plan: Plan) -> int | None:
        """Take a plan as it is, copies to the host included, if it keeps the limits and is the cheapest so far.

        Args:
            plan: The plan.

        Returns:
            Its cost, or None if it breaks a limit.

        Raises:
            PlanError: The plan cannot be run.
        """
        host = self.problem.host
        # Cost and peak come from the simulated plan, not from the solver.
        timeline = simulate(self.problem.graph, plan, host)
        if timeline.peak_bytes > self.problem.budget_bytes:
            return None
        if plan.host is not None and (host is None or timeline.host_peak_bytes > host.bytes):
            return None
        if self.cost is None or timeline.cost < self.cost:
            self.plan, self.cost = plan, timeline.cost
            self._record()
        return timeline.cost

    def prove(self, bound: float) -> None:
        """Take a proven lower bound on the cost of every plan; infinite if no plan keeps the budget.

        Costs are whole, so a bound is rounded up. Before that it is lowered by a millionth, the tolerance of the engines
        and more than the rounding of sums: else a bound of 100.0000001 would become 101.

        Args:
            bound: The bound, in the graph's cost unit.
        """
        if math.isfinite(bound):
            bound = float(math.ceil(bound - 1e-6 * max(1.0, abs(bound))))
        if bound > self.bound:
            self.bound = bound
            self._record()

    def remark(self, text: str) -> None:
        """Add a note to the result's remarks.

        Args:
            text: The note.
        """
        self.remarks.append(text)
        _log.info(text)

    def _record(self) -> None:
        point = Progress(self.elapsed_s(), self.cost, self.bound)
        self.history.append(point)
        if self._on_progress is not None:
            self._on_progress(point)


def searched(session: Session, detail: str) -> Termination:
    """The end of a search that proves nothing: with a plan; or without one, for want of time or for the reason in ``detail``."""
    if session.plan is not None:
        return Termination(Reason.FEASIBLE)
    return Termination(Reason.NOT_FOUND, "time" if session.left_s() <= 0 else "", detail)


def _rounded_down(cost: int) -> float:
    """The largest float up to a cost: not every cost above 2^53 is a float, and a bound may not be rounded up."""
    near = float(cost)
    return near if near <= cost else math.nextafter(near, 0.0)
