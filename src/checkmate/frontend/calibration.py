"""Plan, run, measure and plan again, for frameworks that give a plan another peak than planned.

A compiler fuses ops, and an allocator rounds and splits. The measured peak of a step therefore differs from the planned one. The
loop is the same for every framework: a policy reads the trials so far and returns the live bytes to plan within next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes

T = TypeVar("T")

AIM: Final = 0.985
"""Share of a peak to aim at, since a prediction from another plan is off by a per cent or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(Generic[T]):
    """A plan that was tried. Without a plan its bytes are None, and its cost is infinite."""

    target_bytes: int  # live bytes within which it was planned
    planned_bytes: int | None = None  # its planned peak
    needed_bytes: int | None = None  # its peak as measured, or as predicted if a run was not worth its time
    cost: float = math.inf
    overhead: float = 1.0  # its cost over the cost of keeping everything
    measured: bool = True
    outcome: T  # the front end's own record of the trial

    @classmethod
    def of(cls, target_bytes: int, result: Result, needed_bytes: int, outcome: T) -> Trial[T]:
        """The trial of a plan that was found within a target."""
        return cls(
            target_bytes=target_bytes,
            planned_bytes=result.peak_bytes,
            needed_bytes=needed_bytes,
            cost=result.cost,
            overhead=result.overhead,
            outcome=outcome,
        )

    def within(self, limit_bytes: int) -> bool:
        """Whether the measured or predicted peak is at most a limit."""
        return self.needed_bytes is not None and self.needed_bytes <= limit_bytes


class Calibration(Generic[T]):
    """The trials of one graph, in order; a measured peak may be no more than the limit.

    Examples:
        >>> calibration = Calibration[str](100, Offset())
        >>> calibration.next_target()
        100
        >>> calibration.record(Trial(target_bytes=100, planned_bytes=98, needed_bytes=110, cost=5, outcome="too large"))
        >>> calibration.next_target()
        82
        >>> calibration.record(Trial(target_bytes=82, planned_bytes=80, needed_bytes=93, cost=6, outcome="fits"))
        >>> calibration.next_target(), calibration.best().outcome
        (None, 'fits')
    """

    def __init__(self, limit_bytes: int, policy: Policy) -> None:
        self.limit_bytes = limit_bytes
        self.policy = policy
        self.trials: list[Trial[T]] = []

    def next_target(self) -> int | None:
        """Live bytes to plan within next, or None if another trial is not worth its time."""
        return self.policy.next_target(self.trials, self.limit_bytes)

    def record(self, trial: Trial[T]) -> None:
        """Add a trial."""
        self.trials.append(trial)

    def best(self, limit_bytes: int | None = None) -> Trial[T] | None:
        """The cheapest trial within ``limit_bytes``, by default the limit of the calibration; the first of equals."""
        limit = self.limit_bytes if limit_bytes is None else limit_bytes
        return min((t for t in self.trials if t.within(limit)), key=lambda t: t.cost, default=None)

    def refusal(self, cause: CheckmateError | None = None) -> CheckmateError:
        """The error to raise if no trial keeps the limit. It names the smallest measured peak, or without a plan the cause."""
        needs = [t.needed_bytes for t in self.trials if t.needed_bytes is not None]
        if not needs and cause is not None:
            return cause
        return refusal(self.limit_bytes, min(needs, default=None), cause)


def refusal(
    limit_bytes: int, smallest_bytes: int | None, cause: CheckmateError | None = None, margin_bytes: int = 0
) -> InfeasibleBudgetError:
    """The error that names the smallest measured peak, and a budget with a margin, which it carries as ``smallest_bytes``.

    ``cause`` is the planner's own error.
    """
    found = "no plan was found"
    if smallest_bytes is not None:
        over = smallest_bytes - limit_bytes
        amount = f"{over:+} bytes" if over > 0 else "below the budget by less than the allocator's free chunks can add"
        found = f"the smallest measured peak is {format_bytes(smallest_bytes)} ({amount})"
    enough = None if smallest_bytes is None else smallest_bytes + margin_bytes
    binding_op = getattr(cause, "binding_op", "")
    found += f"; {binding_op} sets the floor of all plans" if binding_op else ""
    raised = "" if enough is None else f" to at least {format_at_least(enough)}"
    return InfeasibleBudgetError(
        f"no plan was measured to keep the budget of {format_bytes(limit_bytes)}: {found}",
        hint=f"raise the budget{raised}, or lower the batch size",
        budget_bytes=limit_bytes,
        floor_bytes=getattr(cause, "floor_bytes", 0),
        smallest_bytes=enough,
        binding_op=binding_op,
    )


