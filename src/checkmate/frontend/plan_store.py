"""Measured peaks of compiled plans, shared by all processes of a user.

The peak of a compiled plan is known only after it has run. Measured plans are therefore stored with their peaks. The answer to
each budget is stored too: no smaller budget is later answered with a larger peak (`PlanStore.monotone_bounds`).
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

import checkmate
from checkmate.cost.database import Store
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

        def added(known: _Measured | None) -> _Measured:
            known = known or _Measured()
            others = (other for other in known.plans if other.order != plan.order)
            return _Measured((*others, plan), known.answers)

        self._store.change(self.key, added)

    def record_answer(self, budget_bytes: int, peak_bytes: int) -> None:
        """Store the measured peak of the plan that was chosen for a budget above the resident bytes."""

        def recorded(known: _Measured | None) -> _Measured:
            known = known or _Measured()
            return _Measured(known.plans, known.answers | {budget_bytes: peak_bytes})

        self._store.change(self.key, recorded)

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
