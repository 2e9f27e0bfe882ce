"""A whole Keras training step under a budget: ``prediction, loss = step(x, y)``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal, get_args

import keras
import tensorflow as tf

from checkmate.core.budget import Budget, keep_all_bytes
from checkmate.core.errors import GraphError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.units import Amount, format_bytes
from checkmate.frontend.options import PlanningOptions, PlanSource
from checkmate.frontend.planner import GivenPlan, Replanner, keep_everything
from checkmate.solvers.session import Solver
from checkmate.tf2._compat import grappler_off
from checkmate.tf2.allocator_peaks import AllocatorPeaks
from checkmate.tf2.calibrate import PlannedFunction, calibrate, without_calibration
from checkmate.tf2.capture import Capture, capture_trace
from checkmate.tf2.peak import available_bytes, default_device, measure_peak
from checkmate.tf2.profiler import Profiler, estimated_costs
from checkmate.tf2.specs import flat_batch, sample_batch, specs_like, specs_of
from checkmate.tf2.trace import Loss, NotBuiltError, resolve_losses, resolve_optimizer, trace_step

_log = logging.getLogger("checkmate.tf2")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParameters:
    """How a step is planned and monitored.

    Attributes:
        ample_share: Without a budget, a step that needs at most this share of the device's memory when it keeps everything is
            not calibrated: chunks added at most 40 % to a plan (docs/decisions/0051).
        monitored_steps: First training steps whose peak is compared with the budget, since other tensors of the process can
            leave other free chunks than calibration found.
        time_shares: Shares of the time limit for the first plan, and for each further plan that calibration requests.
    """

    ample_share: float = 0.5
    monitored_steps: int = 4
    time_shares: tuple[float, float] = (0.5, 0.25)


_PARAMETERS = StepParameters()

CostSource = Literal["measured", "estimated", "bytes"]
"""Where costs come from; ``"bytes"`` is the earlier name of ``"estimated"``."""


class TrainStep:
    """A compiled training step. Create one with `checkmate.tf2.compile`.

    Attributes:
        model: The model that the step trains.
        optimizer: The optimizer that the step applies.
        graph: The graph of the step for the batch that it was compiled for.
        plan: The plan that is run for this batch.
        result: The solver's result for this plan, with its proof.
        budget_bytes: The requested budget in bytes, or None.
        peaks: Predicted peaks of the plan.
        measured_bytes: Measured peak of the plan, resident bytes included; None if it was not measured.
    """

    graph: Graph
    plan: Plan
    result: Result
    budget_bytes: int | None
    peaks: AllocatorPeaks
    measured_bytes: int | None

    def __init__(
        self, model: keras.Model, losses: Any, optimizer: keras.Optimizer, specs: Any, batch: Any, options: PlanningOptions
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self._losses, self._specs, self._options = losses, specs, options
        self.budget_bytes = None
        self._planned: dict[tuple[Any, ...], PlannedFunction] = {}
        first = self._prepare(specs, batch)
        self._monitor = _PARAMETERS.monitored_steps if first.measured_bytes is not None else 0
        self.graph, self.plan, self.result = first.capture.graph, first.result.plan, first.result
        self.peaks, self.measured_bytes = first.peaks, first.measured_bytes

    def __call__(self, inputs: Any, labels: Any) -> tuple[Any, tf.Tensor]:
        """Run one step: forward, loss, backward and optimizer.

        Args:
            inputs: Tensors or arrays in the structure of ``input_spec``.
            labels: Tensors or arrays in the structure of ``label_spec``.

        Returns:
            The model's prediction and the loss.

        Raises:
            OptionError: The batch differs from the specification in more than its size.
            InfeasibleBudgetError: The batch has a new size for which no plan keeps the budget.
            GraphError: The call is inside a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise GraphError(
                "a planned step was called inside a tf.function, which would not keep the plan's order",
                hint="call the step from Python, outside the tf.function: the step is one compiled function already",
            )
        flat = flat_batch(self._specs, inputs, labels)
        planned = self._planned.get(_key(flat))
        if planned is None:
            planned = self._prepare(specs_like(self._specs, flat), flat)
            peak = format_bytes(planned.peaks.live_bytes)
            _log.warning("a new batch size was planned: %s, peak %s", flat[0].shape if flat else (), peak)
        outputs = self._run_and_check_peak(planned, flat) if self._monitor else self._run(planned, flat)
        return tf.nest.pack_sequence_as(planned.capture.trace.function.structured_outputs, outputs, expand_composites=True)

    def _run(self, planned: PlannedFunction, flat: list[tf.Tensor]) -> list[tf.Tensor]:
        with grappler_off():
            return list(planned.function(*flat))

    def _run_and_check_peak(self, planned: PlannedFunction, flat: list[tf.Tensor]) -> list[tf.Tensor]:
        """Run one of the first steps, and warn if its measured peak is above the budget."""
        self._monitor -= 1
        outputs: list[tf.Tensor] = []
        peak = planned.capture.graph.resident_bytes + measure_peak(lambda: outputs.extend(self._run(planned, flat)))
        if self.budget_bytes is not None and peak > self.budget_bytes:
            _log.warning(
                "the step needed %s, and the budget is %s: other tensors of this process changed the allocator's free chunks "
                "after the plan was measured; lower the budget by the difference",
                format_bytes(peak),
                format_bytes(self.budget_bytes),
            )
        return outputs

    def _prepare(self, specs: Any, batch: list[tf.Tensor] | None) -> PlannedFunction:
        """Capture, plan and write the step for a batch of a new size."""
        captured = _captured(self.model, self._losses, self.optimizer, specs, Profiler())
        options = self._options
        # A given plan is for the first batch; batches of other sizes are planned.
        if options.plan is not None and not self._planned:
            planned = without_calibration(captured, GivenPlan(options.plan, options.budget)(captured.graph))
        elif options.budget is None:
            device_bytes = captured.graph.resident_bytes + available_bytes(default_device())
            if keep_all_bytes(captured.graph) <= _PARAMETERS.ample_share * device_bytes:
                planned = without_calibration(captured, keep_everything(captured.graph))
            else:
                planned = calibrate(captured, device_bytes, Replanner(captured.graph, options, _PARAMETERS.time_shares), batch)
        else:
            if self.budget_bytes is None:  # "70%" refers to the first batch
                self.budget_bytes = options.budget.resolve(captured.graph)
            planned = calibrate(captured, self.budget_bytes, Replanner(captured.graph, options, _PARAMETERS.time_shares), batch)
        self._planned[_key(captured.trace.arguments)] = planned
        return planned


