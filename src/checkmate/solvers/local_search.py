"""Ruin and repair over eviction intervals."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSearchParameters:
    """Parameters of `LocalSearch`.

    Attributes:
        work: Sequences times ops that are worth trying: decoding takes time in proportion to the ops, about a microsecond
            each, so that this is about ten seconds of one core. On the graphs of 70 to 9,000 ops first tried, a search came
            to its final cost in 0.5 to 3 s.
        least_decodes: Sequences to try on the largest graphs.
        most_decodes: Sequences to try on the smallest.
        parts: The work is done in so many searches, each from the best plan and with the temperature at its start again.
        temperature: Start of the temperature, as a share of the cost.
    """

    work: int = 12_000_000
    least_decodes: int = 400
    most_decodes: int = 60_000
    parts: int = 4
    temperature: float = 6e-4


PARAMETERS = LocalSearchParameters()


@dataclass(frozen=True, slots=True)
class LocalSearch:
    """Evict at the peak what is cheapest to compute again per byte, then undo some evictions and repair.

    Anytime: the first plan is there in a fraction of a second, better ones follow. Any op may be computed any number of
    times, and forward ops that only the backward pass needs are first computed there. It proves nothing. The neighbourhood
    is ruin and recreate (Schrimpf et al. 2000); the code by intervals of absence is our own, see `checkmate.solvers.evict`.

    Attributes:
        decodes: Sequences to try, or None for as many as `suggested_decodes`.
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
            for _ in range(PARAMETERS.parts):
                if session.left_s() <= 0 or session.gap <= 0:
                    break
                if search.improve(decodes // PARAMETERS.parts, PARAMETERS.temperature, lambda: session.left_s() <= 0):
                    session.offer(fold.invert(search.order()))
        if session.plan is None:
            detail = "the plans found do not fit" if found else "no eviction brought the peak within the budget"
            return Termination(Reason.NOT_FOUND, detail=detail)
        return Termination(Reason.FEASIBLE, limit="work")


def suggested_decodes(ops: int) -> int:
    """Sequences worth trying for a graph: about ten seconds of one core at most.

    Args:
        ops: Number of ops, views not counted.
    """
    return max(PARAMETERS.least_decodes, min(PARAMETERS.most_decodes, PARAMETERS.work // max(1, ops)))
