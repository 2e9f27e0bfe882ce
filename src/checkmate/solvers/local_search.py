"""Ruin and repair over eviction intervals."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session


@dataclass(frozen=True, slots=True)
class LocalSearch:
    """Evict at the peak what is cheapest to remake per byte, then ruin some of it and repair.

    Anytime; recomputes any op any number of times, and first computes what only the backward pass
    needs when it asks. It proves nothing. Found here, not in the literature that we know.

    Attributes:
        decodes: Sequences to try, or None for what the size of the graph suggests.
    """

    decodes: int | None = None

    def run(self, problem: Problem, session: Session) -> Termination:
        """Search from every list of targets until the work or the time is used up."""
        from checkmate.solvers.evict.search import Search
        from checkmate.solvers.targets import load_kernels, starts

        session.prepare(load_kernels)
        fold = FoldViews.of(problem.graph, priced=True)
        folded = fold.apply(problem)
        found = False
        for order, late in starts(folded, session.limits.seed):
            search = Search(folded, late, session.limits.seed, order)
            if not search.first(out_of_time=lambda: session.left_s() <= 0):
                continue
            found = True
            session.offer(fold.invert(search.order()))
            decodes = suggested_decodes(len(folded.graph.ops)) if self.decodes is None else self.decodes
            for _ in range(4):
                if session.left_s() <= 0 or session.gap <= 0:
                    break
                if search.improve(decodes // 4, 2e-4, lambda: session.left_s() <= 0):
                    session.offer(fold.invert(search.order()))
        if session.plan is None:
            detail = "the plans found do not fit" if found else "no eviction brought the peak within the budget"
            return Termination(Reason.NOT_FOUND, detail=detail)
        return Termination(Reason.FEASIBLE, limit="work")


def suggested_decodes(ops: int) -> int:
    """Sequences worth trying for a graph: about ten seconds of one core at most."""
    return max(400, min(60_000, 12_000_000 // max(1, ops)))
