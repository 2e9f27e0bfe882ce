"""The planned steps of `fit` on the TensorFlow backend."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import keras
import tensorflow as tf

from checkmate.core.errors import OptionError
from checkmate.core.graph import Phase
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.frontend.options import CostSource, PlanningOptions
from checkmate.keras.models import check_fit
from checkmate.tf2.graph.capture import Capture, capture_trace
from checkmate.tf2.graph.trace import PhaseMarks, Trace, trace_function
from checkmate.tf2.measure.opaque_ops import with_opaque_measured
from checkmate.tf2.measure.profiler import cost_source
from checkmate.tf2.models import check_environment
from checkmate.tf2.planned_steps import PlannedSteps

_log = logging.getLogger("checkmate.keras")


class TrainFunctionHook:
    """Stands in for `make_train_function` of a model, which makes what Keras calls for every batch.

    Args:
        model: The compiled model.
        options: Which plans to look for.
    """

    def __init__(self, model: keras.Model, options: PlanningOptions) -> None:
        check_environment(model)
        self._model: Any = model  # Keras declares no type for `train_function`
        self._options = options
        self._function: PlannedTrainFunction | None = None
        model.make_train_function = self.make_train_function
        model.train_function = None

    @property
    def results(self) -> tuple[Result, ...]:
        """The solver's result for each signature of a batch, in the order in which they were planned."""
        return () if self._function is None else tuple(planned.result for planned in self._function.steps.planned.values())

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None before the first batch."""
        return None if self._function is None else self._function.steps.budget_bytes

    @property
    def measured_bytes(self) -> int | None:
        """Largest measured peak of a step; None if none was measured."""
        if self._function is None:
            return None
        measured = [planned.measured_bytes for planned in self._function.steps.planned.values()]
        return max((m for m in (*measured, self._function.steps.monitored_bytes) if m is not None), default=None)

    def remove(self) -> None:
        """Let Keras make its own function again, unless another hook has taken the place of this one."""
        if vars(self._model).get("make_train_function") == self.make_train_function:
            del self._model.make_train_function
            self._model.train_function = None

    def make_train_function(self, force: bool = False) -> Any:
        """Keras calls this before it trains; `model.compile` has reset ``train_function``, so that new steps are planned.

        Args:
            force: Whether to plan again although nothing has changed.

        Raises:
            OptionError: The model was compiled again in a way that cannot be planned.
        """
        check_fit(self._model)
        check_environment(self._model)
        if self._model.train_function is None or force:
            self._function = PlannedTrainFunction(self._model, self._options)
            self._model.train_function = self._function  # pyright: ignore[reportAttributeAccessIssue]
        return self._model.train_function


class PlannedTrainFunction:
    """Takes batches from Keras's iterator and runs the planned `train_step` on each.

    Args:
        model: The compiled model.
        options: Which plans to look for.

    Attributes:
        steps: The planned functions.
    """

    def __init__(self, model: keras.Model, options: PlanningOptions) -> None:
        self._model = model
        self.steps = PlannedSteps(lambda specs: _trace(model, specs), options, model.name)

    def __call__(self, iterator: Any) -> Any:
        """Run as many steps as `fit` runs between two calls of the callbacks (``steps_per_execution``).

        Args:
            iterator: Batches; the last ones can be fewer.

        Returns:
            Logs of the last step.

        Raises:
            StopIteration: There is no batch left.
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
        batch = _Batch.of(data)
        planned = self.steps.planned.get(batch.key)
        if planned is None:
            first = not self.steps.planned
            planned = self.steps.plan(batch.key, [batch.specs], batch.flat)
            if not first:
                peak = format_bytes(planned.peaks.live_bytes)
                _log.info("another shape of a batch was planned: %s, peak %s", batch.flat[0].shape, peak)
        return self.steps.run(planned, batch.flat)


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch as Keras passes it to `train_step`.

    Attributes:
        key: The signature: structure, shapes and types.
        specs: The nest with a `tf.TensorSpec` for each tensor.
        flat: The tensors.
    """

    key: tuple[Any, ...]
    specs: Any
    flat: list[tf.Tensor]

    @classmethod
    def of(cls, data: Any) -> Self:
        """The batch of a nest of tensors or arrays. Labels or weights that are not there are None or an empty optional."""
        data = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
        for leaf in tf.nest.flatten(data):
            if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
                raise OptionError(
                    f"a batch has a {type(leaf).__name__}, and a plan needs tensors whose sizes are known",
                    hint="call RaggedTensor.to_tensor() or tf.sparse.to_dense in the data set",
                )
        leaves = [None if leaf is None else tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(data)]
        specs = [None if leaf is None else tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in leaves]
        key = (*specs, repr(tf.nest.map_structure(lambda _: 0, data)))
        return cls(key, tf.nest.pack_sequence_as(data, specs), [leaf for leaf in leaves if leaf is not None])


def capture_step(model: keras.Model, data: Any, costs: CostSource) -> Capture:
    """The graph of the step that `fit` runs for a batch.

    Raises:
        OptionError: As in `fit_within`.

    Args:
        model: The compiled model.
        data: What `train_step` gets: ``(inputs, labels)`` or ``(inputs, labels, sample_weight)``.
        costs: As in `checkmate.tf2.capture`.
    """
    check_environment(model)
    batch, source = _Batch.of(data), cost_source(costs)
    captured = capture_trace(_trace(model, [batch.specs]), source, model.name)
    return with_opaque_measured(captured, batch.flat) if costs == "measured" else captured


def _trace(model: keras.Model, specs: Sequence[Any]) -> Trace:
    """Trace the model's `train_step`. As in `fit`, what is not built yet is built by its first trace."""
    marks = PhaseMarks()

    def step(data: Any) -> Any:
        marks.start()
        with contextlib.ExitStack() as shadows:
            shadows.enter_context(_marked(model, "compute_loss", marks, "loss"))
            for optimizer in _optimizers(model):
                shadows.enter_context(_marked(optimizer, "apply", marks, "optimizer"))
            logs = model.train_step(data)
        marks.find_backward()
        return logs

    return trace_function(step, specs, marks)


def _optimizers(model: keras.Model) -> list[keras.Optimizer]:
    """The optimizer of `compile`, and those that a model with its own `train_step` holds."""
    held = [value for value in vars(model).values() if isinstance(value, keras.Optimizer)]
    return list({id(optimizer): optimizer for optimizer in (model.optimizer, *held) if optimizer is not None}.values())


@contextlib.contextmanager
def _marked(owner: Any, name: str, marks: PhaseMarks, phase: Phase) -> Generator[None]:
    """While the block runs, mark the phase of what a method of an object traces.

    After the loss and after an update the phase is ``"loss"``: metrics need the prediction and no gradient, as the loss does.
    """
    method = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        marks.begin(phase)
        result = method(*args, **kwargs)
        marks.begin("loss")
        return result

    # Not `setattr`, by which Keras tracks what is assigned.
    before = vars(owner).get(name)
    vars(owner)[name] = call
    try:
        yield
    finally:
        if before is None:
            del vars(owner)[name]
        else:
            vars(owner)[name] = before
