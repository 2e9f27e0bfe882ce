"""Planned functions of a step: planned and calibrated when a signature of a batch first occurs, then run and monitored.

Calibration plans, measures the peak on saved and restored variables, and plans again until the budget is kept.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from checkmate.core.budget import Budget, fixed_bytes, keep_all_bytes
from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.frontend import calibration, progress
from checkmate.frontend.calibration import Calibration, Offset, Trial
from checkmate.frontend.options import CostSource, PlanningOptions
from checkmate.frontend.planner import GivenPlan, Replanner, keep_everything, near_smallest
from checkmate.tf2._compat import grappler_off
from checkmate.tf2.apply_plan import Runner, build_function
from checkmate.tf2.capture import Capture
from checkmate.tf2.op_properties import KERNEL_RANDOM
from checkmate.tf2.peak import available_bytes, default_device, has_memory_stats, measure_peak, moving_batches, restored
from checkmate.tf2.profiler import capture_with_costs, synthetic_batch
from checkmate.tf2.trace import Trace, trace_step, train_step

_log = logging.getLogger("checkmate.tf2")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedFunction:
    """A captured step with its plan, written as a function."""

    capture: Capture
    result: Result
    function: Runner
    measured_bytes: int | None = None  # measured peak, resident bytes included; None if the plan was not measured

    @classmethod
    def of(cls, capture: Capture, result: Result) -> PlannedFunction:
        """Write a plan as a function without running it, for a plan that is given or needs no calibration."""
        return cls(capture, result, build_function(capture, result.plan))

    def measured(self, batch: Sequence[tf.Tensor], limit_bytes: int | None = None) -> PlannedFunction:
        """The same after it was measured, with its random streams at their start."""
        peak = measure_plan(self.capture, self.function, batch, limit_bytes)
        random = any(op.type in KERNEL_RANDOM for op in self.capture.members)
        return replace(
            self, measured_bytes=peak, function=build_function(self.capture, self.result.plan) if random else self.function
        )

    @property
    def needed_bytes(self) -> int:
        """The measured peak, or the planned one."""
        return self.result.peak_bytes if self.measured_bytes is None else self.measured_bytes


def calibrate(
    capture: Capture, budget: Budget, replan: Callable[[int], Result], batch: Sequence[tf.Tensor] | None = None
) -> PlannedFunction:
    """The cheapest plan found whose measured peak keeps a budget.

    TensorFlow allocates other bytes than the live bytes of a plan: fewer if an op writes its output into a dying input, more if
    the allocator does not split a free chunk. Each plan is therefore run, on the flat tensors of a batch or on synthetic ones.
    ``replan`` makes the cheapest plan within an amount of live bytes.

    Raises:
        InfeasibleBudgetError: No plan was measured to keep the budget.
    """
    search = _Search(capture, budget, replan, synthetic_batch(capture.trace.arguments) if batch is None else batch)
    for _ in range(3):
        best = search.run()
        if best is None:
            break
        # Measured as it will run, without the constants and free chunks that functions of other plans leave. It then needed up to
        # 20 % more.
        final = PlannedFunction.of(capture, best).measured(search.batch, search.budget_bytes)
        before = search.peak_bytes(best)
        if final.measured_bytes is None or before is None:
            return final
        if final.measured_bytes <= search.budget_bytes:
            return replace(final, measured_bytes=max(final.measured_bytes, before))
        search.correct(final.measured_bytes - before)
    if search.smallest.needed_bytes > search.budget_bytes:
        raise search.refusal()
    return search.smallest


class _Search:
    """Searches for the cheapest plan whose measured peak keeps the budget."""

    def __init__(self, capture: Capture, budget: Budget, replan: Callable[[int], Result], batch: Sequence[tf.Tensor]) -> None:
        self.capture, self.replan, self.batch = capture, replan, batch
        self.budget_bytes = budget.resolve(capture.graph)
        self.policy = Offset(resident_bytes=capture.graph.resident_bytes)
        self._excess_bytes = 0  # of a final plan over its trial
        self._measured: dict[tuple[int, ...], int | None] = {}  # peak of each plan that was run, by its order
        self._error: CheckmateError | None = None

    @functools.cached_property
    def smallest(self) -> PlannedFunction:
        """The plan with the smallest planned peak that is found within 20 s, measured."""
        return PlannedFunction.of(self.capture, near_smallest(self.capture.graph, 20.0)).measured(self.batch)

    def run(self) -> Result | None:
        """The cheapest plan that fits: with headroom if one exists, else within the budget; None if none was found."""
        trials: Calibration[Result | None] = Calibration(self.budget_bytes, self.policy)
        failure = calibration.calibrate(trials, self.replan, self._try, lambda: self._hopeless(len(trials.trials)))
        self._error = failure or self._error
        best = trials.best(self.policy.aim_bytes(self.budget_bytes)) or trials.best()
        return None if best is None else best.outcome

    def _hopeless(self, trials: int) -> bool:
        """Whether another trial is not worth its time, since the plan with the smallest planned peak exceeds the budget.

        Plans with larger planned peaks rarely needed less by a tenth of the step's own bytes. Otherwise three trials are made.
        """
        own = max(0, self.budget_bytes - self.capture.graph.resident_bytes)
        excess = self.smallest.needed_bytes - self.budget_bytes
        return excess > 0.1 * own or (excess > 0 and trials >= 3)

    def correct(self, excess_bytes: int) -> None:
        """Record that the final plan needed ``excess_bytes`` more than its trial; the next plan that fits is accepted."""
        self._excess_bytes += excess_bytes
        self.policy = replace(self.policy, uses_room=False)

    def refusal(self) -> InfeasibleBudgetError:
        """The error to raise if no plan keeps the budget; the smallest plan keeps the budget in its hint."""
        needed = self.smallest.needed_bytes
        # A third more of the step's own bytes: with other free chunks the same plan took up to 28 % more in another process.
        margin = math.ceil(max(0, needed - self.capture.graph.resident_bytes) / 3)
        return calibration.refusal(self.budget_bytes, needed, self._error, margin)

    def peak_bytes(self, result: Result) -> int | None:
        """Measured peak of a plan, which is run once; None if TensorFlow reports no memory statistics.

        A plan for which the device has too little memory counts as one that needs a tenth more than the budget.
        """
        order = result.plan.order
        if order not in self._measured:
            function = build_function(self.capture, result.plan)
            try:
                self._measured[order] = measure_plan(self.capture, function, self.batch, self.budget_bytes)
            except tf.errors.ResourceExhaustedError:
                own = max(0, self.budget_bytes - self.capture.graph.resident_bytes)
                self._measured[order] = self.budget_bytes + own // 10 + 1
        return self._measured[order]

    def _try(self, target: int, result: Result) -> Trial[Result | None]:
        peak = self.peak_bytes(result)
        if peak is None:  # the plan counts, and is accepted
            _log.warning(
                "the peak cannot be measured: TensorFlow reports no memory statistics for %s; the planned peak is %s of %s. "
                "Set the environment variable TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow starts to measure it",
                *(default_device(), format_bytes(result.peak_bytes), format_bytes(self.budget_bytes)),
            )
            return Trial.of(target, result, self.policy.aim_bytes(self.budget_bytes), result)
        amounts = (result.peak_bytes, peak, self.budget_bytes)
        _log.info("planned %s, measured %s of %s, overhead %.4f", *map(format_bytes, amounts), result.overhead)
        return Trial.of(target, result, peak + self._excess_bytes, result)


def measure_plan(capture: Capture, function: Runner, batch: Sequence[tf.Tensor], limit_bytes: int | None = None) -> int | None:
    """Measured peak of a plan, resident bytes included, with all variables saved before and restored after each measurement.

    A plan is measured twice: the second time it runs with the free chunks that restoring the variables leaves, as training does;
    that peak was up to a few per cent off the first (docs/decisions/0014). A first measurement above the limit is enough. None if
    TensorFlow reports no memory statistics.
    """
    device = default_device()
    if not has_memory_stats(device):
        return None
    resident, peak = capture.graph.resident_bytes, 0
    with progress.shown("measuring a plan"):
        for _ in range(2):
            outputs: Sequence[tf.Tensor] = []  # held until the next step replaces them, as in training

            def step(data: Sequence[tf.Tensor]) -> None:
                nonlocal outputs
                outputs = function(*data)

            with restored(capture.trace.variables), grappler_off():
                # The first of four steps changes the allocator's free list, the second reproduces the steady state.
                for data in itertools.islice(moving_batches(batch), 4):
                    peak = max(peak, measure_peak(functools.partial(step, data), device=device))
            if limit_bytes is not None and resident + peak > limit_bytes:
                break
    return resident + peak


def _everything(capture: Capture, batch: Sequence[tf.Tensor] | None) -> PlannedFunction:
    """The plan that keeps everything, measured: a share of a budget is one of what TensorFlow takes for it."""
    planned = PlannedFunction.of(capture, keep_everything(capture.graph))
    try:
        return planned.measured(synthetic_batch(capture.trace.arguments) if batch is None else batch)
    except tf.errors.ResourceExhaustedError:  # its planned peak is the measure
        return planned


class PlannedSteps:
    """The planned functions of a step, which is traced for the specifications of its arguments.

    A given plan is for the first batch; batches of other signatures are planned.
    """

    def __init__(self, trace: Callable[[Sequence[Any]], Trace], options: PlanningOptions, name: str) -> None:
        self.planned: dict[Hashable, PlannedFunction] = {}  # of each signature, in the order in which they were planned
        self.budget_bytes: int | None = None  # a share, such as "70%", refers to the first batch
        self.monitored_bytes: int | None = None  # largest peak of the monitored steps, resident bytes included
        self._trace, self._options, self._name = trace, options, name
        self._keeps_everything = options.budget is not None and options.budget.keeps_everything
        self._unmonitored = 0  # steps still to monitor
        self._again: set[Hashable] = set()  # signatures that were planned again after a step exceeded the budget

    def __call__(self, specs: Sequence[Any], flat: Sequence[tf.Tensor]) -> Any:
        """Run a step on the flat tensors of a batch, for which there is a nest of `tf.TensorSpec` for each argument.

        Returns the result of the traced step. The first steps are measured; a step above the budget is planned again.

        Raises:
            GraphError: The step cannot be traced as one function.
            InfeasibleBudgetError: The batch has a new signature for which no plan keeps the budget.
        """
        planned = self.planned.get(_key(specs)) or self.plan(specs, flat)
        outputs = self._run_and_check_peak(_key(specs), flat) if self._unmonitored else _run(planned, flat)
        return tf.nest.pack_sequence_as(planned.capture.trace.function.structured_outputs, outputs, expand_composites=True)

    def plan(self, specs: Sequence[Any], batch: Sequence[tf.Tensor] | None) -> PlannedFunction:
        """Capture, plan and write the step for a new signature, measured on a flat batch, or on a synthetic one."""
        with progress.shown("tracing the step"):
            captured = capture_with_costs(lambda: self._trace(specs), "measured", self._name, batch)
            planned = self._planned(captured, batch)
        if planned.measured_bytes is not None and not self._keeps_everything:
            # Other tensors of the process can leave other free chunks to the first training steps than calibration found.
            self._unmonitored = 4
        if self.planned:
            peak = format_bytes(planned.result.peak_bytes)
            _log.info("another shape of a batch was planned: %s, peak %s", [spec.shape for spec in tf.nest.flatten(specs)], peak)
        self.planned[_key(specs)] = planned
        return planned

    def _planned(self, captured: Capture, batch: Sequence[tf.Tensor] | None) -> PlannedFunction:
        """The function of the given plan, of the cheapest plan within the budget, or of keeping everything."""
        options, graph, budget = self._options, captured.graph, self._options.budget
        if options.plan is not None and not self.planned:
            return PlannedFunction.of(captured, GivenPlan(options.plan, budget)(graph))
        if budget is None:
            device_bytes = graph.resident_bytes + available_bytes(default_device())
            # Chunks added at most 40 % to a plan (docs/decisions/0014): half of the memory is enough without calibration.
            if keep_all_bytes(graph) <= 0.5 * device_bytes:
                return PlannedFunction.of(captured, keep_everything(graph))
            budget = Budget.parse(device_bytes)
        elif self._keeps_everything:
            everything = _everything(captured, batch)
            self.budget_bytes = max(self.budget_bytes or 0, everything.needed_bytes)
            return everything
        elif self.budget_bytes is None:
            most = _everything(captured, batch).needed_bytes if budget.is_share else 0
            self.budget_bytes = budget.within(fixed_bytes=fixed_bytes(graph), keep_all_bytes=most)
        budget = budget.with_total(self.budget_bytes or budget.resolve(graph))
        return calibrate(captured, budget, Replanner(graph, options), batch)

    def _run_and_check_peak(self, key: Hashable, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        self._unmonitored -= 1
        planned, outputs = self.planned[key], list[tf.Tensor]()
        peak = planned.capture.graph.resident_bytes + measure_peak(lambda: outputs.extend(_run(planned, flat)))
        self.monitored_bytes = max(peak, self.monitored_bytes or 0)
        if self.budget_bytes is not None and peak > self.budget_bytes:
            self._plan_again(key, flat, peak)
        return outputs

    def _plan_again(self, key: Hashable, flat: Sequence[tf.Tensor], peak: int) -> None:
        """Replace a plan whose step exceeded the budget by one that leaves the excess free; a second excess is only logged."""
        planned, graph, budget_bytes = self.planned[key], self.planned[key].capture.graph, self.budget_bytes or 0
        lower = max(0, budget_bytes - (peak - planned.needed_bytes))
        then = "lower the budget by the difference"
        if key not in self._again and self._options.plan is None:
            self._again.add(key)
            with contextlib.suppress(InfeasibleBudgetError, tf.errors.ResourceExhaustedError):
                again = calibrate(planned.capture, Budget.parse(lower), Replanner(graph, self._options), flat)
                self.planned[key], self._unmonitored = again, 4
                then = f"it is planned again within {format_bytes(lower)}"
        _log.warning(
            "the step needed %s, and the budget is %s: other tensors of this process changed the allocator's free chunks "
            "after the plan was measured; %s",
            *(format_bytes(peak), format_bytes(budget_bytes), then),
        )


def _run(planned: PlannedFunction, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    with grappler_off():
        return list(planned.function(*flat))


def _key(specs: Sequence[Any]) -> Hashable:
    """The signature of a batch: structure, shapes and types."""
    return repr(tf.nest.map_structure(lambda spec: 0, specs)), *tf.nest.flatten(specs)


class PlannedTrainFunction:
    """Takes batches from Keras's iterator and runs the planned `train_step` on each."""

    def __init__(self, model: keras.Model, options: PlanningOptions) -> None:
        self._model = model
        self.steps = PlannedSteps(lambda specs: trace_step(model, train_step(model), specs), options, model.name)

    def __call__(self, iterator: Any) -> Any:
        """Run the steps between two calls of the callbacks (``steps_per_execution``), or fewer if the batches end.

        Returns the logs of the last step.
        """
        logs: Any = None
        for number in range(self._model.steps_per_execution):
            try:
                data = next(iterator)
            except StopIteration:
                if number == 0:
                    raise
                break
            specs, flat = _batch(data)
            logs = self.steps([specs], flat)
        return logs


def _batch(data: Any) -> tuple[Any, list[tf.Tensor]]:
    """The nest of specifications of a batch as Keras passes it to `train_step`, and its tensors.

    Missing labels or weights are None or an empty optional.
    """
    data = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            raise OptionError(
                f"a batch has a {type(leaf).__name__}, and a plan needs tensors whose sizes are known",
                hint="call RaggedTensor.to_tensor() or tf.sparse.to_dense in the data set",
            )
    leaves = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(data)]
    specs = [None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
    return tf.nest.pack_sequence_as(data, specs), [leaf for leaf in leaves if leaf is not None]


def capture_step(model: keras.Model, data: Any, costs: CostSource) -> Graph:
    """The graph of the step that `fit` runs for a batch."""
    specs, flat = _batch(data)
    return capture_with_costs(lambda: trace_step(model, train_step(model), [specs]), costs, model.name, flat).graph
