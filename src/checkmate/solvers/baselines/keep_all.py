"""Every op once: training without recomputation."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.session import Session


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Compute every op once, in the graph's order or a late order of it, whichever peaks lower.

    The late order computes an op when its first reader needs it. Nothing is recomputed, so the plan
    is optimal whenever it fits.
    """

    def run(self, problem: Problem, session: Session) -> Termination:
        """Offer the one or two orders."""
        graph = problem.graph
        session.offer(range(len(graph.ops)))
        if session.plan is None and problem.reorder:
            from checkmate.solvers.evict.starts import late_order

            session.offer(late_order(graph))
        if session.plan is not None:
            return Termination(Reason.OPTIMAL)
        return Termination(Reason.NOT_FOUND, detail="computing every op once takes more than the budget")
