"""The smallest peak of a graph: a plan, a proven lower bound, and the op that sets it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget
from checkmate.core.simulate import simulate
from checkmate.solvers.bounds.floor import Floor, floor
from checkmate.solvers.evict.starts import late_order, load_kernels, starts
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.reductions.unread import without_unread
from checkmate.solvers.session import Session

if TYPE_CHECKING:
    from checkmate.solvers.evict.search import Search


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestParameters:
    """Parameters of `smallest_peak`.

    Attributes:
        most_ops: Largest graph on which peaks are lowered step by step; a step takes half a second on 30,000 ops.
        steps_per_op: Steps without a lower peak after which the search ends, as a multiple of the number of ops.
        time_s: Seconds without a limit from the caller.
        quick_s: Seconds of `quick_peak`.
        precision: A bisection ends when its interval is below one part in so many of the peak: 0.1 %, less than allocators
            round.
    """

    most_ops: int = 30_000
    steps_per_op: int = 8
    time_s: float = 20.0
    quick_s: float = 1.0
    precision: int = 1000


PARAMETERS = SmallestParameters()


def smallest_peak(
    problem: Problem, limits: Limits | None = None, *, enough: int = 0, known: Plan | None = None, keep_interrupted: bool = False
) -> MinBudget:
    """Bisect the budget down to the proven floor with greedy plans, then lower peaks step by step (`Descent`).

    Both are heuristics: a budget without a plan proves nothing.

    Args:
        problem: Graph and what a plan may do; its budget is ignored.
        limits: Time and seed; `SmallestParameters.time_s` by default.
        enough: A peak that is low enough, resident bytes included; the bisection ends there.
        known: A plan that was found before.
        keep_interrupted: Whether Ctrl-C returns the smallest peak so far.

    Raises:
        KeyboardInterrupt: The user interrupted the search.
    """
    bisection = _Bisection(problem, Limits(time_s=PARAMETERS.time_s) if limits is None else limits, enough, known)
    try:
        bisection.raise_floor()
        bisection.from_the_middle(PARAMETERS.quick_s)
        quick = bisection.plan
        bisection.from_the_floor()
        bisection.descend(quick)
    except KeyboardInterrupt:
        if not keep_interrupted:
            raise
    return bisection.found()


def quick_peak(problem: Problem, limits: Limits | None = None) -> MinBudget:
    """A small peak that a plan is found for in about a second, with the same floor as `smallest_peak`.

    Args:
        problem: Graph and what a plan may do; its budget is ignored.
        limits: Time and seed; `SmallestParameters.quick_s` by default.
    """
    limits = Limits(time_s=PARAMETERS.quick_s) if limits is None else limits
    bisection = _Bisection(problem, limits, 0, None)
    bisection.raise_floor()
    bisection.from_the_middle(PARAMETERS.quick_s)
    return bisection.found()


class _Bisection:
    """Bisections of one budget; each goes on from the smallest peak of those before.

    Args:
        problem: As in `smallest_peak`.
        limits: Time and seed.
        enough: A peak that is low enough.
        known: A plan that was found before, or None.

    Attributes:
        plan: The plan of the smallest peak so far.
    """

    def __init__(self, problem: Problem, limits: Limits, enough: int, known: Plan | None) -> None:
        self._problem, self._graph, self._seed = problem, problem.graph, limits.seed
        graph = problem.graph
        self._floor = floor(graph)
        self._enough = max(enough, self._floor.peak_bytes)
        orders = [list(range(len(graph.ops)))]
        if problem.reorder:
            orders.append(late_order(graph))
        plans = [Plan.from_order(graph, order) for order in orders]
        if known is not None:
            plans.append(known)
        self._peak, self.plan = min(((simulate(graph, plan).peak_bytes, plan) for plan in plans), key=lambda found: found[0])
        self._clock = Session(problem, limits)
        self._fold = FoldViews.of(graph)
        self._searches: list[Search] = []
        self._starts = self._more_searches()

    def from_the_middle(self, time_s: float) -> None:
        """Bisect with one attempt at each budget, from the first start alone.

        Attempts at budgets with room succeed in hundredths of a second, and those near the floor take up to seconds, so that a
        bisection from above comes within some per cent of the smallest peak before a first attempt at the floor itself ends.

        Args:
            time_s: Seconds after which to stop; an attempt that would take as long as the one before is not begun after them.
        """
        if self._peak <= self._enough:
            return  # before the kernels are loaded, which takes a second
        self._clock.prepare(load_kernels)
        began, last, low = self._clock.elapsed_s(), 0.0, self._floor.peak_bytes
        search = next(self._starts)
        self._searches.append(search)
        while self._peak > self._enough and not self._near(low):
            now = self._clock.elapsed_s()
            if last and last > min(time_s - (now - began), self._clock.left_s()):
                return
            guess = (low + self._peak) // 2
            if not self._reach(search, guess):
                low = guess
            last = self._clock.elapsed_s() - now

    def raise_floor(self) -> None:
        """Look for a higher floor, if the peak is above the one that is known. It holds for plans without copies to a host."""
        if self._peak <= self._enough or self._problem.host is not None:
            return
        self._clock.prepare(load_kernels)
        from checkmate.solvers.bounds.last_run import last_run_floor

        found = last_run_floor(self._fold.folded, self._floor.peak_bytes, self._clock.time_up)
        # Higher by less than a bisection sees it says nothing more, and why it holds is harder to read.
        least = self._floor.peak_bytes + (self._floor.peak_bytes - self._graph.resident_bytes) // PARAMETERS.precision
        if found is not None and found.peak_bytes > least:
            self._floor = Floor(found.peak_bytes, self._fold.kept_ops[found.op], found.why)
            self._enough = max(self._enough, found.peak_bytes)

    def from_the_floor(self) -> None:
        """Bisect from every start, the floor itself first: many graphs have a plan there, which ends the search at once."""
        guess = low = self._floor.peak_bytes
        while self._peak > self._enough and self._clock.left_s() > 0:
            self._searches += self._starts
            if not any(self._reach(search, guess) for search in self._searches):
                low = guess  # not found proves nothing; it only ends this bisection
            if self._near(low):
                return
            guess = (low + self._peak) // 2

    def descend(self, start: Plan) -> None:
        """Lower peaks step by step, until one is near the floor or none was lower for long.

        Args:
            start: A plan to begin from, beside that which holds everything.
        """
        if self._peak <= self._enough or self._clock.left_s() <= 0 or len(self._fold.folded.ops) > PARAMETERS.most_ops:
            return
        from checkmate.solvers.evict.descent import Descent

        folded, lowest = self._fold.apply(self._problem.replace_budget(self._peak)), self._floor.peak_bytes
        graph = folded.graph
        holds_all = late_order(graph) if folded.reorder else list(range(len(graph.ops)))
        orders = [holds_all, self._fold.apply_order(start.order)]
        descent = Descent(folded, orders, lowest, self._seed, self._clock.time_up)
        failed, most = 0, PARAMETERS.steps_per_op * len(graph.ops)
        last = 0.0  # a step that would take as long as the one before is not begun without as much time
        while self._peak > self._enough and not self._near(lowest) and failed < most and self._clock.left_s() > last:
            now = self._clock.elapsed_s()
            failed += 1
            if descent.step():
                self._keep(descent.order)
                failed = 0
            last = self._clock.elapsed_s() - now

    def found(self) -> MinBudget:
        """The smallest peak so far."""
        self._clock.close()
        graph, lowest = self._graph, self._floor
        cost = simulate(graph, self.plan).cost
        return MinBudget(
            plan=self.plan,
            cost=cost,
            overhead=cost / graph.cost if graph.cost else 1.0,
            peak_bytes=self._peak,
            floor_bytes=lowest.peak_bytes,
            binding_op="" if lowest.op is None else graph.ops[lowest.op].name,
            why=lowest.why,
            elapsed_s=self._clock.elapsed_s(),
        )

    def _reach(self, search: Search, guess: int) -> bool:
        """Whether a search finds a plan within a budget; the plan is kept if it is the smallest."""
        search.set_budget(guess)
        if not search.first(1, lambda: self._clock.left_s() <= 0, stop_at_first=True):
            return False
        self._keep(search.order())
        return True

    def _keep(self, order: list[int]) -> None:
        """Keep the plan of an order of the folded graph if its peak is the smallest."""
        plan = Plan.from_order(self._graph, without_unread(self._problem, self._fold.invert(order)))
        reached = simulate(self._graph, plan).peak_bytes
        if reached < self._peak:
            self.plan, self._peak = plan, reached

    def _near(self, low: int) -> bool:
        return self._peak - low <= max(1, (self._peak - self._graph.resident_bytes) // PARAMETERS.precision)

    def _more_searches(self) -> Iterator[Search]:
        folded = self._fold.apply(self._problem.replace_budget(self._peak))
        for start in starts(folded, self._seed, self._clock.time_up):
            yield start.search(folded, self._seed, self._clock.time_up)