def calibrate(
    calibration: Calibration[T | None],
    replan: Callable[[int], Result],
    measure: Callable[[int, Result], Trial[T | None] | None],
    hopeless: Callable[[], bool] = lambda: False,
) -> CheckmateError | None:
    """Plan, measure and record until no further trial is worth its time, no trial comes back, or none can keep the limit.

    ``measure`` takes a target in live bytes and its plan. Returns the error of the last target without a plan, if there was one.
    """
    failure: CheckmateError | None = None
    while (target := calibration.next_target()) is not None:
        try:
            trial: Trial[T | None] | None = measure(target, replan(target))
        except (InfeasibleBudgetError, PlanNotFoundError) as error:
            failure, trial = error, Trial(target_bytes=target, outcome=None)
        if trial is None:
            break
        calibration.record(trial)
        if not trial.within(calibration.limit_bytes) and hopeless():
            break
    return failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """A policy for peaks that exceed the planned one by a nearly constant amount, as an allocator's free chunks add it.

    It leaves free a share of the limit above the resident bytes. Chunks change from step to step, by up to 6 % in 40 steps of
    VGG19. Eight bisections leave less than half a per cent of the budget undivided.
    """

    resident_bytes: int = 0  # of the limit, which no plan can change
    most_trials: int = 8
    headroom: float = 0.06

    def aim_bytes(self, limit_bytes: int) -> int:
        """The peak to aim at."""
        return limit_bytes - max(0, int(self.headroom * (limit_bytes - self.resident_bytes)))

    def next_target(self, trials: Sequence[Trial[Any]], limit_bytes: int) -> int | None:
        """Correct the target of the last trial by the difference between its need and the aim; bisect if no plan was found."""
        if not trials:
            return limit_bytes
        if len(trials) >= self.most_trials:
            return None
        aim, last, own = self.aim_bytes(limit_bytes), trials[-1], limit_bytes - self.resident_bytes
        fits, over = ([t for t in trials if t.planned_bytes is not None and t.within(aim) is wanted] for wanted in (True, False))
        # The plan for `above` needs more than the aim.
        above = min((min(t.target_bytes, t.planned_bytes or 0) for t in over), default=limit_bytes)
        if fits:
            best = min(fits, key=lambda t: t.cost)
            room = min(aim - (best.needed_bytes or 0), (above - best.target_bytes) // 2 if over else limit_bytes)
            # A trial takes seconds: not for 2 % of the room, half a per cent of the cost, or 2 % above a plan that is too large.
            cheaper = max(1.005 * best.cost / best.overhead, min((1.02 * t.cost for t in over), default=0))
            worth = room > 0.02 * own and best.cost > cheaper and best.measured and (last is best or not last.within(aim))
            return best.target_bytes + room if worth else None
        if last.needed_bytes is None:
            return None if above - last.target_bytes <= 0.01 * limit_bytes else (last.target_bytes + above) // 2
        # An allocator may add more bytes than the plan itself has: the target then stops at 0.
        return max(0, above - (last.needed_bytes - aim))


@dataclass(frozen=True, slots=True, kw_only=True)
class Proportional:
    """A policy for peaks that are about a constant multiple of the planned one, as under a compiler that fuses ops.

    Each trial is a compilation of seconds to a minute: there are few. After one fits, another has to save a share of the cost.
    """

    resident_bytes: int = 0  # in every peak and in the limit; the multiple holds for the other bytes
    least_cost: int = 0  # cost of keeping everything: no plan is cheaper
    most_trials: int = 4
    least_saving: float = 0.01

    def worthwhile_cost(self, trials: Sequence[Trial[Any]], limit_bytes: int) -> float:
        """Cost up to which another plan is worth trying."""
        return (1 - self.least_saving) * min((t.cost for t in trials if t.within(limit_bytes)), default=math.inf)

    def next_target(self, trials: Sequence[Trial[Any]], limit_bytes: int) -> int | None:
        """Scale the aim by planned over measured peak; at most the middle between a plan that fits and one that does not."""
        if not trials:
            return limit_bytes
        own = [(self._own(t.planned_bytes), self._own(t.needed_bytes), t.within(limit_bytes)) for t in trials]
        fitting, over = ([(planned, needed) for planned, needed, fits in own if fits is wanted] for wanted in (True, False))
        room = max(0, limit_bytes - self.resident_bytes)
        aim = AIM * room
        full = any(needed >= aim for _, needed in fitting)
        ended = len(trials) >= self.most_trials or trials[-1].planned_bytes is None
        if ended or full or self.least_cost > self.worthwhile_cost(trials, limit_bytes):
            return None
        planned, needed = max(fitting) if fitting else min(over)
        target = int(aim * planned / max(1, needed))
        if fitting and over:
            above = min(over)[0]
            # Two plans whose peaks differ by half a per cent of the limit count as one.
            target = min(target, (planned + above) // 2) if above - planned > 0.005 * room else None
        elif over:
            target = min(target, int(AIM * planned), _secant(over, aim))
        return None if target is None else self.resident_bytes + target

    def _own(self, total_bytes: int | None) -> int:
        return 0 if total_bytes is None else total_bytes - self.resident_bytes


def _secant(over: Sequence[tuple[int, int]], aim_bytes: float) -> int:
    """Planned peak at which the line through the two smallest plans has the measured peak that is aimed at."""
    smallest, *others = sorted(over)
    planned, needed = smallest
    high = next((other for other in others if other[0] > planned), None)
    if high is None:
        return planned
    return max(0, int(planned - (needed - aim_bytes) / gain(smallest, high)))


def gain(a: tuple[int, int], b: tuple[int, int]) -> float:
    """Measured bytes by which a step shrinks for each planned byte, from the planned and measured peaks of two plans.

    The bytes that a compiler adds to a plan do not shrink with it. A constant multiple therefore underestimates smaller plans,
    trial after trial. The measured peak is taken to fall by at least a quarter of a byte for each planned byte.
    """
    return max(0.25, min(1.0, (b[1] - a[1]) / (b[0] - a[0])))


Policy = Offset | Proportional
"""Chooses the target of the next trial from the trials so far."""
