"""The default: reduce, bound, search, and let bound and search feed each other until the gap is met."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session
from checkmate.solvers.targets import load_kernels

if TYPE_CHECKING:
    from checkmate.solvers.bounds.event_cuts import CutModel
    from checkmate.solvers.evict.search import Search
    from checkmate.solvers.states.exploration import Exploration


_CLOSE = 0.75
"""Share of what a plan costs beyond computing every op once, above which a proof by one event is close."""
_PATIENCE = 4
"""Orders without gain after which a walk ends."""
_DECODES = 750
"""Sequences to try in each order of a walk."""
_ROOMS = (0.85, 0.9, 0.95, 0.97, 1.0)
"""Shares of the room that a plan may fill at no penalty when it is put in another order."""
_FEW_OPS = 500
"""On larger graphs a search from a new order seldom comes near the best."""
_STATES = 1 << 22
"""Most states to store for a small graph."""


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
        session.prepare(load_kernels)
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
        self.fold = FoldViews.of(problem.graph, priced=problem.reorder)
        self.folded = self.fold.apply(problem)
        self.graph = self.folded.graph
        self.any_order = CutModel(self.folded)
        self.once = max(1, self.graph.cost)
        self.random = Random(session.limits.seed)

    def run(self, rounds: int) -> None:
        searches = self._first_plans()
        if self.session.done:
            return
        event = self._best_single(self.any_order, searches)
        if self.session.done or event is None:
            return
        exploration = self._explore()
        if self.session.done:
            return
        under_way = exploration is not None and exploration.ended is None
        self._refine(searches, event, 1 if under_way else rounds)
        if exploration is not None and not self.session.done:
            exploration.run(self._after(0.8))
        self._polish(searches)
        best = min(searches, key=lambda search: search.best_cost)
        if best.order_bound > 0 and self.folded.reorder:
            least = 1 + best.order_bound
            self.session.remark(
                f"given-order bound: no plan with its first computations, each of them read, has an overhead below {least:.5f}"
            )

    def offer(self, order: list[int]) -> bool:
        return self.session.offer(self.fold.invert(order))

    def prove(self, search: Search, share: float, any_order: bool) -> None:
        """Take a bound, as extra cost over computing each op of the folded graph once.

        One that holds for the order of a search only is kept with it, to be shown by name.
        """
        if any_order or not self.folded.reorder:
            self.session.prove(self.fold.original.cost + self.once * max(0.0, share))
        elif share < math.inf:
            search.order_bound = max(search.order_bound, share)

    def best_share(self) -> float:
        if self.session.cost is None:
            return math.inf
        return (self.session.cost - self.fold.original.cost) / self.once

    def out_of_time(self) -> bool:
        return self.session.left_s() <= 0

    def _after(self, share: float) -> Callable[[], bool]:
        """Whether a share of the time that is left now, of a minute at most, is used up."""
        until = self._until(share)
        return lambda: self.session.elapsed_s() > until

    def _until(self, share: float) -> float:
        return self.session.elapsed_s() + share * min(60.0, self.session.left_s())

    def _first_plans(self) -> list[Search]:
        """A search for each list of targets, those with a plan first."""
        from checkmate.solvers.evict.search import Search
        from checkmate.solvers.local_search import suggested_decodes
        from checkmate.solvers.targets import starts

        session = self.session
        seed = session.limits.seed
        searches: list[Search] = []
        for order, on_demand in starts(self.folded, seed):
            search = Search(self.folded, on_demand, seed, order)
            searches.append(search)
            late = self._after(0.05)
            if search.first(out_of_time=late, settle=True):
                self.offer(search.order())
                search.first(out_of_time=late)
                self.offer(search.order())
            if session.done:
                return searches
        if session.plan is None:
            self._squeeze()
        for search in searches:
            if session.plan is not None:
                search.start_from_order(self.fold.apply_order(session.plan.order))
            if math.isfinite(search.best_cost) and not session.done:
                search.improve(suggested_decodes(len(self.graph.ops)) // 10, 2e-4, self._after(0.05))
                self.offer(search.order())
        return sorted(searches, key=lambda search: search.best_cost)

    def _squeeze(self) -> None:
        """Look for a plan where few are.

        Which ops to compute again is easier to choose among the forward ones alone; and a search for lower and lower
        peaks comes by some plans that one for this budget misses.
        """
        from checkmate.solvers.evict.search import Search
        from checkmate.solvers.smallest import smallest_peak
        from checkmate.solvers.targets import starts

        session = self.session
        late = self._after(0.3)
        forward = Problem(self.graph, self.folded.budget_bytes, "forward", self.folded.reorder)
        for order, on_demand in starts(forward, session.limits.seed):
            search = Search(forward, on_demand, session.limits.seed, order)
            if late() or (search.first(out_of_time=late, settle=True) and self.offer(search.order())):
                break
        if session.plan is not None or session.left_s() <= 0:  # a limit of no time at all is refused
            return
        limits = Limits(time_s=0.3 * min(60.0, session.left_s()), seed=session.limits.seed)
        smallest = smallest_peak(session.problem, limits, enough=session.problem.budget_bytes)
        session.offer(smallest.plan.order)

    def _best_single(self, model: CutModel, searches: list[Search]) -> int | None:
        """Bound by single events where the plans are fullest; returns the event that proves most."""
        from checkmate.solvers.bounds.refine import promising_events, single_cuts

        plans = [search.order() for search in searches if math.isfinite(search.best_cost)]
        events = promising_events(self.graph, [range(len(self.graph.ops)), *plans[:2]])
        late = self._after(0.2)
        return single_cuts(model, events, partial(self.prove, searches[0]), lambda: self.session.done or late())

    def _explore(self) -> Exploration | None:
        """Look through the states of a small graph, for a moment at first."""
        from checkmate.solvers.states.exploration import Exploration, load_kernels
        from checkmate.solvers.states.facts import facts_of

        facts = facts_of(self.folded)
        if isinstance(facts, str):
            return None
        self.session.prepare(load_kernels)
        exploration = Exploration(self.fold, facts, self.session, _STATES)
        exploration.run(self._after(0.05))
        return exploration

    def _refine(self, searches: list[Search], event: int, rounds: int) -> None:
        """Cut any order; cut the search's own order, which makes better plans; cut any order where either proves more."""
        from checkmate.solvers.bounds.event_cuts import CutModel
        from checkmate.solvers.bounds.refine import chain_of
        from checkmate.solvers.local_search import suggested_decodes

        session = self.session
        work = suggested_decodes(len(self.graph.ops))
        # Where one event proves most of what the plan costs it is the proof that lacks; else the plan may.
        bound = self.session.bound - self.fold.original.cost
        events, share = [event], 0.5 if bound > _CLOSE * self.once * self.best_share() else 0.2
        for k in range(rounds):
            before = (session.cost, session.bound)
            place = k % len(searches)
            search = searches[place]
            if self.folded.reorder:
                floating = self._quick_bound(search, events)[1]
                events = self._refine_once(self.any_order, search, events, share, floating=floating)
                if session.done:
                    return
            model = CutModel(self.folded, tuple(search.targets))
            first = self._best_single(model, [search])
            if session.done:
                return
            if first is not None:
                cuts = self._refine_once(model, search, [first], 0.35, floating=True)
                if session.done:
                    return
                other = chain_of(self.any_order, [*cuts, event])
                events = max(events, other, key=lambda chain: self._quick_bound(search, chain)[0])
                share = 0.6
            if search.improve(max(200, work // 4), 2e-4, self._after(0.15)):
                self.offer(search.order())
            searches[place] = self._walk(search, _PATIENCE, self._after(0.15))
            if session.done:
                return
            if (session.cost, session.bound) == before and k >= len(searches):
                session.remark(f"no gain in round {k + 1} of refinement")
                return

    def _quick_bound(self, search: Search, events: list[int]) -> tuple[float, bool]:
        from checkmate.solvers.bounds.refine import quick_bound

        bound, floating = quick_bound(self.any_order, events)
        self.prove(search, bound, True)
        return bound, floating

    def _walk(self, search: Search, patience: int, out_of_time: Callable[[], bool]) -> Search:
        """Search, put the plan in an order that holds less, search there, and so on; returns where that ends.

        Args:
            search: A search with a plan.
            patience: Orders without gain after which it ends.
            out_of_time: Asked often.
        """
        from checkmate.solvers.evict.reorder import first_computations, reorder
        from checkmate.solvers.evict.search import Search
        from checkmate.solvers.local_search import suggested_decodes

        decodes = min(_DECODES, suggested_decodes(len(self.graph.ops)))
        without_gain = 0 if self.folded.reorder and math.isfinite(search.best_cost) else patience
        while without_gain < patience and not (self.session.done or out_of_time()):
            before = search.best_cost
            seed = self.random.randrange(1 << 32)
            order = reorder(self.graph, search.order(), self._room(), seed)
            other = Search(self.folded, frozenset(), seed, first_computations(order))
            other.start_from_order(order)
            if other.improve(decodes, 2e-4, out_of_time):
                self.offer(other.order())
            if other.best_cost <= before:
                search = other
            without_gain = 0 if search.best_cost < before else without_gain + 1
        return search

    def _polish(self, searches: list[Search]) -> None:
        """Search on from the best plan, and on a small graph from new ones, until nothing is gained."""
        from checkmate.solvers.local_search import suggested_decodes

        work = suggested_decodes(len(self.graph.ops))
        best = min(searches, key=lambda search: search.best_cost)
        without_gain = 0
        while math.isfinite(best.best_cost) and without_gain < _PATIENCE and not self.session.done:
            others = [self._walk(best, _PATIENCE, self.out_of_time)]
            if len(self.graph.ops) <= _FEW_OPS and self.folded.reorder:
                others.append(self._walk(self._from_new_order(), _PATIENCE, self.out_of_time))
            elif best.improve(work // 4, 1e-3, self.out_of_time):
                self.offer(best.order())
            other = min(*others, best, key=lambda search: search.best_cost)
            without_gain += 1
            if other.best_cost < best.best_cost:
                self.offer(other.order())
                without_gain = 0
            best = other

    def _from_new_order(self) -> Search:
        """A search in the given order, annealed anew."""
        from checkmate.solvers.evict.reorder import reorder
        from checkmate.solvers.evict.search import Search

        seed = self.random.randrange(1 << 32)
        order = reorder(self.graph, range(len(self.graph.ops)), self._room(), seed)
        search = Search(self.folded, frozenset(), seed, order)
        search.first(out_of_time=self.out_of_time)
        return search

    def _room(self) -> float:
        """Bytes that a plan may hold at no penalty when it is put in another order: all or a little less, at random."""
        return self.random.choice(_ROOMS) * (self.folded.budget_bytes - self.graph.resident_bytes)

    def _refine_once(self, model: CutModel, search: Search, first: list[int], share: float, *, floating: bool) -> list[int]:
        """Refine from some events for a share of the time that is left; returns the events it came to."""
        from checkmate.solvers.bounds.refine import Refinement

        session = self.session
        until = self._until(share)
        gap = max(2e-5, session.limits.gap / 4)

        def left_s() -> float:
            return 0.0 if session.done else until - session.elapsed_s()

        refinement = Refinement(model, search, partial(self.prove, search), self.offer, gap=gap, threads=session.limits.threads)
        return refinement.run(first, self.best_share, left_s, floating=floating)
