"""Retention intervals in CP-SAT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from checkmate.core.errors import OptionError, SolverError
from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.backends.stage_program import given_order_plan, inputs_with_storage
from checkmate.solvers.reductions.fold_views import FoldViews, may_run_again
from checkmate.solvers.session import Session

_CHILD = "checkmate.solvers.backends.intervals_child"


@dataclass(frozen=True, slots=True)
class Intervals:
    """Retention intervals under a cumulative constraint, in CP-SAT: few variables, one a computation.

    Moccasin (Bartan et al. 2023): each op is computed at most a given number of times, each time at a place in
    the stages of the graph's own order, and its value retained from there to an end. Exact in that class,
    which leaves out other orders, so its bound is reported by name. CP-SAT comes with OR-Tools (``pip
    install "checkmate-remat[solvers]"``) and runs in a child process, which is ended at the time limit.

    Attributes:
        max_recomputes: Most times an op is computed again.
        max_ops: Larger graphs (views not counted) are refused.
        warm_start: Whether to start from a quick plan of the local search.
    """

    max_recomputes: int = 2
    max_ops: int = 500
    warm_start: bool = True

    def __post_init__(self) -> None:
        if self.max_recomputes < 0:
            raise OptionError(
                f"max_recomputes={self.max_recomputes!r} must be zero or more",
                hint="choose how often an op may be computed again, such as 2",
            )

    def run(self, problem: Problem, session: Session) -> Termination:
        """Start from a quick plan and take what the engine finds, to the limits.

        Raises:
            MissingExtraError: OR-Tools is not installed.
            SolverError: The engine's answer is not an order of the graph's ops.
        """
        from checkmate.solvers.backends.child import ask, require_ortools

        require_ortools()
        fold = FoldViews.of(problem.graph)
        folded = fold.apply(problem)
        count = len(folded.graph.ops)
        if count > self.max_ops:
            return Termination(Reason.NOT_FOUND, detail=f"{count} ops, and retention intervals stop at {self.max_ops}")
        if folded.budget_bytes < folded.graph.resident_bytes:
            return Termination(Reason.NOT_FOUND, detail="the budget is below the resident bytes")
        hint = given_order_plan(folded, session) if self.warm_start else None
        if hint is not None:
            session.offer(fold.invert(hint))
            if session.done:
                return Termination(Reason.FEASIBLE)

        def take(said: Any) -> None:
            try:
                order = msgspec.convert(said, list[int])
                session.offer(fold.invert(order))
            except (msgspec.ValidationError, IndexError) as error:
                raise SolverError(f"the engine's answer is not an order of {count} ops: {error}") from error

        time_s = None if math.isinf(session.left_s()) else session.left_s()
        answer = ask(_CHILD, self._job(folded, session, hint), time_s=time_s, on_message=take)
        return self._termination(answer.reply, answer.detail, folded, session, fold.cost_offset)

    def _termination(
        self, reply: dict[str, Any] | None, detail: str, folded: Problem, session: Session, cost_offset: int
    ) -> Termination:
        reason = Reason.FEASIBLE if session.plan else Reason.NOT_FOUND
        limit = "time" if session.left_s() <= 0 else ""
        if reply is None:
            return Termination(reason, limit, detail)
        if reply["invalid"]:
            raise SolverError("CP-SAT refused the model: amounts too large for it")
        kind = f"stages of the graph's own order, no op computed again more than {self.max_recomputes} times"
        if reply["infeasible"]:
            return Termination(reason, limit, f"proven: no plan keeps the budget in {kind}")
        if reply["bound"] is not None and all(value.base is None for value in folded.graph.values):
            session.remark(f"given-order bound, {kind}: {reply['bound'] + cost_offset:.0f}")
        return Termination(reason, limit)

    def _job(self, problem: Problem, session: Session, hint: list[int] | None) -> dict[str, Any]:
        graph = problem.graph
        return {
            "inputs": inputs_with_storage(graph),
            "outputs": [op.outputs for op in graph.ops],
            "cost": [op.cost for op in graph.ops],
            "workspace": [op.workspace_bytes for op in graph.ops],
            "replay": [op.replay_bytes for op in graph.ops],
            "times": [1 + (self.max_recomputes if may_run_again(problem, o) else 0) for o in range(len(graph.ops))],
            "last": [min(op.clobbered_by, default=len(graph.ops)) for op in graph.ops],
            "size": [value.size_bytes for value in graph.values],
            "kept": [value.kept for value in graph.values],
            "budget": problem.budget_bytes - graph.resident_bytes,
            "hint": hint,
            "gap": session.limits.gap,
            "threads": session.limits.threads,
            "seed": session.limits.seed,
        }
