"""A whole Keras training step under a budget: ``prediction, loss = step(x, y)``."""

from __future__ import annotations

import logging
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
from checkmate.tf2.calibrate import Fitted, fit, run_once
from checkmate.tf2.capture import Capture, capture_trace
from checkmate.tf2.peak import available_bytes, default_device, measure_peak
from checkmate.tf2.profiler import Profiler, estimated
from checkmate.tf2.specs import flat_batch, sample_batch, specs_like, specs_of
from checkmate.tf2.trace import Loss, NotBuiltError, resolve_losses, resolve_optimizer, trace_step

_log = logging.getLogger("checkmate.tf2")
_AMPLE = 0.5  # a step that takes less than this share of a device when keeping everything needs no measuring
_WATCHED = 4  # first steps whose peak is compared with the budget

_TIME_SHARES = (0.5, 0.25)
"""Shares of the time limit for the first plan, and for each that measuring calls for."""

CostSource = Literal["measured", "bytes"]


class TrainStep:
    """A compiled training step. Make one with `checkmate.tf2.compile`.

    Attributes:
        model: The model that it trains.
        optimizer: The optimizer that it applies.
        graph: The graph of the step for the batch that it was compiled for.
        plan: The plan that runs it.
        result: What the solver found, with its proof.
        budget_bytes: The budget that was asked for, in bytes, or None.
        peaks: The plan's peak as planned and as TensorFlow allocates it.
        measured_bytes: The plan's measured peak, resident bytes included; None if it was not measured.
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
        self._fitted: dict[tuple[Any, ...], Fitted] = {}
        first = self._prepare(specs, batch)
        self._watch = _WATCHED if first.measured_bytes is not None else 0
        self.graph, self.plan, self.result = first.capture.graph, first.result.plan, first.result
        self.peaks, self.measured_bytes = first.peaks, first.measured_bytes

    def __call__(self, inputs: Any, labels: Any) -> tuple[Any, tf.Tensor]:
        """Run one step: forward, loss, backward and optimizer.

        Args:
            inputs: Tensors or arrays built like ``input_spec``.
            labels: Tensors or arrays built like ``label_spec``.

        Returns:
            The model's prediction and the loss.

        Raises:
            OptionError: The batch is not like the one that the step was compiled for.
            InfeasibleBudgetError: The batch has a new size for which no plan keeps the budget.
            GraphError: The call is inside a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise GraphError(
                "a planned step was called inside a tf.function, which would run it in an order of its own",
                hint="call it from plain Python: it is one function already",
            )
        flat = flat_batch(self._specs, inputs, labels)
        fitted = self._fitted.get(_key(flat))
        if fitted is None:
            fitted = self._prepare(specs_like(self._specs, flat), flat)
            peak = format_bytes(fitted.peaks.live_bytes)
            _log.warning("a new batch size was planned: %s, peak %s", flat[0].shape if flat else (), peak)
        made = self._watched(fitted, flat) if self._watch else self._run(fitted, flat)
        return tf.nest.pack_sequence_as(fitted.capture.trace.function.structured_outputs, made, expand_composites=True)

    def _run(self, fitted: Fitted, flat: list[tf.Tensor]) -> list[tf.Tensor]:
        with grappler_off():
            return list(fitted.function(*flat))

    def _watched(self, fitted: Fitted, flat: list[tf.Tensor]) -> list[tf.Tensor]:
        """Run one of the first steps and measure it: it may find other chunks than calibration did."""
        self._watch -= 1
        made: list[tf.Tensor] = []
        peak = fitted.capture.graph.resident_bytes + measure_peak(lambda: made.extend(self._run(fitted, flat)))
        if self.budget_bytes is not None and peak > self.budget_bytes:
            _log.warning(
                "the step took %s, and the budget is %s: other tensors of this process leave the allocator other chunks than "
                "there were when the plan was measured; give a budget that is smaller by as much",
                format_bytes(peak),
                format_bytes(self.budget_bytes),
            )
        return made

    def _prepare(self, specs: Any, batch: list[tf.Tensor] | None) -> Fitted:
        captured = _captured(self.model, self._losses, self.optimizer, specs, Profiler())
        options = self._options
        # A plan that was given is the first batch's; batches of other sizes are planned.
        if options.plan is not None and not self._fitted:
            fitted = run_once(captured, GivenPlan(options.plan, options.budget)(captured.graph))
        elif options.budget is None:
            has = captured.graph.resident_bytes + available_bytes(default_device())
            if keep_all_bytes(captured.graph) <= _AMPLE * has:
                fitted = run_once(captured, keep_everything(captured.graph))
            else:
                fitted = fit(captured, has, Replanner(captured.graph, options, _TIME_SHARES), batch)
        else:
            if self.budget_bytes is None:  # a share is one of the first batch
                self.budget_bytes = options.budget.resolve(captured.graph)
            fitted = fit(captured, self.budget_bytes, Replanner(captured.graph, options, _TIME_SHARES), batch)
        self._fitted[_key(captured.trace.arguments)] = fitted
        return fitted


