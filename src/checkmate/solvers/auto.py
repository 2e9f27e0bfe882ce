"""The default: reduce, bound, search, and let bound and search feed each other until the gap is met."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session

if TYPE_CHECKING:
    from checkmate.solvers.bounds.event_cuts import CutModel
    from checkmate.solvers.evict.search import Search


@dataclass(frozen=True, slots=True)
class Auto:
    """Local search for plans and event cuts for the proof, each started from what the other found.

    Attributes:
        rounds: Most rounds of refinement; each costs some seconds on a thousand ops.
    """

    rounds: int = 6

    def run(self, problem: Problem, session: Session) -> Termination:
        """Search and prove until a limit of the session is met."""
        from checkmate.solvers.bounds.floor import floor

        lowest = floor(problem.graph)
        if lowest.peak_bytes > problem.budget_bytes:
            session.prove(math.inf)
            return Termination(Reason.INFEASIBLE, detail=lowest.why)
        session.offer(range(len(problem.graph.ops)))
        if session.done:
            return Termination(Reason.FEASIBLE)
        _Run(problem, session).run(self.rounds)
        if session.plan is None:
            return Termination(
                Reason.NOT_FOUND, limit="time" if session.left_s() <= 0 else "", detail="search and cuts found none"
            )
        return Termination(Reason.FEASIBLE)


class _Run:
    """One run of `Auto` on a folded problem."""

    def __init__(self, problem: Problem, session: Session) -> None:
        from checkmate.solvers.bounds.event_cuts import CutModel

        self.session = session
        self.fold = FoldViews.of(problem.graph)
        self.folded = self.fold.apply(problem)
        self.graph = self.folded.graph
        self.any_order = CutModel(self.folded)
        self.once = max(1, self.graph.cost)

    def run(self, rounds: int) -> None:
        searches = self._first_plans()
        if self.session.done:
            return
        event = self._best_single(self.any_order, searches, self.prove)
        if self.session.done or event is None:
            return
        self._refine(searches, event, rounds)
        best = min(searches, key=lambda search: search.best_cost)
        if best.order_bound > 0 and self.folded.reorder:
            least = 1 + best.order_bound
            self.session.remark(f"given-order bound: no plan with its first computations has an overhead below {least:.5f}")

    def offer(self, order: list[int]) -> bool:
        return self.session.offer(self.fold.invert(order))

    def prove(self, share: float) -> None:
        """Take a bound as extra cost over computing each op of the folded graph once."""
        if share >= 0:
            self.session.prove(self.fold.original.cost + self.once * share)

    def best_share(self) -> float:
        if self.session.cost is None:
            return math.inf
        return (self.session.cost - self.fold.original.cost) / self.once

    def out_of_time(self) -> bool:
        return self.session.left_s() <= 0

    def _first_plans(self) -> list[Search]:
        """A search for each list of targets, those with a plan first."""
        from checkmate.solvers.evict.search import Search
        from checkmate.solvers.local_search import suggested_decodes
        from checkmate.solvers.targets import target_lists

        session = self.session
        searches: list[Search] = []
        for late in target_lists(self.folded):
            search = Search(self.folded, late, self.session.limits.seed)
            searches.append(search)
            if search.first(out_of_time=self.out_of_time, settle=True):
                self.offer(search.order())
                search.first(out_of_time=self.out_of_time)
                self.offer(search.order())
                if self.session.done:
                    return searches
                until = session.elapsed_s() + 0.05 * min(60.0, session.left_s())
                search.improve(suggested_decodes(len(self.graph.ops)) // 10, 2e-4, lambda: session.elapsed_s() > until)  # noqa: B023
                self.offer(search.order())
        return sorted(searches, key=lambda search: search.best_cost)

    def _best_single(self, model: CutModel, searches: list[Search], prove: Callable[[float], None]) -> int | None:
        """Bound by single events where the plans are fullest; returns the event that proves most."""
        from checkmate.solvers.bounds.refine import promising_events, single_cuts

        plans = [search.order() for search in searches if math.isfinite(search.best_cost)]
        events = promising_events(self.graph, [range(len(self.graph.ops)), *plans[:2]])
        until = self.session.elapsed_s() + max(2.0, 0.2 * min(60.0, self.session.left_s()))
        return single_cuts(model, events, prove, lambda: self.session.done or self.session.elapsed_s() > until)

    def _refine(self, searches: list[Search], event: int, rounds: int) -> None:
        """Cut the search's own order first, which is quick and makes plans; then any order, at the same events."""
        from checkmate.solvers.bounds.event_cuts import CutModel
        from checkmate.solvers.bounds.refine import chain_of, floating_matters
        from checkmate.solvers.local_search import suggested_decodes

        session = self.session
        work = suggested_decodes(len(self.graph.ops))
        given: dict[int, CutModel] = {}
        # A first look at any order is short: what it does not prove at once takes long, and plans come first.
        floating = floating_matters(self.any_order, [event])
        events = self._refine_once(self.any_order, searches[0], [event], self.prove, 0.1, floating=floating)
        for k in range(rounds):
            if session.done:
                return
            before = (session.cost, session.bound)
            search = searches[k % len(searches)]
            model = given.setdefault(k % len(searches), CutModel(self.folded, tuple(search.targets)))
            proof = self.prove if not self.folded.reorder else self._narrow(search)
            given_event = self._best_single(model, [search], proof)
            if given_event is not None and not session.done:
                cuts = self._refine_once(model, search, [given_event], proof, 0.35, floating=True)
                if self.folded.reorder and not session.done:
                    events = chain_of(self.any_order, [*cuts, event, *events])
                    floating = floating_matters(self.any_order, events)
                    events = self._refine_once(self.any_order, search, events, self.prove, 0.5, floating=floating)
            if session.done:
                return
            if search.improve(max(200, work // 4), 2e-4, self.out_of_time):
                self.offer(search.order())
            if (session.cost, session.bound) == before and k >= len(searches):
                session.remark(f"no gain in round {k + 1} of refinement")
                return

    def _refine_once(
        self, model: CutModel, search: Search, first: list[int], prove: Callable[[float], None], share: float, *, floating: bool
    ) -> list[int]:
        from checkmate.solvers.bounds.refine import Refinement

        session = self.session
        until = session.elapsed_s() + min(session.left_s(), max(2.0, share * min(60.0, session.left_s())))
        gap = max(2e-5, session.limits.gap / 4)
        refinement = Refinement(model, search, prove, self.offer, gap=gap, threads=session.limits.threads)
        return refinement.run(
            first, self.best_share, lambda: 0.0 if session.done else until - session.elapsed_s(), floating=floating
        )

    def _narrow(self, search: Search) -> Callable[[float], None]:
        """Keep the best bound for a search's own order, to be shown by name."""

        def note(share: float) -> None:
            if share < math.inf and share > search.order_bound:
                search.order_bound = share

        return note
