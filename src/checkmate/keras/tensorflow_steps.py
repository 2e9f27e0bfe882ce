"""The planned steps of `fit` on the TensorFlow backend."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.frontend.options import CostSource, PlanningOptions
from checkmate.tf2.planned_steps import PlannedSteps
from checkmate.tf2.profiler import capture_with_costs
from checkmate.tf2.trace import trace_step


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
    return capture_with_costs(trace_step(model, model.train_step, [specs]), costs, model.name, flat).graph
