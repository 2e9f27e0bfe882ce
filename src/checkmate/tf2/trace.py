"""Trace a Keras training step as one function: forward, loss, backward and optimizer.

The model is checked first; Keras resolves losses and optimizer.
"""

from __future__ import annotations

import bisect
import contextlib
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from checkmate.core.errors import CheckmateError, GraphError, OptionError
from checkmate.core.graph import Phase
from checkmate.tf2._compat import created_outside, inlined_functions

Loss = str | Callable[..., Any] | Sequence[Any] | Mapping[str, Any]


class NotBuiltError(CheckmateError, ValueError):
    """A model that is not built: it has no variables yet."""


def check_model(model: keras.Model) -> None:
    """Check that a model is built and that its steps can be planned in this process."""
    check_environment(model)
    if not model.built:
        raise NotBuiltError(
            f"model {model.name!r} is not built: it has no variables yet",
            hint="call the model once on a batch, or call model.build(input_shape)",
        )


def check_environment(model: keras.Model) -> None:
    """Check that steps of a model, which need not be built yet, can be planned in this process."""
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
    if model.built and not model.trainable_variables:
        raise OptionError(
            f"model {model.name!r} has no trainable weights, so that a step would change nothing",
            hint="set `trainable = True` on the model or on some of its layers",
        )
    strategy = model.distribute_strategy
    if strategy is not tf.distribute.get_strategy() or tf.distribute.has_strategy():
        raise OptionError(
            f"model {model.name!r} was made or is planned in the scope of a {type(strategy).__name__}; a step is for one device",
            hint="build, compile and plan the model outside of `strategy.scope()`",
        )
    if tf.config.functions_run_eagerly():
        raise OptionError(
            "tf.config.run_functions_eagerly(True) is set, and only a graph can be planned",
            hint="call tf.config.run_functions_eagerly(False)",
        )