def compile(  # noqa: A001 - `checkmate.tf2.compile` is the documented call
    model: keras.Model,
    loss: Loss,
    optimizer: Any,
    input_spec: Any,
    label_spec: Any,
    *,
    budget: Amount | Budget | None = None,
    solver: Solver | str | None = None,
    time_limit_s: float | None = 60.0,
    plan: PlanSource | None = None,
) -> TrainStep:
    """Compile a training step that keeps a memory budget: ``prediction, loss = step(x, y)``.

    The call traces and plans the step. With a budget it also runs the step a few times to measure its peak, with all
    variables saved before and restored after. The optimizer's slots are created if they do not exist.

    Args:
        model: A built Keras model on the TensorFlow backend.
        loss: A Keras loss, its name, or a function of labels and prediction; for several outputs one for all, a
            list, or a mapping by the outputs' names. The model's own losses (regularisers) are added.
        optimizer: A Keras optimizer or its name.
        input_spec: A batch of inputs, or its `tf.TensorSpec`; lists, tuples and mappings of them for models with
            several inputs.
        label_spec: The same for labels.
        budget: Largest allowed peak on the device during the step, with variables, slots and batch: ``"8GiB"``, a number of
            bytes, or a share of the whole step, such as ``"70%"``: what no plan can change plus 70 % of what keeping everything
            needs above that. None: the memory of the device.
        solver: A solver or its name; `Auto` by default.
        time_limit_s: Seconds of wall time for planning, or None for no limit: half of them for the first plan, and a quarter
            for each further plan that calibration requests.
        plan: A plan, or its file, to run instead of solving; it is not measured.

    Returns:
        The step. It accepts batches of any size: a new size is planned at its first call, within the same budget.

    Raises:
        NotBuiltError: The model has no variables yet.
        OptionError: An argument cannot be used.
        GraphError: The step cannot be traced as one function.
        InfeasibleBudgetError: No plan keeps the budget.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> x, y = np.ones((3, 4), "float32"), np.zeros((3, 2), "float32")
        >>> step = compile(model, "mse", "sgd", input_spec=x, label_spec=y)
        >>> prediction, loss = step(x, y)
        >>> prediction.shape, step.result.overhead
        (TensorShape([3, 2]), 1.0)
    """
    _check_environment(model)
    options = PlanningOptions.of(budget=budget, solver=solver, time_limit_s=time_limit_s, plan=plan)
    specs = (specs_of(input_spec, "input_spec"), specs_of(label_spec, "label_spec"))
    batch = sample_batch(specs, input_spec, label_spec)
    return TrainStep(model, resolve_losses(model, loss), resolve_optimizer(model, optimizer), specs, batch, options)


