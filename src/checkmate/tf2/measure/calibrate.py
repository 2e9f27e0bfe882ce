"""Calibration: plan, measure the peak on saved and restored variables, and plan again until the budget is kept."""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import tensorflow as tf

from checkmate.core.budget import Budget
from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.problem import Problem
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.frontend import progress
from checkmate.frontend.calibration import Calibration, Offset, Trial
from checkmate.frontend.planner import near_smallest
from checkmate.solvers.solve import unit_question
from checkmate.tf2._compat import grappler_off
from checkmate.tf2.apply_plan import Runner, build_function
from checkmate.tf2.graph.capture import Capture
from checkmate.tf2.graph.op_properties import KERNEL_RANDOM
from checkmate.tf2.measure.allocator_peaks import AllocatorPeaks, allocator_peaks
from checkmate.tf2.measure.moving_batches import moving_batches
from checkmate.tf2.measure.peak import default_device, has_memory_stats, measure_peak
from checkmate.tf2.measure.profiler import synthetic_batch
from checkmate.tf2.measure.saved_variables import restored

_log = logging.getLogger("checkmate.tf2")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementEffort:
    """How often plans are measured, and when a budget is refused.

    Attributes:
        runs: Measurements of a plan. The second one runs with the free chunks that restoring the variables leaves, as
            training does; it was up to a few per cent off the first (docs/decisions/0014).
        steps: Steps of one measurement: the first changes the allocator's free list, the second reproduces the steady state.
        final_trials: Searches that end with a final measurement. The final plan is built and measured alone, without the
            constants and free chunks that functions of other plans leave; it then needed up to 20 % more.
        smallest_s: Seconds of the search for a small peak, whose plan is measured before a budget is refused.
        refused_share: A budget is refused without further trials if that plan exceeds it by more than this share of the step's
            own bytes: plans with larger planned peaks rarely needed that much less.
        refused_trials: Trials after which a budget that this plan exceeds by less is refused.
        hint_share: Share of the step's own bytes that a refusal adds to what that plan needed, because another process, with
            other free chunks, measures another peak.
    """

    runs: int = 2
    steps: int = 4
    final_trials: int = 3
    smallest_s: float = 20.0
    refused_share: float = 0.1
    refused_trials: int = 3
    hint_share: float = 0.2


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


def calibrate(capture: Capture, budget: Budget, replan: Replan, batch: Sequence[tf.Tensor] | None = None) -> PlannedFunction:
    """The cheapest plan found whose measured peak keeps a budget.

    TensorFlow allocates other bytes than the live bytes of a plan: fewer where buffers are forwarded, more where chunks are
    not split. `allocator_peaks` predicts both, and only plans that are predicted to fit are run.

    Args:
        capture: The captured step.
        budget: Largest allowed peak as it was written, with its total, resident bytes included.
        replan: Makes the cheapest plan within an amount of live bytes.
        batch: The flat tensors to run on; synthetic ones by default.

    Raises:
        InfeasibleBudgetError: No plan was measured to keep the budget.
    """
    search = _Search(capture, budget, replan, synthetic_batch(capture.trace.arguments) if batch is None else batch)
    budget_bytes = search.budget_bytes
    for _ in range(_EFFORT.final_trials):
        best = search.run()
        if best is None:
            break
        # Measured as it will run: without the constants and free chunks that functions of other plans leave.
        function = build_function(capture, best.result.plan)
        final = measure_plan(capture, function, search.batch, budget_bytes)
        if final is None or best.measured_bytes is None:
            return PlannedFunction(capture, best.result, function, best.peaks, None)
        if final <= budget_bytes:
            return _measured(capture, best.result, function, best.peaks, max(final, best.measured_bytes))
        search.correct(final - best.measured_bytes)
    smallest = search.smallest
    if smallest.needed_bytes > budget_bytes:
        raise search.refusal()
    return _measured(capture, smallest.result, smallest.function, smallest.peaks, smallest.measured_bytes)


def _measured(capture: Capture, result: Result, function: Runner, peaks: AllocatorPeaks, peak: int | None) -> PlannedFunction:
    """A function that was run to measure it, with its random streams at their start."""
    if any(op.type in KERNEL_RANDOM for op in capture.members):
        function = build_function(capture, result.plan)
    return PlannedFunction(capture, result, function, peaks, peak)


@dataclass(frozen=True, slots=True, eq=False)
class _Smallest:
    """The plan with the smallest planned peak that is found quickly, and what it needs.

    Attributes:
        result: The plan.
        function: Runs the plan.
        peaks: Predicted peaks of the plan.
        measured_bytes: Measured peak, resident bytes included; None if TensorFlow reports no memory statistics.
    """

    result: Result
    function: Runner
    peaks: AllocatorPeaks
    measured_bytes: int | None

    @property
    def needed_bytes(self) -> int:
        """The measured peak, or the predicted one."""
        return self.peaks.chunk_bytes if self.measured_bytes is None else self.measured_bytes


