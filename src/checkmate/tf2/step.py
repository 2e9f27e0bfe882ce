"""A whole Keras training step under a budget: ``prediction, loss = step(x, y)``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import keras
import numpy as np
import tensorflow as tf

from checkmate.core.budget import Budget
from checkmate.core.errors import GraphError, OptionError, PlanError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.units import Amount
from checkmate.frontend.options import TIME_LIMIT_S, CommonOptions, CostSource, PlanningOptions, takes_options
from checkmate.tf2.planned_steps import PlannedFunction, PlannedSteps
from checkmate.tf2.profiler import capture_with_costs
from checkmate.tf2.trace import Compiled, Loss, check_model, trace_step

ARGUMENTS = ("input_spec", "label_spec", "sample_weight_spec")  # names of the specifications of the arguments of a step


def specs_of(sample: Any, name: str, *, closed: bool = False) -> Any:
    """A nest of `tf.TensorSpec` from a nest of tensors, arrays or specifications.

    The name of the argument is for messages. With ``closed`` shapes may have no open dimensions, as in a graph.
    """
    specs = tf.nest.map_structure(lambda leaf: _spec(leaf, name), sample)
    for spec in tf.nest.flatten(specs) if closed else ():
        if not spec.shape.is_fully_defined():
            raise OptionError(
                f"{name} has the shape {spec.shape}, and a graph needs a shape without open dimensions",
                hint=f"pass a sample batch as {name}, or a tf.TensorSpec with a batch size",
            )
    return specs


def flat_batch(specs: Sequence[Any], arguments: Sequence[Any]) -> list[tf.Tensor]:
    """The tensors of a batch, flat: inputs, labels, and weights of samples if there are any.

    There is a nest of specifications for each argument. Only the first dimension of a tensor may differ from its specification.
    """
    flat: list[tf.Tensor] = []
    for argument, spec, given in zip(ARGUMENTS, specs, arguments, strict=False):
        name = argument.removesuffix("_spec")
        try:
            tf.nest.assert_same_structure(spec, given)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"the structure of the {name} differs from that of {argument}: {str(error).splitlines()[0]}",
                hint=f"pass the {name} in the structure of {argument}: a tensor, or the same list, tuple or mapping of tensors",
            ) from error
        wanted = tf.nest.flatten(spec)
        flat += [_tensor(name, s, g) for s, g in zip(wanted, tf.nest.flatten(given), strict=True)]
    return flat


def sample_batch(specs: Sequence[Any], samples: Sequence[Any]) -> list[tf.Tensor] | None:
    """The samples that the specifications were made from, as flat tensors; None if some are specifications themselves."""
    leaves = tf.nest.flatten(samples)
    if any(isinstance(leaf, tf.TensorSpec) or not hasattr(leaf, "__array__") for leaf in leaves):
        return None
    return flat_batch(specs, samples)


def _spec(leaf: Any, name: str) -> tf.TensorSpec:
    if leaf is None:
        raise OptionError(f"{name} is None", hint=f"pass a sample batch as {name}, or its tf.TensorSpec")
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    try:
        spec = tf.TensorSpec(leaf.shape, leaf.dtype)
    except TypeError as error:
        raise OptionError(
            f"{name}={leaf!r} is neither a tensor nor a specification", hint=f"pass a sample batch as {name}, or a tf.TensorSpec"
        ) from error
    _refuse_empty(name, spec.shape)
    return spec


def _tensor(name: str, spec: tf.TensorSpec, given: Any) -> tf.Tensor:
    if given is None:
        raise OptionError(f"the {name} is None, and {name}_spec is {spec.shape}", hint=f"pass a batch of {name}s")
    try:
        tensor = tf.convert_to_tensor(given, spec.dtype)
    except (TypeError, ValueError) as error:
        have = getattr(getattr(given, "dtype", None), "name", type(given).__name__)
        raise OptionError(
            f"the {name} is {have}, and {name}_spec says {spec.dtype.name}", hint=f"cast the {name} to {spec.dtype.name}"
        ) from error
    if spec.shape.rank not in (None, tensor.shape.rank) or not spec.shape[1:].is_compatible_with(tensor.shape[1:]):
        raise OptionError(
            f"the {name} has the shape {tensor.shape}, and the step is for {spec.shape}: only the batch size may differ",
            hint=f"compile another step with {name}_spec of the shape {tensor.shape}",
        )
    _refuse_empty(name, tensor.shape)
    return tensor


def _refuse_empty(name: str, shape: tf.TensorShape) -> None:
    """Refuse a batch without samples, whose mean loss is NaN."""
    if shape.rank is not None and 0 in shape.as_list():
        raise OptionError(f"{name} has the shape {shape}, which holds nothing", hint="leave out batches without samples")


class TrainStep:
    """A compiled training step. Create one with `checkmate.tf2.compile`.

    Attributes:
        model: The model that the step trains.
        optimizer: The optimizer that the step applies.
    """

    def __init__(
        self,
        compiled: Compiled,
        specs: tuple[Any, ...],
        batch: list[tf.Tensor] | None,
        options: PlanningOptions,
    ) -> None:
        self.model: keras.Model = compiled.model
        self.optimizer: keras.Optimizer = compiled.optimizer
        self._specs = specs
        self._steps = PlannedSteps(lambda s: trace_step(compiled, compiled.step, s), options, compiled.name)
        if all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(specs)):
            self._steps.plan(specs, batch)

    @property
    def graph(self) -> Graph:
        """The graph of the step for the batch that was planned first."""
        return self._first.capture.graph

    @property
    def plan(self) -> Plan:
        """The plan that is run for this batch."""
        return self._first.result.plan

    @property
    def result(self) -> Result:
        """The solver's result for this plan, with its proof."""
        return self._first.result

    @property
    def budget_bytes(self) -> int | None:
        """The requested budget in bytes, or None."""
        return self._steps.budget_bytes

    @property
    def measured_bytes(self) -> int | None:
        """Measured peak of the plan, resident bytes included; None if it was not measured."""
        return self._first.measured_bytes

    @property
    def _first(self) -> PlannedFunction:
        if not self._steps.planned:
            raise PlanError(
                "nothing is planned yet: the specification leaves the size of a batch open",
                hint="call the step on a batch first, or pass a sample batch as input_spec and label_spec",
            )
        return next(iter(self._steps.planned.values()))

    def __call__(self, inputs: Any, labels: Any, sample_weight: Any = None) -> tuple[Any, tf.Tensor]:
        """Run one step: forward, loss, backward and optimizer.

        Args:
            inputs: Tensors or arrays in the structure of ``input_spec``.
            labels: Tensors or arrays in the structure of ``label_spec``.
            sample_weight: An array of weights of samples, or one array for each output; None weights all samples equally.

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
        arguments, specs = (inputs, labels), self._specs[:2]
        if sample_weight is not None:
            arguments = (*arguments, sample_weight)
            specs = (*specs, *(self._specs[2:] or (specs_of(sample_weight, "sample_weight"),)))
        flat = flat_batch(specs, arguments)
        return self._steps(tf.nest.pack_sequence_as(specs, [tf.TensorSpec(t.shape, t.dtype) for t in flat]), flat)


@takes_options(CommonOptions, time_limit_s=TIME_LIMIT_S)
def compile(  # noqa: A001 - `checkmate.tf2.compile` is the documented call
    model: keras.Model,
    loss: Loss,
    optimizer: Any,
    input_spec: Any,
    label_spec: Any,
    *,
    sample_weight_spec: Any = None,
    budget: Amount | Budget | None = None,
    **options: Unpack[CommonOptions],
) -> TrainStep:
    """Compile a training step that keeps a memory budget: ``prediction, loss = step(x, y)``.

    The call traces and plans the step. With a budget it also runs the step a few times to measure its peak, with all
    variables saved before and restored after. The optimizer's slots are created if they do not exist.

    Args:
        model: A built Keras model on the TensorFlow backend.
        loss: A Keras loss, its name, or a function of labels and prediction; for several outputs one for all, a
            list, or a mapping by the outputs' names. The model's own losses (regularisers) are added.
        optimizer: A Keras optimizer or its name.
        input_spec: A batch of inputs, or its `tf.TensorSpec`, for example from a data set's ``element_spec``; lists, tuples and
            mappings of them for models with several inputs. If the batch size is open, planning waits for the first call.
        label_spec: The same for labels.
        sample_weight_spec: The same for the weights of samples, if every call of the step passes them.
        budget: Largest allowed peak on the device during the step, with variables, slots and batch: ``"8GiB"``, a number of
            bytes, or a share of the whole step: ``"70%"`` is the bytes that no plan can change plus 70 % of the additional bytes
            that keeping everything needs. None: the memory of the device.
        options: The options below, by name.
        solver: A solver or its name; `Auto` by default.
        time_limit_s: Seconds of wall time for planning, 30 by default, or None for no limit: half of them for the first plan,
            and a quarter for each further plan that calibration requests.
        plan: A plan, or its file, to run instead of solving; it is not measured.

    Returns:
        The step. It accepts batches of any size, and plans a new size at its first call, within the same budget.

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
    check_model(model)
    planning = PlanningOptions.of(budget=budget, **options)
    samples = (input_spec, label_spec) if sample_weight_spec is None else (input_spec, label_spec, sample_weight_spec)
    specs = tuple(specs_of(sample, name) for sample, name in zip(samples, ARGUMENTS, strict=False))
    batch = sample_batch(specs, samples)
    return TrainStep(Compiled(model, loss, optimizer), specs, batch, planning)


