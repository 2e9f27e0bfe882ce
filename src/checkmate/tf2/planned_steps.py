"""A step as one planned function for each signature of a batch: planned when it first comes, then run and monitored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from checkmate.core.budget import Budget, keep_all_bytes
from checkmate.core.units import format_bytes
from checkmate.frontend import progress
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import GivenPlan, Replanner, keep_everything
from checkmate.tf2._compat import grappler_off
from checkmate.tf2.graph.capture import capture_trace
from checkmate.tf2.graph.trace import Trace
from checkmate.tf2.measure.calibrate import PlannedFunction, calibrate, without_calibration
from checkmate.tf2.measure.opaque_ops import with_opaque_measured
from checkmate.tf2.measure.peak import available_bytes, default_device, measure_peak
from checkmate.tf2.measure.profiler import Profiler

_log = logging.getLogger("checkmate.tf2")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParameters:
    """How a step is planned and monitored.

    Attributes:
        ample_share: Without a budget, a step that needs at most this share of the device's memory when it keeps everything is
            not calibrated: chunks added at most 40 % to a plan (docs/decisions/0014).
        monitored_steps: First training steps whose peak is compared with the budget, since other tensors of the process can
            leave other free chunks than calibration found.
        time_shares: Shares of the time limit for the first plan, and for each further plan that calibration requests.
    """

    ample_share: float = 0.5
    monitored_steps: int = 4
    time_shares: tuple[float, float] = (0.5, 0.25)


_PARAMETERS = StepParameters()


class PlannedSteps:
    """The planned functions of a step.

    Args:
        trace: Traces the step for specifications of its arguments.
        options: Which plans to look for. A given plan is for the first batch; batches of other signatures are planned.
        name: Name of the graphs.

    Attributes:
        planned: The planned function of each signature, in the order in which they were planned.
        budget_bytes: The requested budget in bytes, or None; a share, such as ``"70%"``, refers to the first batch.
        monitored_bytes: Largest peak of the monitored steps, resident bytes included; None if no step was monitored.
    """

    def __init__(self, trace: Callable[[Sequence[Any]], Trace], options: PlanningOptions, name: str) -> None:
        self.planned: dict[Hashable, PlannedFunction] = {}
        self.budget_bytes: int | None = None
        self.monitored_bytes: int | None = None
        self._trace, self._options, self._name = trace, options, name
        self._unmonitored = 0  # steps still to monitor

    def plan(self, key: Hashable, specs: Sequence[Any], batch: Sequence[tf.Tensor] | None) -> PlannedFunction:
        """Capture, plan and write the step for a new signature.

        Args:
            key: The signature.
            specs: Nests of `tf.TensorSpec`, one for each argument of the step.
            batch: The flat tensors to measure on; synthetic ones if None.

        Raises:
            GraphError: The step cannot be traced as one function.
            InfeasibleBudgetError: No plan keeps the budget.
        """
        with progress.shown("tracing the step"):
            captured = with_opaque_measured(capture_trace(self._trace(specs), Profiler(), self._name), batch)
            options, graph = self._options, captured.graph
            if options.plan is not None and not self.planned:
                planned = without_calibration(captured, GivenPlan(options.plan, options.budget)(graph))
            elif options.budget is not None:
                if self.budget_bytes is None:
                    self.budget_bytes = options.budget.resolve(graph)
                budget = options.budget.with_total(self.budget_bytes)
                planned = calibrate(captured, budget, Replanner(graph, options, _PARAMETERS.time_shares), batch)
            else:
                device_bytes = graph.resident_bytes + available_bytes(default_device())
                if keep_all_bytes(graph) <= _PARAMETERS.ample_share * device_bytes:
                    planned = without_calibration(captured, keep_everything(graph))
                else:
                    budget = Budget.parse(device_bytes)
                    planned = calibrate(captured, budget, Replanner(graph, options, _PARAMETERS.time_shares), batch)
        if planned.measured_bytes is not None:
            self._unmonitored = _PARAMETERS.monitored_steps
        self.planned[key] = planned
        return planned

    def run(self, planned: PlannedFunction, flat: Sequence[tf.Tensor]) -> Any:
        """Run a planned function once. The first steps are measured, and one above the budget logs a warning.

        Args:
            planned: The planned function.
            flat: The flat tensors of the batch.

        Returns:
            What the traced step returns.
        """
        outputs = self._run_and_check_peak(planned, flat) if self._unmonitored else _run(planned, flat)
        return tf.nest.pack_sequence_as(planned.capture.trace.function.structured_outputs, outputs, expand_composites=True)

    def _run_and_check_peak(self, planned: PlannedFunction, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        self._unmonitored -= 1
        outputs: list[tf.Tensor] = []
        peak = planned.capture.graph.resident_bytes + measure_peak(lambda: outputs.extend(_run(planned, flat)))
        self.monitored_bytes = max(peak, self.monitored_bytes or 0)
        if self.budget_bytes is not None and peak > self.budget_bytes:
            _log.warning(
                "the step needed %s, and the budget is %s: other tensors of this process changed the allocator's free chunks "
                "after the plan was measured; lower the budget by the difference",
                format_bytes(peak),
                format_bytes(self.budget_bytes),
            )
        return outputs


def _run(planned: PlannedFunction, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    with grappler_off():
        return list(planned.function(*flat))
