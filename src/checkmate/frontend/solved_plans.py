"""Plans that solvers found, shared by all processes of a user: a second process need not search again.

A stored plan is only a claim, like the answer of a solver: it is checked and simulated for the current graph before use, and
ignored if it fails the check. The lower bound on the cost of all plans cannot be computed from a plan: it is stored with it.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from checkmate import __version__
from checkmate.core.errors import CheckmateError
from checkmate.core.evaluate import evaluate
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Reason, Result, Termination
from checkmate.cost.database import Store

_log = logging.getLogger("checkmate.frontend")

PLANNED_BEFORE: Final = "planned before"
"""Detail of the termination of a result that comes from the store."""


_LEAST_S: Final = 0.02
"""Seconds of a solve whose plan is worth storing: it has searched, for which a new process loads kernels for a second."""


class _Solved(msgspec.Struct, frozen=True, array_like=True):
    """One solved problem."""

    order: tuple[int, ...]  # ops in the order of their computations
    bound: float  # proven lower bound on the cost of every plan
    termination: Termination
    time_s: float  # time limit of the solve, infinite for none
    gap: float  # gap at which the solve was to stop

    def answers(self, limits: Limits, found_gap: float) -> bool:
        """Whether a solve with these limits would end no later: the plan is proven, within their gap, or had as much time."""
        asked_s = math.inf if limits.time_s is None else limits.time_s
        done = self.termination.reason is Reason.OPTIMAL or found_gap <= limits.gap
        return done or (self.time_s >= asked_s and self.gap <= limits.gap)


class SolvedPlans:
    """Plans that were found before, by problem and solver.

    Any fault of the file causes a warning and no error: the problem is then solved again.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._store = Store("solved plans", _Solved, "plans are searched again in every process", path)

    @classmethod
    def of_user(cls) -> SolvedPlans | None:
        """The store in the user's cache folder; None if the environment has ``CHECKMATE_PLAN_CACHE=0``."""
        return None if os.environ.get("CHECKMATE_PLAN_CACHE") == "0" else cls()

    def get(self, problem: Problem, solver: str, limits: Limits) -> tuple[Result, bool] | None:
        """The stored plan of a problem, checked and simulated again; None without a plan that passes.

        The boolean tells whether the plan answers a solve with these limits. If not, its search had less time, and the plan is
        only a start.
        """
        began = time.perf_counter()
        key = _key(problem, solver)
        known = self._store.get([key]).get(key)
        if known is None:
            return None
        try:
            result = evaluate(problem.graph, Plan.from_order(problem.graph, known.order))
        except (CheckmateError, IndexError, OverflowError) as error:
            _log.warning("a stored plan does not hold for its graph and is not used: %s", error)
            return None
        bound = max(result.bound, known.bound)
        if result.peak_bytes > problem.budget_bytes or bound > result.cost:
            _log.warning("a stored plan does not keep its budget or costs less than its bound: not used")
            return None
        gap = (result.cost - bound) / result.cost if result.cost else 0.0
        result = msgspec.structs.replace(
            result,
            budget_bytes=problem.budget_bytes,
            bound=bound,
            gap=gap,
            termination=msgspec.structs.replace(known.termination, detail=PLANNED_BEFORE),
            solver=solver,
            elapsed_s=time.perf_counter() - began,
        )
        return result, known.answers(limits, gap)

    def add(self, problem: Problem, limits: Limits, result: Result) -> None:
        """Store the result of a solve within limits, unless the solve was very short or ended at a target."""
        if result.elapsed_s < _LEAST_S or result.termination.limit == "target":
            return
        most_s = math.inf if limits.time_s is None else limits.time_s
        solved = _Solved(result.plan.order, result.bound, result.termination, most_s, limits.gap)
        self._store.add({_key(problem, result.solver): solved}, replace=True)


def _key(problem: Problem, solver: str) -> str:
    """Hash of everything that the plan of a solver depends on.

    The digest of a graph leaves out costs, phases and resident bytes. Of resident bytes only the rest of the budget counts: a
    process allocates other tensors too, and the resident bytes of a step differ by a few from process to process.
    """
    graph = problem.graph
    facts: Sequence[object] = (
        __version__,
        solver,
        graph.digest,
        [(op.cost, op.phase) for op in graph.ops],
        problem.budget_bytes - problem.graph.resident_bytes,
        problem.recompute,
        problem.reorder,
    )
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()
