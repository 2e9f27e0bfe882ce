"""Planned functions of a step: planned and calibrated when a signature of a batch first occurs, then run and monitored.

Calibration plans, measures the peak on saved and restored variables, and plans again until the budget is kept.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import math
import operator
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import msgspec
import tensorflow as tf

from checkmate.core.budget import Budget, fixed_bytes, keep_all_bytes
from checkmate.core.errors import CheckmateError, InfeasibleBudgetError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.frontend import calibration, progress
from checkmate.frontend.calibration import Calibration, Offset, Trial
from checkmate.frontend.options import CostSource, PlanningOptions
from checkmate.frontend.plan_store import MeasuredPlan, PlanStore, sources_digest
from checkmate.frontend.planner import GivenPlan, Replanner, keep_everything, near_smallest
from checkmate.frontend.step_memory import StepMemory
from checkmate.tf2._compat import grappler_off
from checkmate.tf2.apply_plan import Runner, build_function, data_sizes
from checkmate.tf2.capture import Capture
from checkmate.tf2.op_properties import KERNEL_RANDOM, tensor_bytes
from checkmate.tf2.peak import (
    available_bytes,
    default_device,
    has_memory_stats,
    moving_batches,
    peak_of,
    restored,
    wait_until_quiet,
)
from checkmate.tf2.profiler import capture_with_costs, synthetic
from checkmate.tf2.trace import Trace, trace_step

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
        return cls(capture, result, build_function(capture, result.plan.order))

    def measured(self, batch: Sequence[tf.Tensor], limit_bytes: int | None = None) -> PlannedFunction:
        """The same after it was measured, with its random streams at their start; too little memory counts as above the limit."""
        try:
            peak = measure_plan(self.capture, self.function, batch, limit_bytes)
        except tf.errors.ResourceExhaustedError:
            peak = self.result.peak_bytes if limit_bytes is None else limit_bytes + limit_bytes // 10
        again = build_function(self.capture, self.result.plan.order) if self.draws_in_kernels else self.function
        return replace(self, measured_bytes=peak, function=again)

    @property
    def draws_in_kernels(self) -> bool:
        """Whether ops like `tf.random.uniform` draw from streams that belong to this function."""
        return any(op.type in KERNEL_RANDOM for chain in self.capture.members for op in chain)

    @property
    def needed_bytes(self) -> int:
        """The measured peak, or the planned one."""
        return self.result.peak_bytes if self.measured_bytes is None else self.measured_bytes


@dataclass(eq=False)
class PlanSearch:
    """Searches for the cheapest plan whose measured peak keeps a budget.

    TensorFlow allocates other bytes than the live bytes of a plan (docs/decisions/0014). Each plan is therefore run on the flat
    tensors of a batch. A plan that was measured before counts as the first trial.
    """

    capture: Capture
    budget_bytes: int
    replan: Callable[[int], Result]  # makes the cheapest plan within an amount of live bytes
    batch: Sequence[tf.Tensor]
    known: PlannedFunction | None = None
    measured: dict[tuple[int, ...], PlannedFunction] = field(default_factory=dict)  # each plan that was run, by its order

    @property
    def _policy(self) -> Offset:
        return Offset(resident_bytes=self.capture.graph.resident_bytes)

    @functools.cached_property
    def smallest(self) -> PlannedFunction:
        """The plan with the smallest planned peak that is found within 10 s, or another one that needed less, also before."""
        graph = self.capture.graph
        self._run(near_smallest(graph, 10.0, enough_bytes=0))  # the same for all budgets
        for known in self._refused.all()[:1]:
            with contextlib.suppress(CheckmateError):  # of another graph
                self._run(evaluate(graph, Plan.from_order(graph, known.order)))
        return min(self.measured.values(), key=lambda planned: planned.needed_bytes)

    @property
    def _refused(self) -> PlanStore:
        """The smallest plans of earlier refusals, which named budgets for them."""
        return PlanStore(f"tf2 refusal {sources_digest()} {self.capture.graph.digest}")

    def run(self) -> PlannedFunction:
        """The cheapest plan that fits with half of the headroom, which another free chunk may take.

        Raises:
            InfeasibleBudgetError: No plan was measured to fit.
        """
        trials: Calibration[PlannedFunction | None] = Calibration(self.budget_bytes, self._policy)
        if self.known is not None and self.known.measured_bytes is not None:
            self.measured[self.known.result.plan.order] = self.known
            trials.record(self._try(self.known.result.peak_bytes, self.known.result))
        error = calibration.calibrate(trials, self.replan, self._try, lambda: self._hopeless(trials))
        limit = (self._policy.aim_bytes(self.budget_bytes) + self.budget_bytes) // 2
        if (best := trials.best(limit)) is not None and best.outcome is not None:
            return best.outcome
        if self.smallest.needed_bytes > limit:
            raise self._refusal(error)
        return self.smallest

    def _hopeless(self, trials: Calibration[PlannedFunction | None]) -> bool:
        """Whether, after three trials, no plan is planned within the aim; the smallest plan is a trial itself if it fits.

        Chunks can add a third to one plan and nothing to the next: as long as a plan is planned within the aim, others are tried.
        """
        if len(trials.trials) < 3:
            return False
        if self.smallest.needed_bytes > self.budget_bytes:
            return min(p.result.peak_bytes for p in self.measured.values()) > self._policy.aim_bytes(self.budget_bytes)
        if all(trial.outcome is not self.smallest for trial in trials.trials):
            trials.record(self._try(self.smallest.result.peak_bytes, self.smallest.result))
        return False

    def _refusal(self, cause: CheckmateError | None) -> InfeasibleBudgetError:
        """The error if no plan keeps the budget, with a budget that the smallest plan keeps."""
        needed, fixed = self.smallest.needed_bytes, self._policy.resident_bytes
        margin = math.ceil(max(0, needed - fixed) / 10)  # other free chunks in another process
        self._refused.add(MeasuredPlan(self.smallest.result.plan.order, StepMemory.of_whole_step(needed)))
        return calibration.refusal(self.budget_bytes, needed, cause, margin)

    def _run(self, result: Result) -> PlannedFunction:
        """A plan as a measured function; each plan is run once."""
        if (order := result.plan.order) not in self.measured:
            planned = PlannedFunction.of(self.capture, result).measured(self.batch, self.budget_bytes)
            if planned.needed_bytes > self.budget_bytes:
                planned = replace(planned, function=lambda *_: ())  # its graph is freed
            self.measured[order] = planned
        return self.measured[order]

    def _try(self, target: int, result: Result) -> Trial[PlannedFunction | None]:
        planned = self._run(result)
        if planned.measured_bytes is None:  # the plan counts, and is accepted
            _log.warning(
                "the peak cannot be measured: TensorFlow reports no memory statistics for %s; the planned peak is %s of %s. "
                "Set the environment variable TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow starts to measure it",
                *(default_device(), format_bytes(result.peak_bytes), format_bytes(self.budget_bytes)),
            )
            return Trial.of(target, result, self._policy.aim_bytes(self.budget_bytes), planned)
        return Trial.of(target, result, planned.measured_bytes, planned)


def measure_plan(capture: Capture, function: Runner, batch: Sequence[tf.Tensor], limit_bytes: int | None = None) -> int | None:
    """Measured peak of a plan in eight steps, resident bytes included. The variables change as in training.

    Four steps are enough if one is above the limit. None if TensorFlow reports no memory statistics.
    """
    device = default_device()
    if not has_memory_stats(device):
        return None
    resident, peaks = capture.graph.resident_bytes, list[int]()
    largest = max((value.size_bytes for value in capture.graph.values), default=1)
    outputs: Sequence[tf.Tensor] = []  # held until the next step replaces them, as in training

    def step(data: Sequence[tf.Tensor]) -> None:
        nonlocal outputs
        outputs = function(*data)

    gc.collect()
    with progress.shown("measuring a plan"), grappler_off():
        for data in itertools.islice(moving_batches(batch, largest), 8):
            peaks.append(resident + peak_of(functools.partial(step, data), device))
            if limit_bytes is not None and len(peaks) >= 4 and max(peaks) > limit_bytes:
                break
    return max(peaks)


class PlannedSteps:
    """The planned functions of a step, which is traced for the specifications of its arguments.

    A given plan is for the first batch; batches of other signatures are planned.
    """

    def __init__(self, trace: Callable[[Sequence[Any]], Trace], options: PlanningOptions, name: str) -> None:
        # By signature of a batch, and sizes that depend on its data; in the order in which they were planned.
        self.planned: dict[tuple[Hashable, tuple[int, ...]], PlannedFunction] = {}
        self.budget_bytes: int | None = None  # a share, such as "70%", refers to the first batch
        self.monitored_bytes: int | None = None  # largest peak of the monitored steps, resident bytes included
        self.ahead_bytes = 0  # of batches that a data set makes ahead
        self._trace, self._options, self._name = trace, options, name
        self._keeps_everything = options.budget is not None and options.budget.keeps_everything
        self._sizes: dict[Hashable, Callable[[Sequence[tf.Tensor]], tuple[int, ...]]] = {}  # of signatures with such sizes
        self._again: set[Hashable] = set()  # keys that were planned again after a step exceeded the budget

    def __call__(self, specs: Sequence[Any], flat: Sequence[tf.Tensor]) -> Any:
        """Run a step on the flat tensors of a batch, for which there is a nest of `tf.TensorSpec` for each argument.

        Returns the result of the traced step. Its peak is measured; a step above the budget is planned again.

        Raises:
            GraphError: The step cannot be traced as one function.
            InfeasibleBudgetError: The batch has a new signature for which no plan keeps the budget.
        """
        if (key := self._key(specs, flat)) not in self.planned:
            self.plan(specs, flat)
            key = self._key(specs, flat)
        planned = self.planned[key]
        outputs = _run(planned, flat) if planned.measured_bytes is None else self._run_and_check_peak(key, flat)
        return tf.nest.pack_sequence_as(planned.capture.trace.function.structured_outputs, outputs, expand_composites=True)

    def plan(self, specs: Sequence[Any], batch: Sequence[tf.Tensor] | None) -> None:
        """Capture, plan and write the step for a new signature or larger data, measured on a flat batch or on a synthetic one."""
        signature, before = _signature(specs), list(self.planned.items())
        with progress.shown("tracing the step"):
            trace = next((planned.capture.trace for key, planned in before if key[0] == signature), None) or self._trace(specs)
            data = [*map(synthetic, trace.arguments)] if batch is None else batch
            captured = capture_with_costs(trace, "measured", self._name, data)
            resident = captured.graph.resident_bytes + self.ahead_bytes
            captured = replace(captured, graph=msgspec.structs.replace(captured.graph, resident_bytes=resident))
            try:
                planned = self._planned(captured, data)
            except InfeasibleBudgetError as error:
                error.add_note(f"This is for a batch of {', '.join(str(tensor.shape) for tensor in data)}.")
                raise
        if before:
            shapes, peak = [tensor.shape for tensor in data], format_bytes(planned.result.peak_bytes)
            _log.info("another shape of a batch was planned: %s, peak %s", shapes, peak)
            if planned.draws_in_kernels:
                _log.warning(
                    "ops like tf.random.uniform draw from their start again for this shape of a batch, unlike without a plan: "
                    "draw with keras.random and a SeedGenerator, or use batches of one size, as drop_remainder=True makes them"
                )
        if planned.measured_bytes is not None and not self._keeps_everything and (sizes := data_sizes(captured)) is not None:
            self._sizes[signature] = sizes
        self.planned[self._key(specs, data)] = planned

    def _key(self, specs: Sequence[Any], flat: Sequence[tf.Tensor]) -> tuple[Hashable, tuple[int, ...]]:
        """The key of a plan for a batch: for its signature, and for sizes at least as large, if one was planned."""
        signature, sizes = _signature(specs), ()
        if signature in self._sizes:
            with grappler_off():
                sizes = self._sizes[signature](flat)
        as_large = (key for key in self.planned if key[0] == signature and all(map(operator.le, sizes, key[1])))
        return next(as_large, (signature, sizes))

    def _planned(self, captured: Capture, data: Sequence[tf.Tensor]) -> PlannedFunction:
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
        with restored(captured.trace.variables):
            everything = None
            if budget.is_share and (self._keeps_everything or self.budget_bytes is None):
                everything = PlannedFunction.of(captured, keep_everything(graph)).measured(data)
            if self._keeps_everything and everything is not None:
                self.budget_bytes = max(self.budget_bytes or 0, everything.needed_bytes)
                return everything
            if options.budget is not None and self.budget_bytes is None:
                most = 0 if everything is None else everything.needed_bytes
                self.budget_bytes = budget.within(fixed_bytes=fixed_bytes(graph), keep_all_bytes=most)
            budget_bytes = self.budget_bytes or budget.resolve(graph)
            return PlanSearch(captured, budget_bytes, Replanner(graph, options), data, everything).run()

    def _run_and_check_peak(self, key: tuple[Hashable, tuple[int, ...]], flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        planned, outputs, before = self.planned[key], list[tf.Tensor](), self.monitored_bytes or 0
        resident = planned.capture.graph.resident_bytes - self.ahead_bytes  # some batches are made ahead while the step runs
        peak = resident + peak_of(lambda: outputs.extend(_run(planned, flat)), default_device())
        self.monitored_bytes = max(peak, before)
        if self._keeps_everything:  # whatever that takes
            self.budget_bytes = max(peak, self.budget_bytes or 0)
        elif self.budget_bytes is not None and peak > max(before, self.budget_bytes):  # each excess is reported once
            self._plan_again(key, flat, peak)
        return outputs

    def _plan_again(self, key: tuple[Hashable, tuple[int, ...]], flat: Sequence[tf.Tensor], peak: int) -> None:
        """Replace a plan whose step exceeded the budget by one that leaves the excess free; a second excess is only logged."""
        planned, budget_bytes = self.planned[key], self.budget_bytes or 0
        lower = max(0, budget_bytes - (peak - planned.needed_bytes))
        then = "lower the budget by the difference"
        if key not in self._again and self._options.plan is None:
            self._again.add(key)
            with contextlib.suppress(InfeasibleBudgetError, tf.errors.ResourceExhaustedError):
                with restored(planned.capture.trace.variables):
                    replan, known = Replanner(planned.capture.graph, self._options), replace(planned, measured_bytes=peak)
                    self.planned[key] = PlanSearch(planned.capture, lower, replan, flat, known).run()
                then = f"it is planned again within {format_bytes(lower)}"
        _log.warning(
            "the step needed %s, and the budget is %s: other tensors of this process changed the allocator's free chunks "
            "after the plan was measured; %s",
            *(format_bytes(peak), format_bytes(budget_bytes), then),
        )


def _run(planned: PlannedFunction, flat: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    with grappler_off():
        return list(planned.function(*flat))


def _signature(specs: Sequence[Any]) -> Hashable:
    """The signature of a batch: structure, shapes and types."""
    return repr(tf.nest.map_structure(lambda spec: 0, specs)), *tf.nest.flatten(specs)


class PlannedTrainFunction:
    """Takes batches from Keras's iterator and runs the planned `train_step` on each."""

    def __init__(self, model: keras.Model, options: PlanningOptions) -> None:
        self._model = model
        self.steps = PlannedSteps(lambda specs: trace_step(model, model.train_step, specs), options, model.name)

    def __call__(self, iterator: Any) -> Any:
        """Run the steps between two calls of the callbacks (``steps_per_execution``), or fewer if the batches end.

        Returns the logs of the last step.
        """
        logs: Any = None
        for number in range(self._model.steps_per_execution):
            try:
                data = next(iterator) if self.steps.planned else self._first(iterator)
            except StopIteration:
                if number == 0:
                    raise
                break
            specs, flat = _batch(data)
            logs = self.steps([specs], flat)
        return logs

    def _first(self, iterator: Any) -> Any:
        """The first batch. What the data set allocates beside it, batches made ahead for example, counts as resident."""
        device, data = default_device(), list[Any]()
        if not has_memory_stats(device):
            return next(iterator)

        def take() -> None:
            began = time.monotonic()
            data.append(next(iterator))
            wait_until_quiet(device, max(0.05, 2 * (time.monotonic() - began)))

        taken = peak_of(take, device)
        batch = max(1, sum(map(tensor_bytes, _batch(data[0])[1])))
        ahead = math.ceil(max(0, taken - batch) / batch)  # whole batches, to be equal in equal runs
        self.steps.ahead_bytes = batch * (ahead + (ahead > 0))  # `tf.data` makes one more when a step waited for it
        _log.info("the data set allocates %s beside the first batch", format_bytes(self.steps.ahead_bytes))
        return data[0]


def _batch(data: Any) -> tuple[Any, list[tf.Tensor]]:
    """The nest of specifications of a batch as Keras passes it to `train_step`, and its tensors.

    Missing labels or weights are None or an empty optional.
    """
    data = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
    composite = (tf.RaggedTensor, tf.SparseTensor)
    leaves = [
        leaf if leaf is None or isinstance(leaf, composite) else tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(data)
    ]
    specs = [None if leaf is None else tf.type_spec_from_value(leaf) for leaf in leaves]
    flat = tf.nest.flatten(leaves, expand_composites=True)
    return tf.nest.pack_sequence_as(data, specs), [leaf for leaf in flat if leaf is not None]


def capture_step(model: keras.Model, data: Any, costs: CostSource) -> Graph:
    """The graph of the step that `fit` runs for a batch."""
    specs, flat = _batch(data)
    return capture_with_costs(trace_step(model, model.train_step, [specs]), costs, model.name, flat).graph
