"""What a solve may use, how it ended and what it found."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from checkmate.core.errors import OptionError
from checkmate.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a solve may use.

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
    """What a solve found. Every number is derived from the plan by `solve`, never claimed.

    Attributes:
        plan: The plan, or None.
        cost: Its cost, in the graph's ``cost_unit``.
        overhead: Cost over the cost of computing each op once.
        peak_bytes: Its peak, resident bytes included.
        budget_bytes: The budget it keeps.
        bound: Proven lower bound on the cost of every plan that the problem allows.
        gap: ``(cost - bound) / cost``: the share of the cost that may be left to gain.
        termination: How the solve ended.
        solver: Which solver, with its options.
        elapsed_s: Wall seconds.
        history: Improvements of cost and bound over time.
        remarks: What the solver did, and bounds that hold for a narrower class, in words.
    """

    plan: Plan | None
    cost: int | None
    overhead: float | None
    peak_bytes: int | None
    budget_bytes: int
    bound: float
    gap: float | None
    termination: Termination
    solver: str
    elapsed_s: float
    history: tuple[Progress, ...] = ()
    remarks: tuple[str, ...] = ()
