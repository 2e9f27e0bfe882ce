"""Calibration: plan, measure the peak on saved and restored variables, and plan again until the budget is kept."""

from __future__ import annotations

import logging
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
from checkmate.tf2.peak import default_device, has_memory_stats, measure_peak

_log = logging.getLogger("checkmate.tf2")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementEffort:
    """How often plans are measured.

    Attributes:
        runs: Measurements of a plan. The second one runs with the free chunks that restoring the variables leaves, as
            training does; it was up to a few per cent off the first (docs/decisions/0051).
        steps: Steps of one measurement: the first changes the allocator's free list, the second reproduces the steady state.
        final_trials: Searches that end with a final measurement. The final plan is built and measured alone, without the
            constants and free chunks that functions of other plans leave; it then needed up to 20 % more.
    """

    runs: int = 2
    steps: int = 2
    final_trials: int = 3


_EFFORT = MeasurementEffort()

Replan = Callable[[int], Result]
"""Makes the cheapest plan within an amount of live bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFunction:
    """A captured step with its plan, written as a function.

    Attributes:
        capture: The captured step.
        result: The plan, with its proof.
        function: Runs the plan.
        peaks: Predicted peaks of the plan.
        measured_bytes: Measured peak, resident bytes included; None if the plan was not measured.
    """

    capture: Capture
    result: Result
    function: Runner
    peaks: AllocatorPeaks
    measured_bytes: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _TrialRun:
    """A plan that was predicted to keep the budget and was therefore run.

    Attributes:
        result: The plan.
        peaks: Predicted peaks of the plan.
        measured_bytes: Measured peak, resident bytes included; None if TensorFlow reports no memory statistics.
    """

    result: Result
    peaks: AllocatorPeaks
    measured_bytes: int | None


def calibrate(capture: Capture, budget_bytes: int, replan: Replan, batch: Sequence[tf.Tensor] | None = None) -> PlannedFunction:
    """The cheapest plan found whose measured peak keeps a budget.

    TensorFlow allocates other bytes than the live bytes of a plan: fewer where buffers are forwarded, more where chunks are
    not split. `allocator_peaks` predicts both, and only plans that are predicted to fit are run.

    Args:
        capture: The captured step.
        budget_bytes: Largest allowed peak, resident bytes included.
        replan: Makes the cheapest plan within an amount of live bytes.
        batch: The flat tensors to run on; synthetic ones by default.

    Raises:
        InfeasibleBudgetError: No plan was measured to keep the budget.
    """
    search = _Search(capture, budget_bytes, replan, [_synthetic(t) for t in capture.trace.arguments] if batch is None else batch)
    for _ in range(_EFFORT.final_trials):
        best = search.run()
        # Measured as it will run: without the constants and free chunks that functions of other plans leave.
        function = build_function(capture, best.result.plan)
        final = measure_plan(capture, function, search.batch, budget_bytes)
        if final is None or best.measured_bytes is None:
            return PlannedFunction(capture, best.result, function, best.peaks, None)
        if final <= budget_bytes:
            if any(op.type in KERNEL_RANDOM for op in capture.members):
                function = build_function(capture, best.result.plan)  # new kernels, whose random streams are at their start
            return PlannedFunction(capture, best.result, function, best.peaks, max(final, best.measured_bytes))
        search.correct(final - best.measured_bytes, final)
    raise search.no_plan_error()


class _Search:
    """Searches for the cheapest plan whose measured peak keeps the budget.

    Args:
        capture: The captured step.
        budget_bytes: Largest allowed peak, resident bytes included.
        replan: Makes the cheapest plan within an amount of live bytes.
        batch: The flat tensors to run on.
    """

    def __init__(self, capture: Capture, budget_bytes: int, replan: Replan, batch: Sequence[tf.Tensor]) -> None:
        self.capture = capture
        self.budget_bytes = budget_bytes
        self.replan = replan
        self.batch = batch
        self.policy = Offset(resident_bytes=capture.graph.resident_bytes)
        self.bias_bytes = 0  # measured peak minus predicted peak
        self.smallest_bytes: int | None = None  # smallest peak of a plan so far
        self._error: CheckmateError | None = None

    def run(self) -> _TrialRun:
        """The cheapest plan that fits: with headroom where there is one, else within the budget.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget.
        """
        calibration: Calibration[_TrialRun | None] = Calibration(self.budget_bytes, self.policy)
        while (target := calibration.next_target()) is not None:
            calibration.record(self._try(target))
        best = calibration.best(self.policy.aim_bytes(self.budget_bytes)) or calibration.best()
        if best is None or best.outcome is None:
            raise self.no_plan_error()
        return best.outcome

    def correct(self, excess_bytes: int, needed_bytes: int) -> None:
        """Record that the final plan needed ``excess_bytes`` more than its trial; the next plan that fits is accepted."""
        self.bias_bytes += excess_bytes
        self._record_peak(needed_bytes)
        self.policy = replace(self.policy, uses_room=False)

    def no_plan_error(self) -> CheckmateError:
        """The error to raise: why no plan keeps the budget."""
        if self.smallest_bytes is None:
            assert self._error is not None
            return self._error
        return _infeasible(self.budget_bytes, self.smallest_bytes, self._error)

    def _try(self, target: int) -> Trial[_TrialRun | None]:
        """Plan within an amount of live bytes, and run the plan if it is predicted to fit."""
        try:
            result = self.replan(target)
        except (InfeasibleBudgetError, PlanNotFoundError) as error:
            self._error = error
            return Trial.without_plan(target, None)
        aim = self.policy.aim_bytes(self.budget_bytes)
        peaks = allocator_peaks(self.capture, result.plan)
        needed, run = peaks.chunk_bytes + self.bias_bytes, None
        if min(needed, peaks.chunk_bytes) <= self.budget_bytes:  # another plan can exceed its prediction by less
            peak = measure_plan(self.capture, build_function(self.capture, result.plan), self.batch, self.budget_bytes)
            run = _TrialRun(result, peaks, peak)
            _log_trial(run, self.budget_bytes)
            if peak is not None:
                self.bias_bytes += peak - needed
                needed = peak
            else:  # no memory statistics: the prediction counts
                needed = min(needed, aim)
        if needed > aim:
            self._record_peak(needed)
        measured = run is not None and run.measured_bytes is not None
        return Trial.of(target, result, needed, run, measured=measured)

    def _record_peak(self, needed_bytes: int) -> None:
        self.smallest_bytes = needed_bytes if self.smallest_bytes is None else min(self.smallest_bytes, needed_bytes)


def without_calibration(capture: Capture, result: Result) -> PlannedFunction:
    """Write a plan as a function without running it, for a plan that is given or needs no calibration."""
    return PlannedFunction(capture, result, build_function(capture, result.plan), allocator_peaks(capture, result.plan), None)


def measure_plan(capture: Capture, function: Runner, batch: Sequence[tf.Tensor], limit_bytes: int) -> int | None:
    """Measured peak of a plan, with all variables saved before and restored after each measurement.

    Args:
        capture: The captured step.
        function: Runs the plan.
        batch: The flat tensors to run on.
        limit_bytes: After a measurement above this, the plan is not measured again.

    Returns:
        Bytes, resident bytes included; None if TensorFlow reports no memory statistics.
    """
    device = default_device()
    if not has_memory_stats(device):
        return None
    variables = capture.trace.variables
    # Copies: `numpy` can return the variable's buffer itself, and a second reference would make a step copy the variable.
    saved = [np.array(v.numpy()) for v in variables]
    resident, peak = capture.graph.resident_bytes, 0
    for _ in range(_EFFORT.runs):
        try:
            with grappler_off():
                for _ in range(_EFFORT.steps):
                    peak = max(peak, measure_peak(lambda: function(*batch), device=device))
        finally:
            for variable, value in zip(variables, saved, strict=True):
                _restore(variable, value)
        if resident + peak > limit_bytes:
            break
    return resident + peak


def _restore(variable: tf.Variable, value: np.ndarray) -> None:
    """Restore a variable in its current buffer, so that training runs with the free chunks that were measured.

    `assign` allocates a new buffer, and assigning to a slice makes the variable copy on every read. `assign_sub` works in
    place and is exact: x - x is 0, and 0 - (-v) is v. Values for which it is not exact (NaN, -0.0) are assigned.
    """
    if value.dtype.kind in "fiu" and value.size:
        variable.assign_sub(np.array(variable.numpy()))
        variable.assign_sub(np.negative(value))
        if np.array(variable.numpy()).tobytes() == value.tobytes():
            return
    variable.assign(value)


def _synthetic(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor of the same shape and type: uniform random floats in [0, 1), or zeros."""
    if tensor.dtype.is_floating:
        return tf.cast(tf.random.stateless_uniform([d or 0 for d in tensor.shape.as_list()], (1, 2)), tensor.dtype)
    return tf.zeros(tensor.shape, tensor.dtype)


