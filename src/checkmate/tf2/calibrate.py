"""Hold a budget by measuring: plan, run on saved and restored variables, and plan again until it fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.tf2._compat import grappler_off
from checkmate.tf2.allocator_peaks import Account, account
from checkmate.tf2.apply_plan import Runner, build_function
from checkmate.tf2.capture import Capture
from checkmate.tf2.op_properties import KERNEL_RANDOM
from checkmate.tf2.peak import counts, default_device, measure_peak

_log = logging.getLogger("checkmate.tf2")
_ROUNDS = 8
_TIMES = 2
_SETTLES = 3  # times that a plan which fitted may be given up because it takes more as it will run
_STEPS = 2  # the first leaves other free chunks than it found, and the second the same
_ROOM = 0.02  # share of the budget that is not worth planning again for
_HEADROOM = 0.06  # share of the budget above what is resident that is left for chunks that fall otherwise next time
_NEAR = 0.01  # share of the budget between what is too much and what is too little that is not worth dividing
_GOOD = 1.005  # overhead that is not worth planning again for

Ask = Callable[[int], Result]
"""The best plan within a budget."""


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A plan that was measured to keep its budget.

    Attributes:
        capture: The step.
        result: The plan, with its proof.
        function: Runs it.
        account: Its peak as planned, with buffers passed on, and in the allocator's chunks.
        measured_bytes: Its measured peak, resident bytes included; None where TensorFlow does not count.
    """

    capture: Capture
    result: Result
    function: Runner
    account: Account
    measured_bytes: int | None


def fit(capture: Capture, budget_bytes: int, ask: Ask, batch: Sequence[tf.Tensor] | None = None) -> Fitted:
    """The cheapest plan found whose measured peak keeps a budget.

    What TensorFlow allocates differs from the live bytes of a plan: less where buffers pass from op to op, more
    where chunks are not split. Both are reckoned first, so that most plans fit when they are first run.

    Args:
        capture: The step.
        budget_bytes: The most bytes at any moment, resident bytes included.
        ask: Plans within an amount of live bytes.
        batch: The flat tensors to run on; made up if left out.

    Raises:
        InfeasibleBudgetError: No plan was measured to keep the budget.
    """
    search = _Search(capture, budget_bytes, ask, [_made_up(t) for t in capture.trace.arguments] if batch is None else batch)
    for _ in range(_SETTLES):
        best = search.run()
        assert best.result.plan is not None
        # Measured as it will run: without the constants and the holes that other plans have left.
        function = build_function(capture, best.result.plan)
        again = measure_plan(capture, function, search.batch, budget_bytes)
        if again is None or best.measured_bytes is None:
            return Fitted(capture, best.result, function, best.account, None)
        if again <= budget_bytes:
            if any(op.type in KERNEL_RANDOM for op in capture.members):
                function = build_function(capture, best.result.plan)  # kernels that have drawn nothing yet
            return Fitted(capture, best.result, function, best.account, max(again, best.measured_bytes))
        search.learn(again - best.measured_bytes, again)
    raise search.refused()


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """A plan that ran.

    Attributes:
        result: The plan.
        account: As in `Fitted`.
        measured_bytes: As in `Fitted`.
    """

    result: Result
    account: Account
    measured_bytes: int | None


class _Search:
    """Plans asked for within less or more, as measuring shows."""

    def __init__(self, capture: Capture, budget_bytes: int, ask: Ask, batch: Sequence[tf.Tensor]) -> None:
        self.capture = capture
        self.budget_bytes = budget_bytes
        self.ask = ask
        self.batch = batch
        self.goal = budget_bytes - max(0, int(_HEADROOM * (budget_bytes - capture.graph.resident_bytes)))
        self.bias = 0  # what was measured beyond what was reckoned
        self.smallest: int | None = None  # least that a plan was found to take
        self.close: _Tried | None = None  # keeps the budget, though not with the headroom
        self.thrifty = True  # whether room that a plan leaves is worth looking for a cheaper one
        self.refusal: CheckmateError | None = None
        self._live = 0  # live bytes of the plan that was found last

    def run(self) -> _Tried:
        """The cheapest plan that fits.

        Raises:
            InfeasibleBudgetError: None does.
        """
        best: _Tried | None = None
        self.close = None
        target = above = self.budget_bytes  # `above`: for this much there is a plan, and it does not fit
        for _ in range(_ROUNDS):
            found, taken = self._try(target)
            if found is not None and (best is None or _cost(found.result) < _cost(best.result)):
                best = found
                room = self.goal - taken
                wide = room > _ROOM * (self.budget_bytes - self.capture.graph.resident_bytes)
                if not self.thrifty or not wide or (found.result.overhead or 1.0) <= _GOOD or found.measured_bytes is None:
                    break
                target += room
            elif best is not None or (not taken and above - target <= _NEAR * self.budget_bytes):
                break
            elif taken:
                above = min(target, self._live)
                target = above - (taken - self.goal)
            else:  # no plan is that small, or none was found in time
                target = (target + above) // 2
        best = best or self.close
        if best is None:
            raise self.refused()
        return best

    def learn(self, more_bytes: int, taken_bytes: int) -> None:
        """What was to be handed out took so much more than before; the next that fits will do."""
        self.bias += more_bytes
        self.smallest = taken_bytes if self.smallest is None else min(self.smallest, taken_bytes)
        self.thrifty = False

    def _try(self, target: int) -> tuple[_Tried | None, int]:
        """A plan within so many live bytes if it fits, and what it takes; 0 if there is none."""
        try:
            result = self.ask(target)
        except (InfeasibleBudgetError, PlanNotFoundError) as error:
            self.refusal = error
            return None, 0
        assert result.plan is not None
        assert result.peak_bytes is not None
        self._live = result.peak_bytes
        reckoned = account(self.capture, result.plan)
        taken = reckoned.chunk_bytes + self.bias
        if min(taken, reckoned.chunk_bytes) <= self.budget_bytes:  # what one plan took beyond is no law for the next
            measured = measure_plan(self.capture, build_function(self.capture, result.plan), self.batch, self.budget_bytes)
            found = _Tried(result, reckoned, measured)
            _tell(found, self.budget_bytes)
            if found.measured_bytes is None:
                return found, taken
            self.bias += found.measured_bytes - taken
            taken = found.measured_bytes
            if taken <= self.goal:
                return found, taken
            if taken <= self.budget_bytes and (self.close is None or _cost(result) < _cost(self.close.result)):
                self.close = found
        self.smallest = taken if self.smallest is None else min(self.smallest, taken)
        return None, taken

    def refused(self) -> CheckmateError:
        """Why there is no plan."""
        if self.smallest is None:
            assert self.refusal is not None
            return self.refusal
        return _refused(self.budget_bytes, self.smallest, self.refusal)