def capture(
    model: keras.Model, loss: Loss, optimizer: Any, input_spec: Any, label_spec: Any, *, costs: CostSource = "measured"
) -> Graph:
    """The graph of a training step; `checkmate.write` writes it to a file.

    The step does not run, unless it has loops, nested functions or ops with large workspaces: their allocations are measured in
    two steps, with all variables saved before and restored afterwards.

    Args:
        model: A built Keras model, as in `compile`.
        loss: The loss or losses, as in `compile`.
        optimizer: The optimizer, as in `compile`; its slots are created if they do not exist.
        input_spec: A batch of inputs, or its specification, as in `compile`.
        label_spec: A batch of labels, or its specification, as in `compile`.
        costs: ``"measured"`` runs every distinct op alone a few times; ``"estimated"`` runs nothing, estimates times from the
            bytes that an op reads and writes, and takes workspace as 0.

    Raises:
        NotBuiltError: The model has no variables yet.
        OptionError: An argument cannot be used.
        GraphError: The step cannot be traced as one function.
    """
    check_model(model)
    specs = [specs_of(sample, name, closed=True) for sample, name in zip((input_spec, label_spec), ARGUMENTS, strict=False)]
    compiled = Compiled(model, loss, optimizer)
    return capture_with_costs(trace_step(compiled, compiled.step, specs), costs, model.name).graph