class _Search:
    """Searches for the cheapest plan whose measured peak keeps the budget.

    Args:
        capture: The captured step.
        budget: Largest allowed peak as it was written, with its total, resident bytes included.
        replan: Makes the cheapest plan within an amount of live bytes.
        batch: The flat tensors to run on.
    """

    def __init__(self, capture: Capture, budget: Budget, replan: Replan, batch: Sequence[tf.Tensor]) -> None:
        self.capture = capture
        self.problem = Problem(capture.graph, budget)
        self.budget_bytes = self.problem.budget_bytes
        self.replan = replan
        self.batch = batch
        self.policy = Offset(resident_bytes=capture.graph.resident_bytes)
        self.bias_bytes = 0  # measured peak minus predicted peak
        self._error: CheckmateError | None = None

    @functools.cached_property
    def smallest(self) -> _Smallest:
        """The plan with the smallest planned peak that is found quickly, measured."""
        result = near_smallest(self.capture.graph, _EFFORT.smallest_s)
        function = build_function(self.capture, result.plan)
        measured = measure_plan(self.capture, function, self.batch)
        return _Smallest(result, function, allocator_peaks(self.capture, result.plan), measured)

    def run(self) -> _TrialRun | None:
        """The cheapest plan that fits: with headroom where there is one, else within the budget; None if none was found."""
        calibration: Calibration[_TrialRun | None] = Calibration(self.budget_bytes, self.policy)
        while (target := calibration.next_target()) is not None:
            trial = self._try(target)
            calibration.record(trial)
            if not trial.within(self.budget_bytes) and self._hopeless(len(calibration.trials)):
                return None
        best = calibration.best(self.policy.aim_bytes(self.budget_bytes)) or calibration.best()
        return None if best is None else best.outcome

    def _hopeless(self, trials: int) -> bool:
        """Whether another trial is not worth its time, since the plan with the smallest planned peak exceeds the budget."""
        own = max(0, self.budget_bytes - self.capture.graph.resident_bytes)
        excess = self.smallest.needed_bytes - self.budget_bytes
        return excess > _EFFORT.refused_share * own or (excess > 0 and trials >= _EFFORT.refused_trials)

    def correct(self, excess_bytes: int) -> None:
        """Record that the final plan needed ``excess_bytes`` more than its trial; the next plan that fits is accepted."""
        self.bias_bytes += excess_bytes
        self.policy = replace(self.policy, uses_room=False)

    def refusal(self) -> InfeasibleBudgetError:
        """The error to raise where no plan keeps the budget; a budget as its hint says is kept by the smallest plan."""
        needed, resident = self.smallest.needed_bytes, self.capture.graph.resident_bytes
        enough = needed + math.ceil(_EFFORT.hint_share * max(0, needed - resident))
        budget = self.problem.describe_budget() + "," * self.problem.budget.is_share
        question = unit_question(self.problem.budget, self.budget_bytes, needed)
        at_least = self.problem.budget.at_least(enough, self.capture.graph)
        why = "" if self._error is None else f"; planning within fewer live bytes failed: {self._error.message}"
        return InfeasibleBudgetError(
            f"no plan was found that keeps the budget of {budget} in TensorFlow's allocator: the smallest plan needs "
            f"{format_bytes(needed)}{why}",
            hint=f"{question}raise the budget to at least {at_least}, or lower the batch size",
            budget_bytes=self.budget_bytes,
            floor_bytes=getattr(self._error, "floor_bytes", 0),
            smallest_bytes=needed,
            binding_op=getattr(self._error, "binding_op", ""),
        )

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
        measured = run is not None and run.measured_bytes is not None
        return Trial.of(target, result, needed, run, measured=measured)


def without_calibration(capture: Capture, result: Result) -> PlannedFunction:
    """Write a plan as a function without running it, for a plan that is given or needs no calibration."""
    return PlannedFunction(capture, result, build_function(capture, result.plan), allocator_peaks(capture, result.plan), None)


def measure_plan(capture: Capture, function: Runner, batch: Sequence[tf.Tensor], limit_bytes: int | None = None) -> int | None:
    """Measured peak of a plan, with all variables saved before and restored after each measurement.

    Args:
        capture: The captured step.
        function: Runs the plan.
        batch: The flat tensors to run on.
        limit_bytes: After a measurement above this, the plan is not measured again; None measures it as often as any plan.

    Returns:
        Bytes, resident bytes included; None if TensorFlow reports no memory statistics.
    """
    device = default_device()
    if not has_memory_stats(device):
        return None
    resident, peak = capture.graph.resident_bytes, 0
    with progress.shown("measuring a plan"):
        for _ in range(_EFFORT.runs):
            outputs: Sequence[tf.Tensor] = []  # held until the next step replaces them, as in training

            def step(data: Sequence[tf.Tensor]) -> None:
                nonlocal outputs
                outputs = function(*data)

            with restored(capture.trace.variables), grappler_off():
                for data in itertools.islice(moving_batches(batch), _EFFORT.steps):
                    peak = max(peak, measure_peak(functools.partial(step, data), device=device))
            if limit_bytes is not None and resident + peak > limit_bytes:
                break
    return resident + peak


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