def _log_trial(trial: _TrialRun, budget_bytes: int) -> None:
    if trial.measured_bytes is None:
        _log.warning(
            "the peak cannot be measured: TensorFlow reports no memory statistics for %s; the predicted peak is %s of %s. "
            "Set the environment variable TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow starts to measure it",
            default_device(),
            format_bytes(trial.peaks.live_bytes),
            format_bytes(budget_bytes),
        )
        return
    _log.info(
        "planned %s, predicted %s, measured %s of %s, overhead %.4f",
        format_bytes(trial.peaks.live_bytes),
        format_bytes(trial.peaks.chunk_bytes),
        format_bytes(trial.measured_bytes),
        format_bytes(budget_bytes),
        trial.result.overhead,
    )


def _infeasible(budget_bytes: int, smallest: int, planning_error: CheckmateError | None) -> InfeasibleBudgetError:
    why = "" if planning_error is None else f"; planning within fewer live bytes failed: {planning_error.message}"
    return InfeasibleBudgetError(
        f"no plan was found that keeps the budget of {format_bytes(budget_bytes)} in TensorFlow's allocator: the smallest plan "
        f"allocates chunks of {format_bytes(smallest)}{why}",
        hint=f"raise the budget to at least {format_at_least(smallest)}, or lower the batch size",
        budget_bytes=budget_bytes,
        floor_bytes=getattr(planning_error, "floor_bytes", 0),
        smallest_bytes=smallest,
        binding_op=getattr(planning_error, "binding_op", ""),
    )
