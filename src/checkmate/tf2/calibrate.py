"""Keep a budget by measuring: plan, run on saved and restored variables, and plan again until it fits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tensorflow as tf

from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.frontend.calibration import Calibration, Offset, Trial
from checkmate.tf2._compat import grappler_off
from checkmate.tf2.allocator_peaks import AllocatorPeaks, allocator_peaks
from checkmate.tf2.apply_plan import Runner, build_function
from checkmate.tf2.capture import Capture
from checkmate.tf2.op_properties import KERNEL_RANDOM
from checkmate.tf2.peak import counts, default_device, measure_peak

_log = logging.getLogger("checkmate.tf2")

_RUNS = 2
"""Times that a plan is measured: the second time in the free chunks that restoring the variables leaves, as training will be."""

_STEPS = 2
"""Steps of one measurement: the first changes the allocator's free list, the second reproduces the steady state."""

_FINAL_TRIES = 3
"""Times that a plan which fitted may be given up because it needs more when it is built alone, as it will run."""

Replan = Callable[[int], Result]
"""The best plan within an amount of live bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A plan that was measured to keep its budget.

    Attributes:
        capture: The step.
        result: The plan, with its proof.
        function: Runs it.
        peaks: Its peak as planned, with buffers passed on, and in the allocator's chunks.
        measured_bytes: Its measured peak, resident bytes included; None where TensorFlow does not count.
    """

    capture: Capture
    result: Result
    function: Runner
    peaks: AllocatorPeaks
    measured_bytes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """A plan that was predicted to fit, and ran.

    Attributes:
        result: The plan.
        peaks: As in `Fitted`.
        measured_bytes: As in `Fitted`.
    """

    result: Result
    peaks: AllocatorPeaks
    measured_bytes: int | None


def fit(capture: Capture, budget_bytes: int, replan: Replan, batch: Sequence[tf.Tensor] | None = None) -> Fitted:
    """The cheapest plan found whose measured peak keeps a budget.

    What TensorFlow allocates differs from the live bytes of a plan: less where buffers pass from op to op, more where chunks
    are not split. Both are predicted first, so that most plans fit when they are first run.

    Args:
        capture: The step.
        budget_bytes: The most bytes at any moment, resident bytes included.
        replan: Plans within an amount of live bytes.
        batch: The flat tensors to run on; made up if left out.

    Raises:
        InfeasibleBudgetError: No plan was measured to keep the budget.
    """
    search = _Search(capture, budget_bytes, replan, [_made_up(t) for t in capture.trace.arguments] if batch is None else batch)
    for _ in range(_FINAL_TRIES):
        best = search.run()
        # Measured as it will run: without the constants and the free chunks that other plans have left.
        function = build_function(capture, best.result.plan)
        again = measure_plan(capture, function, search.batch, budget_bytes)
        if again is None or best.measured_bytes is None:
            return Fitted(capture, best.result, function, best.peaks, None)
        if again <= budget_bytes:
            if any(op.type in KERNEL_RANDOM for op in capture.members):
                function = build_function(capture, best.result.plan)  # kernels that have drawn nothing yet
            return Fitted(capture, best.result, function, best.peaks, max(again, best.measured_bytes))
        search.correct(again - best.measured_bytes, again)
    raise search.refusal()


