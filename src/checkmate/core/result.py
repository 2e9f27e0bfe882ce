"""Limits of a solve, why it ended, and its result."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import msgspec

from checkmate.core.errors import OptionError
from checkmate.core.plan import Plan
from checkmate.core.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a solve.

    Attributes:
        time_s: Seconds of wall time, or None for no limit. Compiling kernels, half a minute once on a machine, is not counted.
        gap: Stop when the plan is proven within this share of the best; half a per cent is finer
            than costs are known.
        threads: Threads a solver may use.
        seed: Seed of everything random.
        target_cost: Stop as soon as a plan costs no more than this, or none is proven to.

    Raises:
        OptionError: A limit is out of range.
    """

    time_s: float | None = 60.0
    gap: float = 0.005
    threads: int = 1
    seed: int = 0
    target_cost: int | None = None

    def __post_init__(self) -> None:
        if self.time_s is not None and not self.time_s > 0:
            raise OptionError(f"time_s={self.time_s!r} must be more than zero seconds, or None")
        if not 0 <= self.gap < 1:
            raise OptionError(f"gap={self.gap!r} must be a share from 0 to less than 1")
        if self.threads < 1:
            raise OptionError(f"threads={self.threads!r} must be one or more")


class Reason(enum.Enum):
    """Why a solve ended."""

    OPTIMAL = "optimal"
    """A plan, and the bound proves that none is cheaper."""
    FEASIBLE = "feasible"
    """A plan, and a limit ended the search."""
    INFEASIBLE = "infeasible"
    """Proven: no plan keeps the budget."""
    NOT_FOUND = "not found"
    """No plan, and none is proven impossible."""


class Termination(msgspec.Struct, frozen=True):
    """How a solve ended.

    Attributes:
        reason: Why.
        limit: The limit that ended it (``"gap"``, ``"target"``, ``"time"``, ``"interrupt"``), or "".
        detail: What the solver says of it, in words.
    """

    reason: Reason
    limit: str = ""
    detail: str = ""


class Progress(NamedTuple):
    """A point in the history of a solve.

    Attributes:
        time_s: Seconds since the solve began.
        cost: Cost of the best plan so far, or None.
        bound: Proven lower bound so far.
    """

    time_s: float
    cost: int | None
    bound: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and its figures. Every figure is derived from the plan by `solve` or `evaluate`, never claimed by a solver.

    Attributes:
        plan: The plan.
        cost: Its cost, in the graph's ``cost_unit``.
        overhead: Cost over the cost of computing each op once.
        peak_bytes: Its peak, resident bytes included.
        budget_bytes: The budget it keeps, resident bytes included.
        bound: Proven lower bound on the cost of every plan that the problem allows.
        gap: ``(cost - bound) / cost``: the share of the cost that may be left to gain.
        termination: How the solve ended.
        solver: Which solver, with its options.
        elapsed_s: Wall seconds.
        history: Improvements of cost and bound over time.
        remarks: Notes of the solver, such as bounds that hold for a narrower class of plans.
    """

    plan: Plan
    cost: int
    overhead: float
    peak_bytes: int
    budget_bytes: int
    bound: float
    gap: float
    termination: Termination
    solver: str
    elapsed_s: float
    history: tuple[Progress, ...] = ()
    remarks: tuple[str, ...] = ()


class NoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a solve that found no plan, where the caller asked for a value instead of an exception.

    ``plan``, ``cost``, ``overhead``, ``peak_bytes`` and ``gap`` are None: ``result.plan is None`` tells it from a `Result`.

    Attributes:
        budget_bytes: The budget that was asked for, resident bytes included.
        bound: Proven lower bound on the cost of every plan; infinite where the budget is proven too small.
        termination: How the solve ended: ``INFEASIBLE`` if no plan is proven to exist, else ``NOT_FOUND``.
        solver: Which solver, with its options.
        elapsed_s: Wall seconds.
        history: Improvements of the bound over time.
        remarks: Notes of the solver.
    """

    budget_bytes: int
    bound: float
    termination: Termination
    solver: str
    elapsed_s: float
    history: tuple[Progress, ...] = ()
    remarks: tuple[str, ...] = ()

    plan: ClassVar[None] = None
    cost: ClassVar[None] = None
    overhead: ClassVar[None] = None
    peak_bytes: ClassVar[None] = None
    gap: ClassVar[None] = None


class MinBudget(msgspec.Struct, frozen=True, kw_only=True):
    """The smallest budget that a plan was found for, and a proof of how far from the smallest possible one it can be.

    Attributes:
        plan: A plan with that peak. It is cheap only by chance: solve for its peak to get a cheaper one.
        cost: Its cost, in the graph's ``cost_unit``.
        overhead: Cost over the cost of computing each op once.
        peak_bytes: Its peak, resident bytes included: the smallest budget found.
        floor_bytes: Proven lower bound on the peak of every plan in any order, resident bytes included.
        binding_op: Name of the op that sets the floor, or "" if the values that stay at the end do.
        why: The parts of the floor, in words.
        elapsed_s: Wall seconds.
    """

    plan: Plan
    cost: int
    overhead: float
    peak_bytes: int
    floor_bytes: int
    binding_op: str
    why: str
    elapsed_s: float

    @property
    def proven(self) -> bool:
        """Whether no smaller budget is possible."""
        return self.peak_bytes <= self.floor_bytes

    @property
    def gap(self) -> float:
        """``(peak_bytes - floor_bytes) / peak_bytes``: the share of the peak that may be left to gain."""
        return (self.peak_bytes - self.floor_bytes) / self.peak_bytes if self.peak_bytes else 0.0

    def __str__(self) -> str:
        proof = "proven" if self.proven else f"no plan needs less than {format_bytes(self.floor_bytes)}"
        return f"{format_bytes(self.peak_bytes)} ({proof}): {self.why}"
