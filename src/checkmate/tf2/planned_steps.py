"""A step as one planned function for each signature of a batch: planned when it first occurs, then run and monitored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from checkmate.core.budget import Budget, keep_all_bytes
from checkmate.core.units import format_bytes
from checkmate.frontend import progress
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import GivenPlan, Replanner, keep_everything
from checkmate.tf2._compat import grappler_off
from checkmate.tf2.capture import capture_trace
from checkmate.tf2.measure.calibrate import PlannedFunction, calibrate
from checkmate.tf2.measure.opaque_ops import with_opaque_measured
from checkmate.tf2.measure.peak import available_bytes, default_device, measure_peak
from checkmate.tf2.measure.profiler import measured_costs
from checkmate.tf2.trace import Trace

_log = logging.getLogger("checkmate.tf2")


class PlannedSteps:
    """The planned functions of a step, which is traced for the specifications of its arguments.

    A given plan is for the first batch; batches of other signatures are planned.
    """

    def __init__(self, trace: Callable[[Sequence[Any]], Trace], options: PlanningOptions, name: str) -> None:
        self.planned: dict[Hashable, PlannedFunction] = {}  # of each signature, in the order in which they were planned
        self.budget_bytes: int | None = None  # a share, such as "70%", refers to the first batch
        self.monitored_bytes: int | None = None  # largest peak of the monitored steps, resident bytes included
        self._trace, self._options, self._name = trace, options, name
        self._unmonitored = 0  # steps still to monitor

    def __call__(self, specs: Sequence[Any], flat: Sequence[tf.Tensor]) -> Any:
        """Run a step on the flat tensors of a batch, for which there is a nest of `tf.TensorSpec` for each argument.

        Returns the result of the traced step. The first steps are measured; a step above the budget logs a warning.

        Raises:
            GraphError: The step cannot be traced as one function.
            InfeasibleBudgetError: The batch has a new signature for which no plan keeps the budget.
        """
        planned = self.planned.get(_key(specs)) or self.plan(specs, flat)
        outputs = self._run_and_check_peak(planned, flat) if self._unmonitored else _run(planned, flat)
        return tf.nest.pack_sequence_as(planned.capture.trace.function.structured_outputs, outputs, expand_composites=True)

    def plan(self, specs: Sequence[Any], batch: Sequence[tf.Tensor] | None) -> PlannedFunction:
        """Capture, plan and write the step for a new signature, measured on a flat batch, or on a synthetic one."""
        with progress.shown("tracing the step"):
            captured = with_opaque_measured(capture_trace(self._trace(specs), measured_costs, self._name), batch)
            options, graph = self._options, captured.graph
            budget = options.budget
            if options.plan is not None and not self.planned:
                planned = PlannedFunction.of(captured, GivenPlan(options.plan, budget)(graph))
            else:
                if budget is not None:
                    if self.budget_bytes is None:
                        self.budget_bytes = budget.resolve(graph)
                    budget = budget.with_total(self.budget_bytes)
                else:
                    device_bytes = graph.resident_bytes + available_bytes(default_device())
                    # Chunks added at most 40 % to a plan (docs/decisions/0014): half of the memory is enough without calibration.
                    if keep_all_bytes(graph) > 0.5 * device_bytes:
                        budget = Budget.parse(device_bytes)
                if budget is None:
                    planned = PlannedFunction.of(captured, keep_everything(graph))
                else:
                    planned = calibrate(captured, budget, Replanner(graph, options), batch)
        if planned.measured_bytes is not None:
            # Other tensors of the process can leave other free chunks to the first training steps than calibration found.
            self._unmonitored = 4
        self.planned[_key(specs)] = planned
        return planned

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


def _key(specs: Sequence[Any]) -> Hashable:
    """The signature of a batch: structure, shapes and types."""
    return repr(tf.nest.map_structure(lambda spec: 0, specs)), *tf.nest.flatten(specs)