def capture(
    model: keras.Model, loss: Loss, optimizer: Any, input_spec: Any, label_spec: Any, *, costs: CostSource = "measured"
) -> Graph:
    """The graph of a training step. The step does not run; `checkmate.write` writes the graph to a file.

    Args:
        model: A built Keras model, as in `compile`.
        loss: The loss or losses, as in `compile`.
        optimizer: The optimizer, as in `compile`; its slots are created if they do not exist.
        input_spec: A batch of inputs, or its specification, as in `compile`.
        label_spec: A batch of labels, or its specification, as in `compile`.
        costs: ``"measured"`` runs every distinct op alone a few times; ``"estimated"`` runs nothing, estimates times from the
            bytes that an op reads and writes, and takes workspace as 0 (``"bytes"``, the earlier name, means the same).

    Raises:
        NotBuiltError: The model has no variables yet.
        OptionError: An argument cannot be used.
        GraphError: The step cannot be traced as one function.
    """
    _check_environment(model)
    if costs not in get_args(CostSource):
        raise OptionError(
            f"costs={costs!r} is not one of {', '.join(get_args(CostSource))}",
            hint="pass costs='measured', or costs='estimated' to run nothing",
        )
    specs = (specs_of(input_spec, "input_spec"), specs_of(label_spec, "label_spec"))
    source = Profiler() if costs == "measured" else estimated_costs
    return _captured(model, resolve_losses(model, loss), resolve_optimizer(model, optimizer), specs, source).graph


def _captured(model: keras.Model, losses: Any, optimizer: keras.Optimizer, specs: Any, costs: Any) -> Capture:
    return capture_trace(trace_step(model, losses, optimizer, specs), costs, model.name)


def _check_environment(model: keras.Model) -> None:
    """Check that a step of a model can be planned in this process.

    Raises:
        NotBuiltError: The model has no variables yet.
        OptionError: The backend, the distribution strategy or eager mode rules it out.
    """
    if keras.config.backend() != "tensorflow":
        raise OptionError(
            f"Keras runs on {keras.config.backend()}, not on TensorFlow",
            hint="set the environment variable KERAS_BACKEND=tensorflow before Keras is imported; for torch use checkmate.torch",
        )
    if not isinstance(model, keras.Model):
        raise OptionError(
            f"model={type(model).__name__} is not a keras.Model",
            hint="pass a keras.Model; wrap layers in keras.Sequential",
        )
    if not model.built:
        raise NotBuiltError(
            f"model {model.name!r} is not built: it has no variables yet",
            hint="call the model once on a batch, or call model.build(input_shape)",
        )
    if tf.distribute.has_strategy():
        raise OptionError(
            "a step is planned for one device, and this call is inside the scope of a tf.distribute strategy",
            hint="call checkmate.tf2.compile outside of `strategy.scope()`",
        )
    if tf.config.functions_run_eagerly():
        raise OptionError(
            "tf.config.run_functions_eagerly(True) is set, and only a graph can be planned",
            hint="call tf.config.run_functions_eagerly(False)",
        )


def _key(tensors: Any) -> tuple[Any, ...]:
    """Shapes and types of a flat batch."""
    return tuple((tuple(t.shape), t.dtype.name) for t in tensors)
