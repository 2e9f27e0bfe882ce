"""Trace a Keras training step as one function: forward, loss, backward and optimizer."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from checkmate.core.errors import CheckmateError, GraphError, OptionError
from checkmate.core.graph import Phase

Loss = str | Callable[..., Any] | Sequence[Any] | Mapping[str, Any]

_GRADIENTS = "gradient_tape/"
"""In the names of the ops that compute gradients."""

_LOSS_HINT = "pass a keras.losses object, a function of labels and prediction, or a name such as 'mse'"


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A traced step.

    Attributes:
        function: Concrete function of a batch.
        phases: Index of the first op of each part of the step and that part's phase, in the order of the indices. The first
            index is 0; a phase can have several parts.
        variables: Variables that the function uses, of which it holds weak references only.
    """

    function: Any
    phases: tuple[tuple[int, Phase], ...]
    variables: tuple[tf.Variable, ...]

    @property
    def ops(self) -> list[tf.Operation]:
        """Ops in the order in which they were traced."""
        return self.function.graph.get_operations()

    @property
    def captured(self) -> dict[str, Any]:
        """Tensors and variable handles captured from outside, by the name of their placeholder."""
        names = [t.op.name for t in self.function.inputs]
        outside = self.function.captured_inputs
        return dict(zip(names[len(names) - len(outside) :], outside, strict=True))

    @property
    def arguments(self) -> list[tf.Tensor]:
        """Placeholders of the batch: inputs, then labels."""
        return self.function.inputs[: len(self.function.inputs) - len(self.function.captured_inputs)]

    def phase(self, index: int) -> Phase:
        """Phase of the op at an index of `ops`."""
        return self.phases[bisect.bisect_right(self.phases, index, key=lambda part: part[0]) - 1][1]


