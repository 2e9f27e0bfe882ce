"""Shared by all phases of the default solver: the folded problem, the session with its clock, the searches and their proofs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from random import Random

from checkmate.core.problem import Problem
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.refine import single_cuts
from checkmate.solvers.evict.search import Search
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session
from checkmate.solvers.tunables import TUNABLES

_log = logging.getLogger("checkmate.solvers.auto")


class Run:
    """One run of `Auto` on a problem whose views are folded.

    Bounds and gaps are handled as *shares*: extra cost divided by `once`, the cost of computing each op of the folded graph once.
    These numbers are near 1, as engines need, and do not depend on the cost unit.
    """

    def __init__(self, problem: Problem, session: Session) -> None:
        self.session = session
        self.fold = FoldViews.of(problem.graph, priced=problem.reorder)
        self.folded = self.fold.apply(problem)
        self.graph = self.folded.graph
        self.once = max(1, self.graph.cost)
        self.few = len(self.graph.ops) <= TUNABLES.many_ops
        self.random = Random(session.limits.seed)
        self.searches: list[Search] = []

    @cached_property
    def any_order(self) -> CutModel:
        """The cuts' model for any order; made after the first plan, because it takes a second on 100,000 ops."""
        return CutModel(self.folded)

    def best_search(self) -> Search:
        """The search with the cheapest plan."""
        return min(self.searches, key=lambda search: search.best_cost)

    def offer(self, order: list[int]) -> bool:
        """Give the session a plan of the folded graph, as an order of computations; returns whether it is the best so far."""
        return self.session.offer(self.fold.invert(order))

    def prove(self, search: Search, share: float, any_order: bool) -> None:
        """Take a bound; a bound that holds only for a search's order is kept with the search, to be reported by name."""
        if any_order or not self.folded.reorder:
            self.session.prove(self.fold.original.cost + self.once * max(0.0, share))
        elif share < math.inf:
            search.order_bound = max(search.order_bound, share)

    def best_share(self) -> float:
        """Cost of the best plan beyond computing every op once, as a share; infinite without a plan."""
        return math.inf if self.session.cost is None else (self.session.cost - self.fold.original.cost) / self.once

    def enough_share(self) -> float:
        """The least bound that meets the gap; at a gap of 0 the share of the best plan."""
        if self.session.cost is None:
            return math.inf
        enough = self.session.cost * (1 - self.session.limits.gap)
        # With ten times an engine's tolerance in addition.
        return min(self.best_share(), (enough - self.fold.original.cost) / self.once + 1e-5)

    def known_share(self) -> float:
        """The best bound for any order, as a share."""
        return (self.session.bound - self.fold.original.cost) / self.once

    def out_of_time(self) -> bool:
        """Whether the session's time is up."""
        return self.session.left_s() <= 0

    def until(self, work: str, share: float) -> float:
        """Log the beginning of some work; returns the moment on the session's clock when it must end."""
        now, seconds = self.session.elapsed_s(), self.seconds_of(share)
        cost, bound = self.session.cost, self.session.bound
        _log.debug("%.2f s: %s, for %.2f s at most; cost %s, bound %.0f", now, work, seconds, cost, bound)
        return now + seconds

    def seconds_of(self, share: float) -> float:
        """Seconds of a share of the time left."""
        return share * min(TUNABLES.horizon_s, self.session.left_s())

    def seconds_to(self, until_s: float) -> Callable[[], float]:
        """A function for the seconds left up to a moment of the session's clock; none once the session is done."""
        return lambda: 0.0 if self.session.done else until_s - self.session.elapsed_s()

    def single_cuts(self, model: CutModel, events: Sequence[int], search: Search, out_of_time: Callable[[], bool]) -> int | None:
        """`bounds.events.refine.single_cuts` with the session's limits."""
        return single_cuts(model, events, partial(self.prove, search), out_of_time, time_up=self.session.time_up)

    def improve(self, search: Search, decodes: int, until_s: float, temperature: float = TUNABLES.temperature) -> bool:
        """`Search.improve` up to a moment of the session's clock; returns whether it found the best plan so far."""
        with self.session.within(until_s):
            cheaper = search.improve(decodes, temperature, lambda: self.session.elapsed_s() > until_s)
        return cheaper and self.offer(search.order())
