"""The planned steps of `fit` on the TensorFlow backend."""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes
from checkmate.frontend.options import CostSource, PlanningOptions
from checkmate.tf2.capture import capture_trace
from checkmate.tf2.planned_steps import PlannedSteps
from checkmate.tf2.profiler import cost_source, with_opaque_measured
from checkmate.tf2.trace import trace_step

_log = logging.getLogger("checkmate.keras")


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
                data = next(iterator)
            except StopIteration:
                if number == 0:
                    raise
                break
            logs = self._step(data)
        return logs

    def _step(self, data: Any) -> Any:
        specs, flat = _batch(data)
        known = len(self.steps.planned)
        logs = self.steps([specs], flat)
        if len(self.steps.planned) > known > 0:
            peak = format_bytes(list(self.steps.planned.values())[-1].result.peak_bytes)
            _log.info("another shape of a batch was planned: %s, peak %s", flat[0].shape, peak)
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
    (specs, flat), source = _batch(data), cost_source(costs)
    captured = capture_trace(trace_step(model, model.train_step, [specs]), source, model.name)
    return (with_opaque_measured(captured, flat) if costs == "measured" else captured).graph
