"""Limits of a solve, why it ended, its result, and results for several budgets."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, NamedTuple

import msgspec

from checkmate.core.errors import OptionError, PlanError, PlanNotFoundError
from checkmate.core.plan import Plan
from checkmate.core.units import Amount, format_at_least, format_bytes, format_cost, parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a solve.

    Attributes:
        time_s: Seconds of wall time, or None for no limit. Compiling kernels, some seconds once on a machine, is not counted.
        gap: Stop when the plan is proven within this share of the best. Measured costs are less
            precise than half a per cent.
        threads: Threads a solver may use.
        seed: Seed of everything random.
        target_cost: Stop as soon as a plan costs no more than this, or the bound proves that no plan does.

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
    """No plan, and no proof that none exists."""


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


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of steps that ran a plan; a bound on costs is worth what the costs are worth.

    Attributes:
        peak_bytes: Peak of one step, resident bytes included.
        seconds: Wall time of a step.
        planned_s: Sum of the plan's op costs; None if costs have no unit of time.
        curve: Pairs of the share of the step that had passed, and the bytes held then, resident ones included; empty if only the
            peak was measured.
    """

    peak_bytes: int
    seconds: float
    planned_s: float | None = None
    curve: tuple[tuple[float, int], ...] = ()

    @property
    def planned_over_measured(self) -> float | None:
        """The sum of the op costs over the measured time; None if costs have no unit of time."""
        return None if self.planned_s is None or self.seconds <= 0 else self.planned_s / self.seconds

    def __str__(self) -> str:
        return told_time(self.planned_s, self.seconds)


def told_time(planned_s: float | None, measured_s: float) -> str:
    """The measured time of a step, and the sum of its plan's op costs over it: wherever a gap stands, this stands beside it."""
    time = format_cost(1e9 * measured_s, "ns")
    if planned_s is None or measured_s <= 0:
        return f"a step takes {time}"
    return f"op costs sum to {planned_s / measured_s:.2f} of the measured {time}"


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
        measured: Measurements of steps that ran the plan, if there are any.
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
    measured: Measured | None = None

    def __repr__(self) -> str:
        peak, budget = format_bytes(self.peak_bytes), format_bytes(self.budget_bytes)
        ended = " ".join(filter(None, (self.termination.reason.value, self.termination.limit and f"({self.termination.limit})")))
        remarks = "".join(f"; {remark}" for remark in (*self.remarks, *([] if self.measured is None else [self.measured])))
        return (
            f"<Result {ended}: overhead {self.overhead:.4f}, gap {100 * self.gap:.2f} %, peak {peak} of {budget}, "
            f"{self.plan!r}, by {self.solver} in {self.elapsed_s:.1f} s{remarks}>"
        )


class NoPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a solve that found no plan, for a caller that asked for a value instead of an exception.

    ``plan``, ``cost``, ``overhead``, ``peak_bytes`` and ``gap`` are None: ``result.plan is None`` tells it from a `Result`.

    Attributes:
        budget_bytes: The budget that was asked for, resident bytes included.
        bound: Proven lower bound on the cost of every plan; infinite if the budget is proven too small.
        termination: How the solve ended: ``INFEASIBLE`` if it is proven that no plan exists, else ``NOT_FOUND``.
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
    """The smallest budget for which a plan was found, and a proven lower bound on the smallest possible budget.

    Attributes:
        plan: A plan with that peak, found without regard to cost. Solve with its peak as the budget for a cheaper plan.
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


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a curve.

    Attributes:
        budget_bytes: The budget, resident bytes included.
        cost: Cost of the cheapest plan found within it, in the graph's ``cost_unit``.
        overhead: Cost over the cost of computing each op once.
        bound: Proven lower bound on the cost of every plan within the budget.
        gap: ``(cost - bound) / cost``: the share of the cost that may be left to gain.
        peak_bytes: Peak of the plan, resident bytes included.
        plan: The plan.
        elapsed_s: Wall seconds that its own solve took; 0 where the neighbouring points decided it.
    """

    budget_bytes: int
    cost: int
    overhead: float
    bound: float
    gap: float
    peak_bytes: int
    plan: Plan
    elapsed_s: float


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost and bound against budget. Neither rises with the budget.

    Attributes:
        points: The points, by ascending budget.
        graph_digest: Digest of the graph.
        cost_unit: Unit of costs.
        floor_bytes: Proven: no plan of any order peaks lower. Resident bytes included.
        solver: Which solver, with its options.

    Raises:
        PlanError: The points do not ascend in budget, or cost or bound rises with it.
    """

    points: tuple[CurvePoint, ...]
    graph_digest: str
    cost_unit: str = "ns"
    floor_bytes: int = 0
    solver: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "points", tuple(self.points))
        for a, b in pairwise(self.points):
            if not (a.budget_bytes < b.budget_bytes and a.cost >= b.cost and a.bound >= b.bound):
                raise PlanError(
                    f"the points at {a.budget_bytes} and {b.budget_bytes} bytes are no part of a curve",
                    hint="list the points by ascending budget; neither cost nor bound rises with it",
                )

    def plan_within(self, budget: Amount) -> Plan:
        """The cheapest plan of the curve that keeps a budget.

        Args:
            budget: Bytes or text such as ``"8GiB"``, resident bytes included.

        Raises:
            PlanNotFoundError: The budget is below every peak of the curve.
            UnitError: The budget cannot be read.
        """
        budget_bytes = parse_bytes(budget)
        fitting = [point for point in self.points if point.peak_bytes <= budget_bytes]
        if not fitting:
            smallest = min((point.peak_bytes for point in self.points), default=0)
            raise PlanNotFoundError(
                f"no plan of the curve keeps {format_bytes(budget_bytes)}; the smallest peaks at {format_bytes(smallest)}, "
                f"and no plan of any order takes less than {format_bytes(self.floor_bytes)}",
                hint=f"raise the budget to at least {format_at_least(smallest)}, or solve for it",
            )
        return min(fitting, key=lambda point: (point.cost, point.peak_bytes)).plan