def run_once(capture: Capture, result: Result) -> Fitted:
    """A plan that is not held to a budget, built and not run."""
    assert result.plan is not None
    return Fitted(capture, result, build_function(capture, result.plan), account(capture, result.plan), None)


def measure_plan(capture: Capture, function: Runner, batch: Sequence[tf.Tensor], enough: int) -> int | None:
    """Measured peak of a function on saved and restored variables, resident bytes included; None if nothing counts.

    It is measured twice, the second time in what restoring has left of the allocator's chunks, as training will be. What
    takes more than ``enough`` need not be measured again.
    """
    device = default_device()
    if not counts(device):
        return None
    variables = capture.trace.function.graph.variables
    # Copies: what `numpy` gives may be the variable's own buffer, which a step would then have to copy.
    saved = [np.array(v.numpy()) for v in variables]
    resident, peak = capture.graph.resident_bytes, 0
    for _ in range(_TIMES):
        try:
            with grappler_off():
                for _ in range(_STEPS):
                    peak = max(peak, measure_peak(lambda: function(*batch), device=device))
        finally:
            for variable, value in zip(variables, saved, strict=True):
                _restore(variable, value)
        if resident + peak > enough:
            break
    return resident + peak


def _restore(variable: tf.Variable, value: np.ndarray) -> None:
    """Put a value back into the buffer that a variable has, so that training finds the chunks that were measured.

    `assign` takes a new buffer, and writing through a slice marks the variable as copied on every read. Subtracting is
    in place, and exact: x - x is 0, and 0 - (-v) is v. What it is not exact for (not a number, -0.0) is assigned.
    """
    if value.dtype.kind in "fiu" and value.size:
        variable.assign_sub(np.array(variable.numpy()))
        variable.assign_sub(np.negative(value))
        if np.array(variable.numpy()).tobytes() == value.tobytes():
            return
    variable.assign(value)


def _made_up(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype.is_floating:
        return tf.cast(tf.random.stateless_uniform([d or 0 for d in tensor.shape.as_list()], (1, 2)), tensor.dtype)
    return tf.zeros(tensor.shape, tensor.dtype)


def _tell(found: _Tried, budget_bytes: int) -> None:
    if found.measured_bytes is None:
        _log.warning(
            "the peak cannot be measured: TensorFlow does not count on %s; the plan's own account is %s of %s. Set "
            "TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow starts to have it counted",
            default_device(),
            format_bytes(found.account.live_bytes),
            format_bytes(budget_bytes),
        )
        return
    _log.info(
        "planned %s, reckoned %s, measured %s of %s, overhead %.4f",
        format_bytes(found.account.live_bytes),
        format_bytes(found.account.chunk_bytes),
        format_bytes(found.measured_bytes),
        format_bytes(budget_bytes),
        found.result.overhead or 1.0,
    )


def _refused(budget_bytes: int, smallest: int, refusal: CheckmateError | None) -> InfeasibleBudgetError:
    why = "" if refusal is None else f"; with fewer live bytes there is none: {refusal.message}"
    return InfeasibleBudgetError(
        f"no plan was found that keeps the budget of {format_bytes(budget_bytes)} as TensorFlow allocates: the smallest one "
        f"takes {format_bytes(smallest)} in the allocator's chunks{why}",
        hint=f"raise the budget to at least {format_at_least(smallest)}, or lower the batch size",
        budget_bytes=budget_bytes,
        floor_bytes=getattr(refusal, "floor_bytes", 0),
        smallest_bytes=smallest,
        binding_op=getattr(refusal, "binding_op", ""),
    )


def _cost(result: Result) -> int:
    assert result.cost is not None
    return result.cost