def compile(  # noqa: A001 - the word that the call was promised with
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
    """A training step that keeps a memory budget: ``prediction, loss = step(x, y)``.

    The step is traced and planned here. With a budget it is also run a few times to measure its peak, on variables
    that are saved before and restored after; the optimizer's slots are made if they are not there yet.

    Args:
        model: A built Keras model on the TensorFlow backend.
        loss: A Keras loss, its name, or a function of labels and prediction; for several outputs one for all, a
            list, or a mapping by the outputs' names. The model's own losses (regularisers) are added.
        optimizer: A Keras optimizer or its name.
        input_spec: A batch of inputs, or its `tf.TensorSpec`; lists, tuples and mappings of them for models with
            several inputs.
        label_spec: The same for labels.
        budget: The most bytes on the device during the step, everything included that the step uses:
            ``"8GiB"``, bytes, or ``"70%"``: what is resident plus 70 % of what keeping everything takes above it.
            None: what the device has.
        solver: A solver or its name; `Auto` by default.
        time_limit_s: Seconds for the search. Half of them are for the first plan, and a quarter for each that is made anew
            because of what is measured.
        plan: A plan, or its file, to run instead; it is not measured.

    Returns:
        The step. It takes batches of any size: one of a new size is planned when it comes, within the same budget.

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
    _check_world(model)
    options = PlanningOptions.of(budget=budget, solver=solver, time_limit_s=time_limit_s, plan=plan)
    specs = (specs_of(input_spec, "input_spec"), specs_of(label_spec, "label_spec"))
    batch = sample_batch(specs, input_spec, label_spec)
    return TrainStep(model, resolve_losses(model, loss), resolve_optimizer(model, optimizer), specs, batch, options)


def capture(
    model: keras.Model, loss: Loss, optimizer: Any, input_spec: Any, label_spec: Any, *, costs: CostSource = "measured"
) -> Graph:
    """The graph of a training step. The step does not run; `checkmate.write` makes a file of it.

    Args:
        model: As in `compile`, as all that follow.
        loss: The loss.
        optimizer: The optimizer; its slots are made if they are not there yet.
        input_spec: Inputs.
        label_spec: Labels.
        costs: ``"measured"`` runs every distinct op alone a few times; ``"bytes"`` runs nothing, and knows no
            workspace.

    Raises:
        NotBuiltError: The model has no variables yet.
        OptionError: An argument cannot be used.
        GraphError: The step cannot be traced as one function.
    """
    _check_world(model)
    if costs not in get_args(CostSource):
        raise OptionError(f"costs={costs!r} is not one of {', '.join(get_args(CostSource))}")
    specs = (specs_of(input_spec, "input_spec"), specs_of(label_spec, "label_spec"))
    source = Profiler() if costs == "measured" else estimated
    return _captured(model, resolve_losses(model, loss), resolve_optimizer(model, optimizer), specs, source).graph


def _captured(model: keras.Model, losses: Any, optimizer: keras.Optimizer, specs: Any, costs: Any) -> Capture:
    return capture_trace(trace_step(model, losses, optimizer, specs), costs, model.name)


def _check_world(model: keras.Model) -> None:
    if keras.config.backend() != "tensorflow":
        raise OptionError(
            f"Keras runs on {keras.config.backend()}, not on TensorFlow",
            hint="set KERAS_BACKEND=tensorflow before Keras is imported; for torch use checkmate.torch",
        )
    if not isinstance(model, keras.Model):
        raise OptionError(f"model={type(model).__name__} is not a keras.Model")
    if not model.built:
        raise NotBuiltError(f"model {model.name!r} is not built: it has no variables yet", hint="call it once on a batch")
    if tf.distribute.has_strategy():
        raise OptionError(
            "a step is planned for one device, and this is inside the scope of a tf.distribute strategy",
            hint="call checkmate.tf2.compile outside of `strategy.scope()`",
        )
    if tf.config.functions_run_eagerly():
        raise OptionError(
            "functions run eagerly, so that nothing can be planned", hint="call tf.config.run_functions_eagerly(False)"
        )


def _key(tensors: Any) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype.name) for t in tensors)
