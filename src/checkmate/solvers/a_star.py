"""The exact optimum, or a bound, by best-first search over sets of live values."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.core.errors import OptionError
from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session


@dataclass(frozen=True, slots=True)
class AStar:
    """Exact for any order and any number of recomputations, if few states can be reached.

    A* (Hart, Nilsson and Raphael, 1968) over sets of live values. A move computes one op, after
    dropping one of the minimal sets of values that make room for it; the estimate is the cost of the ops
    that must still run. States that cannot beat the best plan are never stored. It solves small graphs, and
    long chains with room for few values; when the time or ``max_states`` ends the search, the least cost
    of the states not yet expanded is a proven bound.

    Attributes:
        max_states: Most states to store, of about 100 bytes.
    """

    max_states: int = 1 << 22

    def __post_init__(self) -> None:
        if self.max_states < 1:
            raise OptionError(f"max_states={self.max_states!r} must be one or more")

    def run(self, problem: Problem, session: Session) -> Termination:
        """Expand states in the order of the least cost of a plan through them.

        A graph with more than 128 bits of state, views tied to a place or replay bytes is refused.
        """
        from checkmate.solvers.states.exploration import Exploration
        from checkmate.solvers.states.packed_problem import pack

        fold = FoldViews.of(problem.graph, priced=problem.reorder)
        folded = fold.apply(problem)
        packed = pack(folded)
        if isinstance(packed, str):
            return Termination(Reason.NOT_FOUND, detail=packed)
        exploration = Exploration(fold, packed, session, self.max_states)
        exploration.run(lambda: session.left_s() <= 0)
        reason = Reason.NOT_FOUND if session.cost is None else Reason.FEASIBLE
        return exploration.ended or Termination(reason, limit="time")
