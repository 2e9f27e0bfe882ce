"""Trace a Keras training step as one function: forward, loss, backward and optimizer."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from checkmate.core.errors import CheckmateError, GraphError
from checkmate.core.graph import Phase
from checkmate.tf2.models import total_loss


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
    """Records the op of a traced function at which each phase begins, in the form of `Trace.phases`."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, Phase]] = []
        self._graph: Any = None

    def start(self) -> None:
        """Forget the marks of an earlier trace: TensorFlow can trace a function twice, to create its variables."""
        self._graph = tf.compat.v1.get_default_graph()
        self.parts = [(0, "forward")]

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


def trace_step(model: keras.Model, losses: Sequence[Callable[..., Any]], optimizer: keras.Optimizer, specs: Any) -> Trace:
    """Trace a step. Nothing runs, except that the optimizer's slots are created if they do not exist.

    ``specs`` are nests of `tf.TensorSpec`: inputs, labels and, if there are any, sample weights.
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
            loss = total_loss(losses, labels, prediction, weights, model.losses)
            scaled = optimizer.scale_loss(loss)
        marks.begin("backward")
        gradients = tape.gradient(scaled, model.trainable_variables)
        marks.begin("optimizer")
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return prediction, loss

    return trace_function(step, specs, marks)


def trace_function(step: Callable[..., Any], specs: Sequence[Any], marks: PhaseMarks) -> Trace:
    """Trace a function of a batch, which calls ``marks.start`` first. Nothing runs.

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