class Compiled(keras.Model):
    """The losses and the optimizer of a step of a model, as `keras.Model.compile` resolves them; the model stays as it is."""

    def __init__(self, model: keras.Model, loss: Loss, optimizer: Any) -> None:
        super().__init__(name=model.name, dtype=model.dtype_policy)
        self.model: Any = model  # its own losses (regularisers) count
        self.output_names = getattr(model, "output_names", None)
        try:
            usable = any(keras.losses.get(each) for each in tf.nest.flatten(loss))
        except (ValueError, TypeError):
            usable = False
        if not usable:
            hint = "pass a keras.losses object, a function of labels and prediction, or a name such as 'mse'"
            raise OptionError(f"loss={loss!r} is not a Keras loss", hint=hint)
        hint = "pass a keras.optimizers object, or a name such as 'adam'"
        if optimizer is None:
            raise OptionError("optimizer is None, and a step applies an optimizer", hint=hint)
        try:
            self.compile(optimizer, loss)
        except (ValueError, TypeError) as error:
            raise OptionError(f"optimizer={optimizer!r} is not a Keras optimizer", hint=hint) from error
        if not self.optimizer.built:  # otherwise its slots would be created inside the trace
            self.optimizer.build(model.trainable_variables)

    def step(self, inputs: Any, labels: Any, weights: Any = None) -> tuple[Any, tf.Tensor]:
        """Forward, loss, backward and update."""
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            prediction = self.model(inputs, training=True)
            loss: Any = self.compute_loss(inputs, labels, prediction, weights)
            scaled = self.optimizer.scale_loss(loss)
        self.optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return prediction, loss


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A traced step."""

    function: Any  # concrete function of a batch
    phases: tuple[tuple[int, Phase], ...]  # index of the first op of each part of the step, from 0 on, and the part's phase
    variables: tuple[tf.Variable, ...]  # variables of the function, which itself holds only weak references

    @property
    def ops(self) -> list[tf.Operation]:
        """Ops in the order in which they were traced."""
        return self.function.graph.get_operations()

    @property
    def captured(self) -> dict[str, Any]:
        """Tensors and variable handles captured from outside, by the name of their placeholder."""
        return {inside.op.name: outside for outside, inside in self.function.graph.captures}

    @property
    def arguments(self) -> list[tf.Tensor]:
        """Placeholders of the batch: inputs, then labels."""
        return self.function.inputs[: len(self.function.inputs) - len(self.captured)]

    def phase(self, index: int) -> Phase:
        """Phase of the op at an index of `ops`."""
        return self.phases[bisect.bisect_right(self.phases, index, key=lambda part: part[0]) - 1][1]


class PhaseMarks:
    """Records the op of the function that is traced now at which each phase begins, in the form of `Trace.phases`."""

    def __init__(self) -> None:
        self._graph: Any = tf.compat.v1.get_default_graph()
        self.parts: list[tuple[int, Phase]] = [(0, "forward")]

    def begin(self, phase: Phase) -> None:
        """Mark that the ops traced from now on belong to a phase. Marks inside a branch or a loop, one op here, do not count."""
        graph = tf.compat.v1.get_default_graph()
        if graph is self._graph:
            self.parts.append((len(graph.get_operations()), phase))

    def find_backward(self) -> None:
        """Mark the backward passes of the function that is traced now, by the name scope that `tf.GradientTape` opens."""
        ops = tf.compat.v1.get_default_graph().get_operations()
        ends = [*(index for index, _ in self.parts[1:]), len(ops)]
        for (index, phase), end in zip(list(self.parts), ends, strict=True):
            if phase != "optimizer":
                first = next((i for i in range(index, end) if "gradient_tape/" in ops[i].name), None)
                if first is not None:
                    self.parts.append((first, "backward"))
        self.parts.sort(key=lambda part: part[0])


def trace_step(model: keras.Model, step: Callable[..., Any], specs: Sequence[Any]) -> Trace:
    """Trace a step of a compiled model. Nothing runs.

    Raises:
        GraphError: The step cannot be traced.
    """
    phases: list[tuple[int, Phase]] = []

    def traced(*batch: Any) -> Any:
        marks = PhaseMarks()
        with contextlib.ExitStack() as shadows:
            shadows.enter_context(_marked(model, "compute_loss", marks, "loss"))
            for optimizer in _optimizers(model):
                shadows.enter_context(_marked(optimizer, "apply", marks, "optimizer"))
            shadows.enter_context(inlined_functions())
            shadows.enter_context(tf.variable_creator_scope(created_outside))
            results = step(*batch)
        marks.find_backward()
        phases[:] = marks.parts
        return results

    try:
        function = tf.function(traced, autograph=False).get_concrete_function(*specs)
    except (TypeError, ValueError, LookupError, RuntimeError, tf.errors.OpError) as error:
        if isinstance(error, CheckmateError):
            raise
        # Keras says which layer was called before it says why that failed, in bold type.
        why = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
        raise GraphError(
            f"the step cannot be traced: {' '.join(why[:2])}",
            hint="call the model and the loss on a batch of these shapes, and fix the error that they raise",
        ) from error
    return Trace(function, tuple(phases), tuple(function.graph.variables))


def _optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """The optimizer of `compile`, and the optimizers that a model with its own `train_step` holds."""
    held = [value for value in vars(model).values() if isinstance(value, keras.Optimizer)]
    return list({id(optimizer): optimizer for optimizer in (model.optimizer, *held) if optimizer is not None}.values())


@contextlib.contextmanager
def _marked(owner: Any, name: str, marks: PhaseMarks, phase: Phase) -> Generator[None]:
    """While the block runs, mark the phase of the ops that a method of an object traces.

    After the loss and after an update the phase is ``"loss"``: metrics need the prediction and no gradient, as the loss does.
    """
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        marks.begin(phase)
        result = method(*args, **kwargs)
        marks.begin("loss")
        return result

    attributes = vars(owner)  # not `setattr`, by which Keras tracks assigned objects
    before = attributes.get(name)
    attributes[name] = call
    try:
        yield
    finally:
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before
