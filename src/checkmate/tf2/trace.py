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

_PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer")

Loss = str | Callable[..., Any] | Sequence[Any] | Mapping[str, Any]


class NotBuiltError(CheckmateError, ValueError):
    """A model that has no variables yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A traced step.

    Attributes:
        function: Takes the flat tensors of a batch; gives prediction and loss.
        starts: Number of ops when loss, backward and optimizer began.
    """

    function: Any
    starts: tuple[int, ...]

    @property
    def ops(self) -> list[tf.Operation]:
        """Its ops, as traced."""
        return self.function.graph.get_operations()

    @property
    def captured(self) -> dict[str, Any]:
        """Tensors and handles from outside, by the name of the placeholder that stands for them."""
        names = [t.op.name for t in self.function.inputs]
        outside = self.function.captured_inputs
        return dict(zip(names[len(names) - len(outside) :], outside, strict=True))

    @property
    def arguments(self) -> list[tf.Tensor]:
        """Placeholders of the batch, flat."""
        return self.function.inputs[: len(self.function.inputs) - len(self.function.captured_inputs)]

    def phase(self, index: int) -> Phase:
        """Phase of the op that was traced as number ``index``."""
        return _PHASES[bisect.bisect_right(self.starts, index)]


def trace_step(model: keras.Model, losses: Sequence[Callable[..., Any]], optimizer: keras.Optimizer, specs: Any) -> Trace:
    """Trace a step. Nothing runs, but the optimizer's slots are made if they are not there yet.

    Args:
        model: A built model.
        losses: A loss for each output of the model, or one for all.
        optimizer: The optimizer.
        specs: Pair of nests of `tf.TensorSpec`: inputs and labels.

    Raises:
        GraphError: The step cannot be traced.
    """
    if not optimizer.built:  # or its slots would be made inside the trace
        with tf.init_scope():
            optimizer.build(model.trainable_variables)
    starts: list[int] = []

    def mark() -> None:
        starts.append(len(tf.compat.v1.get_default_graph().get_operations()))

    def step(inputs: Any, labels: Any) -> tuple[Any, tf.Tensor]:
        starts.clear()
        with tf.GradientTape() as tape:
            prediction = model(inputs, training=True)
            mark()
            loss = _total(losses, labels, prediction, model.losses)
            scaled = optimizer.scale_loss(loss)
        mark()
        gradients = tape.gradient(scaled, model.trainable_variables)
        mark()
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return prediction, loss

    try:
        function = tf.function(step, autograph=False).get_concrete_function(*specs)
    except (TypeError, ValueError, RuntimeError, tf.errors.OpError) as error:
        if isinstance(error, CheckmateError):
            raise
        raise GraphError(
            f"the step cannot be traced: {str(error).strip().splitlines()[0]}",
            hint="call the model and the loss on a batch of these shapes, and mend what fails there",
        ) from error
    return Trace(function, tuple(starts))


def resolve_losses(model: keras.Model, loss: Loss) -> list[Callable[..., Any]]:
    """A loss for each output, or one for all of them.

    Raises:
        OptionError: A name is unknown, or names fit no output.
    """
    if isinstance(loss, Mapping):
        names = list(getattr(model, "output_names", None) or sorted(loss))
        if set(names) != set(loss):
            raise OptionError(f"loss has the keys {', '.join(sorted(loss))}, and the model's outputs are {', '.join(names)}")
        # A model whose outputs are a mapping hands them on sorted by name, as all nests are.
        ordered = sorted(loss) if isinstance(model.output, Mapping) else names
        return [_resolved(loss[name]) for name in ordered]
    if isinstance(loss, (list, tuple)):
        return [_resolved(one) for one in loss]
    return [_resolved(loss)]


def resolve_optimizer(model: keras.Model, optimizer: Any) -> keras.Optimizer:
    """An optimizer from an object, a name or a configuration; scaled for float16, as `keras.Model.compile` does.

    Raises:
        OptionError: It is none.
    """
    try:
        found = keras.optimizers.get(optimizer)
    except (ValueError, TypeError) as error:
        raise OptionError(
            f"optimizer={optimizer!r} is no Keras optimizer", hint="give an object, or a name such as 'adam'"
        ) from error
    half = model.dtype_policy.name == "mixed_float16"
    if half and not isinstance(found, keras.optimizers.LossScaleOptimizer):
        return keras.optimizers.LossScaleOptimizer(found)
    return found


def _resolved(loss: Any) -> Callable[..., Any]:
    try:
        found = keras.losses.get(loss)
    except (ValueError, TypeError) as error:
        raise OptionError(f"loss={loss!r} is no Keras loss", hint="give an object, a function or a name such as 'mse'") from error
    if not callable(found):
        raise OptionError(f"loss={loss!r} cannot be called", hint="give an object, a function or a name such as 'mse'")
    return found


def _total(losses: Sequence[Callable[..., Any]], labels: Any, prediction: Any, extra: Sequence[Any]) -> Any:
    targets, outputs = tf.nest.flatten(labels), tf.nest.flatten(prediction)
    if len(targets) != len(outputs) or len(losses) not in (1, len(outputs)):
        raise OptionError(
            f"the model has {len(outputs)} outputs, and there are {len(targets)} labels and {len(losses)} losses",
            hint="give one label an output, and one loss for all or one each",
        )
    each = list(losses) * len(outputs) if len(losses) == 1 else list(losses)
    # A function such as keras.losses.mse gives one value a sample: Keras averages those, so we do.
    values = [tf.convert_to_tensor(f(t, p)) for f, t, p in zip(each, targets, outputs, strict=True)]
    parts = [v if v.shape.rank == 0 else tf.reduce_mean(v) for v in values]
    parts += [tf.cast(e, parts[0].dtype) for e in extra]
    return parts[0] if len(parts) == 1 else tf.add_n(parts)