class _Search:
    """Plans within less or more, as measuring shows.

    Args:
        capture: The step.
        budget_bytes: The most bytes at any moment, resident bytes included.
        replan: Plans within an amount of live bytes.
        batch: The flat tensors to run on.
    """

    def __init__(self, capture: Capture, budget_bytes: int, replan: Replan, batch: Sequence[tf.Tensor]) -> None:
        self.capture = capture
        self.budget_bytes = budget_bytes
        self.replan = replan
        self.batch = batch
        self.policy = Offset(resident_bytes=capture.graph.resident_bytes)
        self.bias_bytes = 0  # measured peak minus predicted peak
        self.smallest_bytes: int | None = None  # the least that a plan was found to need
        self._error: CheckmateError | None = None

    def run(self) -> _Tried:
        """The cheapest plan that fits: with headroom where there is one, else within the budget.

        Raises:
            InfeasibleBudgetError: None does.
        """
        calibration: Calibration[_Tried | None] = Calibration(self.budget_bytes, self.policy)
        while (target := calibration.next_target()) is not None:
            calibration.record(self._try(target))
        best = calibration.best(self.policy.aim_bytes(self.budget_bytes)) or calibration.best()
        if best is None or best.outcome is None:
            raise self.refusal()
        return best.outcome

    def correct(self, more_bytes: int, needed_bytes: int) -> None:
        """Record that the final plan needed ``more_bytes`` above its trial; the next plan that fits is accepted."""
        self.bias_bytes += more_bytes
        self._note(needed_bytes)
        self.policy = replace(self.policy, uses_room=False)

    def refusal(self) -> CheckmateError:
        """The error that says why there is no plan."""
        if self.smallest_bytes is None:
            assert self._error is not None
            return self._error
        return _refused(self.budget_bytes, self.smallest_bytes, self._error)

    def _try(self, target: int) -> Trial[_Tried | None]:
        """Plan within so many live bytes, and run what is predicted to fit."""
        try:
            result = self.replan(target)
        except (InfeasibleBudgetError, PlanNotFoundError) as error:
            self._error = error
            return Trial(target_bytes=target, planned_bytes=None, needed_bytes=None, cost=math.inf, outcome=None)
        aim = self.policy.aim_bytes(self.budget_bytes)
        peaks = allocator_peaks(self.capture, result.plan)
        needed, tried = peaks.chunk_bytes + self.bias_bytes, None
        if min(needed, peaks.chunk_bytes) <= self.budget_bytes:  # the excess of one plan need not be that of the next
            measured = measure_plan(self.capture, build_function(self.capture, result.plan), self.batch, self.budget_bytes)
            tried = _Tried(result, peaks, measured)
            _log_tried(tried, self.budget_bytes)
            if measured is not None:
                self.bias_bytes += measured - needed
                needed = measured
            else:  # nothing counts here, and the prediction is all there is
                needed = min(needed, aim)
        if needed > aim:
            self._note(needed)
        return Trial(
            target_bytes=target,
            planned_bytes=result.peak_bytes,
            needed_bytes=needed,
            cost=result.cost,
            overhead=result.overhead,
            measured=tried is not None and tried.measured_bytes is not None,
            outcome=tried,
        )

    def _note(self, needed_bytes: int) -> None:
        self.smallest_bytes = needed_bytes if self.smallest_bytes is None else min(self.smallest_bytes, needed_bytes)


def run_once(capture: Capture, result: Result) -> Fitted:
    """A plan that is not held to a budget, built and not run."""
    return Fitted(capture, result, build_function(capture, result.plan), allocator_peaks(capture, result.plan), None)


def measure_plan(capture: Capture, function: Runner, batch: Sequence[tf.Tensor], enough: int) -> int | None:
    """Measured peak of a function on saved and restored variables, resident bytes included; None if nothing counts.

    It is measured twice, the second time in the free chunks that restoring the variables leaves, as training will be. A plan
    that needs more than ``enough`` is not measured again.
    """
    device = default_device()
    if not counts(device):
        return None
    variables = capture.trace.function.graph.variables
    # Copies: what `numpy` gives may be the variable's own buffer, which a step would then have to copy.
    saved = [np.array(v.numpy()) for v in variables]
    resident, peak = capture.graph.resident_bytes, 0
    for _ in range(_RUNS):
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


def _log_tried(tried: _Tried, budget_bytes: int) -> None:
    if tried.measured_bytes is None:
        _log.warning(
            "the peak cannot be measured: TensorFlow does not count on %s; the plan's own account is %s of %s. Set "
            "TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow starts to have it counted",
            default_device(),
            format_bytes(tried.peaks.live_bytes),
            format_bytes(budget_bytes),
        )
        return
    _log.info(
        "planned %s, predicted %s, measured %s of %s, overhead %.4f",
        format_bytes(tried.peaks.live_bytes),
        format_bytes(tried.peaks.chunk_bytes),
        format_bytes(tried.measured_bytes),
        format_bytes(budget_bytes),
        tried.result.overhead,
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
