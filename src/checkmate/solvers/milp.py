"""The integer program of Jain et al. (2020), on HiGHS."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.backends.stage_program import StageProgram
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session
from checkmate.solvers.tunables import TUNABLES

if TYPE_CHECKING:
    from checkmate.solvers.backends.program import Floats


@dataclass(frozen=True, slots=True)
class Milp:
    """Frontier-advancing stages as a mixed-integer program: exact in its class.

    Stage t ends with the first computation of op t in the graph's order. Before that it may compute any earlier
    ops again, each once, in ascending order. That is the class of Jain et al. (2020), eq. 9. A bound on it is not a bound on
    plans of other orders, so it is reported by name, and ``Result.bound`` comes from event cuts. A view that a rule ties to
    its place is assumed to need its storage's owner too, which can only exclude plans. Liveness is modelled by the last
    reader in a stage instead of by FREE, which is tighter. The engine starts from a plan of the local search: that took
    MobileNet (185 ops) from 8.3 to 1.0 s.

    Attributes:
        max_ops: Larger graphs (views not counted) are refused: the program grows with the square of the ops.
    """

    max_ops: int = 400

    def run(self, problem: Problem, session: Session) -> Termination:
        """Build the program, start it from a quick plan and let the engine run to the limits.

        Raises:
            SolverError: The engine's answer is no solution.
        """
        from checkmate.solvers.backends.highs import solve_integer

        fold = FoldViews.of(problem.graph)
        folded = fold.apply(problem)
        if len(folded.graph.ops) > self.max_ops:
            detail = f"{len(folded.graph.ops)} ops, and the stage program stops at {self.max_ops}"
            return Termination(Reason.NOT_FOUND, detail=detail)
        stages = StageProgram(folded)
        program = stages.build()
        self._prove_any_order(folded, session, fold)
        quick = _given_order_plan(folded, session)
        if quick is not None:
            session.offer(fold.invert(quick))

        def take(solution: Floats) -> None:
            session.offer(fold.invert(stages.order(solution)))

        scale = max(1, folded.graph.cost)
        gap = session.limits.gap * (session.cost or problem.graph.cost) / scale
        solved = solve_integer(
            program,
            time_s=session.left_s(),
            # Engines have tolerances of ten times the least gap.
            absolute_gap=max(1e-7, gap),
            threads=session.limits.threads,
            start=None if quick is None else stages.solution(quick),
            on_solution=take,
        )
        if solved.solution is not None:
            take(solved.solution)
        if math.isinf(solved.bound) and solved.bound > 0:
            return Termination(Reason.NOT_FOUND, detail="proven: no plan in stages of the graph's own order keeps the budget")
        if math.isfinite(solved.bound) and all(value.base is None for value in folded.graph.values):
            # The program's objective includes first computations, unlike that of event cuts.
            bound = solved.bound * scale + fold.cost_offset
            session.remark(f"given-order bound, stages of the graph's own order only: {bound:.0f}")
        limit = "" if solved.finished else "time"
        return Termination(Reason.FEASIBLE if session.plan else Reason.NOT_FOUND, limit)

    def _prove_any_order(self, folded: Problem, session: Session, fold: FoldViews) -> None:
        """Prove the bounds of single events."""
        from checkmate.solvers.bounds.events.cut_model import CutModel
        from checkmate.solvers.bounds.events.refine import promising_events, single_cuts

        def prove(share: float, any_order: bool) -> None:
            if any_order and share >= 0:
                session.prove(fold.original.cost + share * max(1, folded.graph.cost))

        until = session.elapsed_s() + 5.0  # enough to close the gap at many moderate budgets
        events = promising_events(folded.graph, [range(len(folded.graph.ops))])
        single_cuts(CutModel(folded), events, prove, lambda: session.elapsed_s() > until)


def _given_order_plan(problem: Problem, session: Session) -> list[int] | None:
    """A quick plan whose first computations are in the graph's own order, to start the engine from; None if none is found."""
    from checkmate.solvers.evict.search import Search

    given = Problem(problem.graph, problem.budget_bytes, problem.recompute, reorder=False)
    search = Search(given, frozenset(), session.limits.seed, time_up=session.time_up)
    if not search.first(out_of_time=lambda: session.left_s() <= 0):
        return None
    search.improve(400, TUNABLES.temperature, lambda: session.left_s() <= 0)  # a fraction of a second
    return search.order()
