"""Plans that all processes of a user share: measured peaks of compiled plans, and plans that solvers found.

The peak of a compiled plan is known only after it has run. Measured plans are therefore stored with their peaks. The answer to
each budget is stored too: no smaller budget is later answered with a larger peak (`PlanStore.monotone_bounds`).

A second process need not search for a plan again. A stored plan is only a claim, like the answer of a solver: it is checked and
simulated for the current graph before use, and ignored if it fails the check. The lower bound on the cost of all plans cannot be
computed from a plan: it is stored with it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

import checkmate
from checkmate import __version__
from checkmate.core.errors import CheckmateError
from checkmate.core.evaluate import evaluate
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Reason, Result, Termination
from checkmate.cost.store import Store
from checkmate.frontend.step_memory import StepMemory


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan that was compiled, and the measured memory of the step."""

    order: tuple[int, ...]  # ops in the order of their computations
    memory: StepMemory


class _Measured(msgspec.Struct, frozen=True):
    """All that is known of one graph."""

    plans: tuple[MeasuredPlan, ...] = ()
    answers: dict[int, int] = {}  # measured peak of the plan that was chosen for each budget


class PlanStore:
    """Measured plans of one graph, compiled one way: the key covers everything that the measured peaks depend on."""

    def __init__(self, key: str, path: str | os.PathLike[str] | None = None) -> None:
        self.key = key
        self._store = Store("measured plans", _Measured, "compiled plans are measured again in every process", path)

    @property
    def _known(self) -> _Measured:
        return self._store.get([self.key]).get(self.key, _Measured())

    def all(self) -> list[MeasuredPlan]:
        """Every plan, the smallest peak first."""
        return sorted(self._known.plans, key=lambda plan: (plan.memory.peak_bytes, plan.order))

    def add(self, plan: MeasuredPlan) -> None:
        """Store a plan; an earlier measurement of the same plan is replaced."""

        def added(known: _Measured) -> _Measured:
            others = (other for other in known.plans if other.order != plan.order)
            return _Measured((*others, plan), known.answers)

        self._store.change(self.key, _Measured(), added)

    def record_answer(self, budget_bytes: int, peak_bytes: int) -> None:
        """Store the measured peak of the plan that was chosen for a budget above the resident bytes."""
        answer = {budget_bytes: peak_bytes}
        self._store.change(self.key, _Measured(), lambda known: _Measured(known.plans, known.answers | answer))

    def monotone_bounds(self, budget_bytes: int) -> tuple[int, int]:
        """Bounds on the measured peak for a budget above the resident bytes that keep peaks monotone in the budget.

        They are the largest peak that answered a smaller budget, and the smallest peak that answered a larger one, at most the
        budget.
        """
        answers = self._known.answers.items()
        least = max((peak for budget, peak in answers if budget < budget_bytes), default=0)
        return least, min([budget_bytes, *(peak for budget, peak in answers if budget > budget_bytes)])


def misfits() -> Store[int]:
    """Steps that keep the budget in no compilation, with the bytes of the smallest one."""
    return Store("misfits", int, "a step is compiled in every process to find out that it does not fit")


@functools.cache
def sources_digest() -> str:
    """Hash of this package's sources, for keys: other sources may compile the same plan to code with another peak."""
    digest = hashlib.sha256()
    for path in sorted(Path(checkmate.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


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