class PhaseMarks:
    """Records where in a traced function each phase begins.

    Attributes:
        parts: Index of the first op of each part of the step, and its phase.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[int, Phase]] = []
        self._graph: Any = None

    def start(self) -> None:
        """Forget the marks of an earlier trace: TensorFlow can trace a function twice, to create its variables."""
        self._graph = tf.compat.v1.get_default_graph()
        self.parts = [(0, "forward")]

    def begin(self, phase: Phase) -> None:
        """Mark that the ops traced from now on belong to a phase. Marks inside a branch or a loop, one op here, do not count.

        Args:
            phase: The phase.
        """
        graph = tf.compat.v1.get_default_graph()
        if graph is self._graph:
            self.parts.append((len(graph.get_operations()), phase))

    def find_backward(self) -> None:
        """Mark the backward passes of the function that is traced now, by the name scope that `tf.GradientTape` opens."""
        ops = tf.compat.v1.get_default_graph().get_operations()
        ends = [*(index for index, _ in self.parts[1:]), len(ops)]
        for (index, phase), end in zip(list(self.parts), ends, strict=True):
            if phase != "optimizer":
                first = next((i for i in range(index, end) if _GRADIENTS in ops[i].name), None)
                if first is not None:
                    self.parts.append((first, "backward"))
        self.parts.sort(key=lambda part: part[0])


def trace_step(model: keras.Model, losses: Sequence[Callable[..., Any]], optimizer: keras.Optimizer, specs: Any) -> Trace:
    """Trace a step. Nothing runs, except that the optimizer's slots are created if they do not exist.

    Args:
        model: A built model.
        losses: One loss for each output of the model, or one for all.
        optimizer: The optimizer.
        specs: Nests of `tf.TensorSpec`: inputs, labels and, if there are any, sample weights.

    Raises:
        GraphError: The step cannot be traced.
    """
    if not optimizer.built:  # otherwise its slots would be created inside the trace
        with tf.init_scope():
            optimizer.build(model.trainable_variables)
    marks = PhaseMarks()

    def step(inputs: Any, labels: Any, weights: Any = None) -> tuple[Any, tf.Tensor]:
        marks.start()
        with tf.GradientTape() as tape:
            prediction = model(inputs, training=True)
            marks.begin("loss")
            loss = _total(losses, labels, prediction, weights, model.losses)
            scaled = optimizer.scale_loss(loss)
        marks.begin("backward")
        gradients = tape.gradient(scaled, model.trainable_variables)
        marks.begin("optimizer")
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return prediction, loss

    return trace_function(step, specs, marks)


def trace_function(step: Callable[..., Any], specs: Sequence[Any], marks: PhaseMarks) -> Trace:
    """Trace a function of a batch. Nothing runs.

    Args:
        step: The function; it calls ``marks.start`` first.
        specs: Nests of `tf.TensorSpec`, one for each argument.
        marks: Where each phase begins.

    Raises:
        GraphError: The function cannot be traced.
    """
    try:
        function = tf.function(step, autograph=False).get_concrete_function(*specs)
    except (TypeError, ValueError, RuntimeError, tf.errors.OpError) as error:
        if isinstance(error, CheckmateError):
            raise
        raise GraphError(
            f"the step cannot be traced: {str(error).strip().splitlines()[0]}",
            hint="call the model and the loss on a batch of these shapes, and fix the error that they raise",
        ) from error
    return Trace(function, tuple(marks.parts), tuple(function.graph.variables))


def resolve_losses(model: keras.Model, loss: Loss) -> list[Callable[..., Any]]:
    """The losses of a model: one for each output, or one for all.

    Args:
        model: The model.
        loss: A Keras loss, its name, or a function; a list or a mapping by the outputs' names for several outputs.

    Raises:
        OptionError: A loss is unknown, or the keys of the mapping are not the outputs' names.
    """
    if isinstance(loss, Mapping):
        names = list(getattr(model, "output_names", None) or sorted(loss))
        if set(names) != set(loss):
            raise OptionError(
                f"loss has the keys {', '.join(sorted(loss))}, and the model's outputs are {', '.join(names)}",
                hint=f"pass a mapping with one loss for each of {', '.join(names)}",
            )
        # `tf.nest` sorts the outputs of a model that returns a mapping by name.
        ordered = sorted(loss) if isinstance(model.output, Mapping) else names
        return [_resolved(loss[name]) for name in ordered]
    if isinstance(loss, (list, tuple)):
        return [_resolved(one) for one in loss]
    return [_resolved(loss)]


def resolve_optimizer(model: keras.Model, optimizer: Any) -> keras.Optimizer:
    """The Keras optimizer; under the policy ``mixed_float16`` in a `LossScaleOptimizer`, as in `keras.Model.compile`.

    Args:
        model: The model, whose policy decides about loss scaling.
        optimizer: An optimizer, its name or its configuration.

    Raises:
        OptionError: Keras knows no such optimizer.
    """
    hint = "pass a keras.optimizers object, or a name such as 'adam'"
    try:
        found = keras.optimizers.get(optimizer)
    except (ValueError, TypeError) as error:
        raise OptionError(f"optimizer={optimizer!r} is not a Keras optimizer", hint=hint) from error
    if found is None:
        raise OptionError("optimizer is None, and a step applies an optimizer", hint=hint)
    half = model.dtype_policy.name == "mixed_float16"
    if half and not isinstance(found, keras.optimizers.LossScaleOptimizer):
        return keras.optimizers.LossScaleOptimizer(found)
    return found


def _resolved(loss: Any) -> Callable[..., Any]:
    try:
        found = keras.losses.get(loss)
    except (ValueError, TypeError) as error:
        raise OptionError(f"loss={loss!r} is not a Keras loss", hint=_LOSS_HINT) from error
    if not callable(found):
        raise OptionError(f"loss={loss!r} cannot be called", hint=_LOSS_HINT)
    return found


def _total(losses: Sequence[Callable[..., Any]], labels: Any, prediction: Any, weights: Any, extra: Sequence[Any]) -> Any:
    """Sum of the losses of all outputs and of the model's own losses (regularisers)."""
    targets, outputs = tf.nest.flatten(labels), tf.nest.flatten(prediction)
    if len(targets) != len(outputs) or len(losses) not in (1, len(outputs)):
        raise OptionError(
            f"the model has {len(outputs)} outputs, and there are {len(targets)} labels and {len(losses)} losses",
            hint="pass one label for each output, and one loss for all outputs or one for each",
        )
    each = list(losses) * len(outputs) if len(losses) == 1 else list(losses)
    factors = [None] if weights is None else tf.nest.flatten(weights)
    if len(factors) not in (1, len(outputs)):
        raise OptionError(
            f"the model has {len(outputs)} outputs, and there are {len(factors)} sample weights",
            hint="pass one array of sample weights for all outputs, or one for each",
        )
    factors = factors * len(outputs) if len(factors) == 1 else factors
    parts = [_weighted(f, t, p, w) for f, t, p, w in zip(each, targets, outputs, factors, strict=True)]
    parts += [tf.cast(e, parts[0].dtype) for e in extra]
    return parts[0] if len(parts) == 1 else tf.add_n(parts)


class _FunctionAsLoss(keras.losses.Loss):
    """A function with one value per sample, such as `keras.losses.mse`, as a loss that weights and averages these values."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(name="function")
        self._function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._function(y_true, y_pred)


def _weighted(loss: Callable[..., Any], target: Any, output: Any, weights: Any) -> Any:
    """A loss as one number; with weights of samples, the mean of its weighted values, as in `keras.Model.compile`."""
    if weights is not None:
        known = loss if isinstance(loss, keras.losses.Loss) else _FunctionAsLoss(loss)
        return known(target, output, sample_weight=weights)
    value = tf.convert_to_tensor(loss(target, output))
    return value if value.shape.rank == 0 else tf.reduce_mean(value)
