"""Ruin and repair over eviction intervals."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session
from checkmate.solvers.tunables import TUNABLES, suggested_decodes


@dataclass(frozen=True, slots=True)
class LocalSearch:
    """Evict the values at the peak that are cheapest to compute again per byte, then undo some evictions and repair.

    Anytime: the first plan is found in a fraction of a second, better ones follow. Any op may be computed any number of
    times, and forward ops that only the backward pass needs are first computed there. It proves nothing. The neighbourhood
    is ruin and recreate (Schrimpf et al. 2000); the code by intervals of absence is our own, see `checkmate.solvers.evict`.

    Attributes:
        decodes: Sequences to try, or None for about ten seconds of one core.
    """

    decodes: int | None = None

    def run(self, problem: Problem, session: Session) -> Termination:
        """Search from every start (`evict.starts.starts`) until the work or the time is used up."""
        from checkmate.solvers.evict.starts import starts

        fold = FoldViews.of(problem.graph, priced=True)
        folded = fold.apply(problem)
        found = False
        for start in starts(folded, session.limits.seed, session.time_up):
            search = start.search(folded, session.limits.seed, session.time_up)
            if not search.first(out_of_time=lambda: session.left_s() <= 0):
                continue
            found = True
            session.offer(fold.invert(search.order()))
            decodes = suggested_decodes(len(folded.graph.ops)) if self.decodes is None else self.decodes
            for _ in range(4):  # each from the best plan and the initial temperature
                if session.left_s() <= 0 or session.gap <= 0:
                    break
                if search.improve(decodes // 4, TUNABLES.temperature, lambda: session.left_s() <= 0):
                    session.offer(fold.invert(search.order()))
        if session.plan is None:
            detail = "the plans found do not fit" if found else "no eviction brought the peak within the budget"
            return Termination(Reason.NOT_FOUND, detail=detail)
        return Termination(Reason.FEASIBLE, limit="work")
