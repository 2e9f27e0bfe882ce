"""The smallest peak of a graph: a plan, a proven lower bound, and the op that sets it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget
from checkmate.core.simulate import simulate
from checkmate.solvers.bounds.floor import Floor, floor
from checkmate.solvers.evict.starts import late_order, starts
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.reductions.unread import without_unread
from checkmate.solvers.session import Session
from checkmate.solvers.tunables import TUNABLES

if TYPE_CHECKING:
    from checkmate.solvers.evict.search import Search


def smallest_peak(
    problem: Problem,
    limits: Limits | None = None,
    *,
    enough: int = 0,
    near: int = 0,
    known: Plan | None = None,
    keep_interrupted: bool = False,
) -> MinBudget:
    """Bisect the budget down to the proven floor with greedy plans, then lower peaks step by step (`Descent`).

    Both are heuristics: a budget without a plan proves nothing. The problem's budget is ignored, and the time is 20 s by default.
    A peak of `enough` bytes ends the search, and so does a peak of `near` bytes after the first bisection of about a second.
    The search starts from `known`, and with `keep_interrupted` returns the smallest peak so far on Ctrl-C.
    """
    bisection = _Bisection(problem, Limits(time_s=20.0) if limits is None else limits, enough, known)
    try:
        bisection.raise_floor()
        bisection.from_the_middle(1.0)
        quick = bisection.order
        if bisection.peak_bytes > near:
            bisection.from_the_floor()
            bisection.descend(quick)
    except KeyboardInterrupt:
        if not keep_interrupted:
            raise
    return bisection.found()


def quick_peak(problem: Problem, limits: Limits | None = None) -> MinBudget:
    """A small peak with a plan, found in about a second, with the same floor as `smallest_peak`."""
    return smallest_peak(problem, Limits(time_s=1.0) if limits is None else limits, near=1 << 62)


class _Bisection:
    """Bisections of one budget; each starts from the smallest peak of the previous ones.

    `order` has the ops of the folded graph in the order of the plan of the smallest peak so far, and `peak_bytes` that peak.
    """

    def __init__(self, problem: Problem, limits: Limits, enough: int, known: Plan | None) -> None:
        self._clock = Session(problem, limits)  # first, because the next lines take seconds on 100,000 ops
        self._problem, self._seed = problem, limits.seed
        self._floor = floor(problem.graph)
        self._enough = max(enough, self._floor.peak_bytes)
        self._fold = FoldViews.of(problem.graph)
        folded = self._fold.folded
        self.order = list(range(len(folded.ops)))
        with self._clock.checking():
            self.peak_bytes = self._peak_of(self.order)
        others = [] if known is None else [self._fold.apply_order(known.order)]
        if problem.reorder and self._clock.left_s() > 0:
            others.append(late_order(folded))
        for order in others:
            self._keep(order, self._peak_of(order))
        self._searches: list[Search] = []
        self._starts = self._more_searches()

    def from_the_middle(self, time_s: float) -> None:
        """Bisect with one attempt at each budget, from the first start alone.

        Attempts at budgets with room succeed in hundredths of a second; attempts near the floor take up to seconds. A bisection
        from above therefore comes within some per cent of the smallest peak before a first attempt at the floor itself ends.
        An attempt is not begun if it would end after `time_s`, supposing that it takes as long as the previous one.
        """
        if self.peak_bytes <= self._enough or self._clock.left_s() <= 0:
            return  # before loading the kernels, which takes a second
        began, last, low = self._clock.elapsed_s(), 0.0, self._floor.peak_bytes
        search = next(self._starts)
        self._searches.append(search)
        while self.peak_bytes > self._enough and not self._near(low):
            now = self._clock.elapsed_s()
            if last and last > min(time_s - (now - began), self._clock.left_s()):
                return
            guess = (low + self.peak_bytes) // 2
            if not self._reach(search, guess):
                low = guess
            last = self._clock.elapsed_s() - now

    def raise_floor(self) -> None:
        """Look for a higher floor, if the peak is above the known floor. It holds for plans without copies to a host."""
        if self.peak_bytes <= self._enough or self._problem.host is not None:
            return
        from checkmate.solvers.bounds.last_run import last_run_floor

        found = last_run_floor(self._fold.folded, self._floor.peak_bytes, self._clock.time_up)
        # A gain below the precision of a bisection is not worth a reason that is harder to read.
        least = self._floor.peak_bytes + _precision(self._floor.peak_bytes - self._problem.graph.resident_bytes)
        if found is not None and found.op is not None and found.peak_bytes > least:
            self._floor = Floor(found.peak_bytes, self._fold.kept_ops[found.op], found.why)
            self._enough = max(self._enough, found.peak_bytes)

    def from_the_floor(self) -> None:
        """Bisect from every start, the floor itself first: many graphs have a plan there, which ends the search at once."""
        guess = low = self._floor.peak_bytes
        while self.peak_bytes > self._enough and self._clock.left_s() > 0:
            if not any(self._reach(search, guess) for search in self._every_search()):
                low = guess  # proves nothing; it only directs this bisection
            if self._near(low):
                return
            guess = (low + self.peak_bytes) // 2

    def descend(self, start: Sequence[int]) -> None:
        """Lower peaks step by step, until one is near the floor or many steps in a row gain nothing.

        Steps begin from `start`, and from the plan that holds everything.
        """
        folded, lowest = self._fold.apply(self._problem.replace_budget(self.peak_bytes)), self._floor.peak_bytes
        ops = len(folded.graph.ops)
        if self.peak_bytes <= self._enough or self._clock.left_s() <= 0 or ops > TUNABLES.many_ops:
            return
        from checkmate.solvers.evict.descent import Descent

        holds_all = late_order(folded.graph) if folded.reorder else range(ops)
        descent = Descent(folded, [holds_all, start], lowest, self._seed, self._clock.time_up)
        failed, last = 0, 0.0  # a step is not begun with less time left than the last one took
        while self.peak_bytes > self._enough and not self._near(lowest) and failed < 8 * ops:
            now = self._clock.elapsed_s()
            if self._clock.left_s() <= last:
                return
            failed += 1
            if descent.step():
                failed = 0
                self._keep(descent.order, descent.peak_bytes)
            last = self._clock.elapsed_s() - now

    def found(self) -> MinBudget:
        """The smallest peak so far."""
        self._clock.close()
        graph, lowest = self._problem.graph, self._floor
        timeline = simulate(graph, Plan.from_order(graph, without_unread(self._problem, self._fold.invert(self.order))))
        return MinBudget(
            plan=timeline.plan,
            cost=timeline.cost,
            overhead=graph.overhead(timeline.cost),
            peak_bytes=timeline.peak_bytes,
            floor_bytes=lowest.peak_bytes,
            binding_op="" if lowest.op is None else graph.ops[lowest.op].name,
            why=lowest.why,
            elapsed_s=self._clock.elapsed_s(),
        )

    def _reach(self, search: Search, guess: int) -> bool:
        """Whether a search finds a plan within a budget; the plan is kept if its peak is the smallest."""
        clock = self._clock
        search.set_budget(guess)
        with clock.within(clock.elapsed_s() + 0.5 * clock.left_s()):
            reached = search.first(1, lambda: clock.left_s() <= 0, stop_at_first=True)
        if not reached:
            return False
        self._keep(*search.order_and_peak())
        return True

    def _peak_of(self, order: Sequence[int]) -> int:
        return simulate(self._fold.folded, Plan.from_order(self._fold.folded, order)).peak_bytes

    def _keep(self, order: list[int], peak_bytes: int) -> None:
        """Keep the plan of an order of the folded graph if its peak is the smallest."""
        if peak_bytes < self.peak_bytes:
            self.peak_bytes, self.order = peak_bytes, order

    def _near(self, low: int) -> bool:
        return self.peak_bytes - low <= max(1, _precision(self.peak_bytes - self._problem.graph.resident_bytes))

    def _every_search(self) -> Iterator[Search]:
        """Searches from every start; each is made when the previous ones have been used."""
        yield from tuple(self._searches)
        while self._clock.left_s() > 0 and (search := next(self._starts, None)) is not None:
            self._searches.append(search)
            yield search

    def _more_searches(self) -> Iterator[Search]:
        folded = self._fold.apply(self._problem.replace_budget(self.peak_bytes))
        for start in starts(folded, self._seed, self._clock.time_up):
            yield start.search(folded, self._seed, self._clock.time_up)


def _precision(peak_bytes: int) -> int:
    """A difference of peaks, in bytes, that does not matter: less than the rounding of allocators."""
    return peak_bytes // 1000
