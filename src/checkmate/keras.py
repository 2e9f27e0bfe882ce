"""Keras: `model.fit` within a memory budget. `fit_within` plans the steps that `fit` runs; the rest of `fit` is Keras's own."""

from __future__ import annotations

from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, Unpack

from checkmate.core.budget import Budget
from checkmate.core.errors import MissingExtraError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import Amount
from checkmate.frontend.options import TIME_LIMIT_S, CommonOptions, CostSource, PlanningOptions, takes_options

if find_spec("keras") is None:
    raise MissingExtraError("checkmate.keras needs Keras 3, which is not installed", hint='pip install "checkmate-remat[tf2]"')

import keras

if TYPE_CHECKING:
    from checkmate.tf2.planned_steps import PlannedSteps


__all__ = ["PlannedFit", "capture", "fit_within"]


class PlannedFit:
    """A model whose `fit` keeps a budget. Create one with `fit_within`.

    As a context manager it calls `undo` at the end of the block.

    Attributes:
        model: The model.
    """

    def __init__(self, model: keras.Model, options: PlanningOptions) -> None:
        self.model: Any = model  # Keras declares no type for `train_function`
        self._options = options
        self._steps: PlannedSteps | _JaxSteps | None = None
        self.model.make_train_function = self._make_train_function
        self.model.train_function = None

    @property
    def results(self) -> tuple[Result, ...]:
        """The solver's result for each shape of a batch, with its proof, in the order in which they were planned."""
        return () if self._steps is None else tuple(planned.result for planned in self._steps.planned.values())

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None before `fit`, since a share refers to the step of the first batch."""
        return None if self._steps is None else self._steps.budget_bytes

    @property
    def measured_bytes(self) -> int | None:
        """Largest peak of a step, with variables, slots and batch: measured on TensorFlow, as XLA compiled it on JAX.

        None before `fit`, or if nothing was measured.
        """
        if self._steps is None:
            return None
        measured = [planned.measured_bytes for planned in self._steps.planned.values()]
        return max((m for m in (*measured, self._steps.monitored_bytes) if m is not None), default=None)

    def undo(self) -> None:
        """Let `fit` run Keras's own steps again. Weights, optimizer and metrics stay as they are."""
        if vars(self.model).get("make_train_function") == self._make_train_function:  # no later budget has replaced it
            del self.model.make_train_function
            self.model.train_function = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()

    def _make_train_function(self, force: bool = False) -> Any:
        """Keras calls this before it trains. `model.compile` resets ``train_function``; new steps are then planned."""
        _check(self.model)
        if self.model.train_function is not None and not force:
            return self.model.train_function
        if keras.config.backend() == "jax":
            self._steps = _JaxSteps(self.model, self._options)
            self.model.train_function = self.model._make_function(self._steps)
        else:
            from checkmate.tf2.planned_steps import PlannedTrainFunction  # imports the framework

            self.model.train_function = PlannedTrainFunction(self.model, self._options)
            self._steps = self.model.train_function.steps
        return self.model.train_function


class _JaxStep(NamedTuple):
    """A planned step of Keras on JAX, the bytes that XLA compiled for it, and the step under `jax.jit`."""

    result: Result
    measured_bytes: int | None
    run: Any


class _JaxSteps:
    """Plans the step of Keras's trainer for JAX when a shape of a batch first occurs, and runs it."""

    def __init__(self, model: Any, options: PlanningOptions) -> None:
        self.planned: dict[str, _JaxStep] = {}
        self.budget_bytes: int | None = None  # a share refers to the first batch
        self.monitored_bytes: int | None = None
        self._model, self._options = model, options

    def __call__(self, state: Any, batch: Any) -> Any:
        import jax

        from checkmate.jax import plan

        data, options = jax.tree.map(jax.numpy.asarray, batch), self._options  # as `jax.jit` takes arrays of numpy
        if (key := str(jax.tree.map(jax.typeof, data))) not in self.planned:
            budget = options.budget if self.budget_bytes is None else self.budget_bytes
            chosen: Any = {"solver": options.solver, "time_limit_s": options.time_limit_s}
            chosen["plan"] = None if self.planned else options.plan
            step = plan(self._model.train_step, state, data, budget=budget, donate_argnums=0, **chosen)
            self.budget_bytes = step.budget_bytes
            self.planned[key] = _JaxStep(step.result, step.peak_bytes, jax.jit(step, donate_argnums=0))
        return self.planned[key].run(state, data)


@takes_options(CommonOptions, time_limit_s=TIME_LIMIT_S)
def fit_within(model: keras.Model, budget: Amount | Budget, **options: Unpack[CommonOptions]) -> PlannedFit:
    """Let `model.fit` keep a memory budget: call it after `model.compile`, and train as before.

    Each shape of a batch is planned when it first occurs, which takes up to the time limit. Therefore a smaller last batch is
    planned at the end of the first epoch. Validation and prediction are not planned. Another call for the same model replaces the
    budget. After another `model.compile` the budget holds for the new optimizer, losses and metrics.

    Args:
        model: A compiled model on the TensorFlow or JAX backend of Keras. It can have its own `train_step`.
        budget: Largest allowed peak on the device during a step, with variables, optimizer slots, batch and what a data set keeps
            there: ``"8GiB"``, a number of bytes, or a share of the whole step of the first batch, such as ``"70%"``.
        options: The options below, by name.
        solver: A solver or its name; `checkmate.Auto` by default.
        time_limit_s: Seconds of wall time for planning one shape of a batch, 30 by default, or None for no limit.
        plan: A plan, or its file, to run for the first shape of a batch instead of solving.

    Returns:
        The results of planning. ``fit_within(...).undo()`` takes the budget back.

    Raises:
        OptionError: Keras runs on another backend, the model is not compiled or runs eagerly, or an argument cannot be used.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> with fit_within(model, "1GiB") as planned:
        ...     history = model.fit(np.ones((4, 4)), np.zeros((4, 2)), verbose=0)
        >>> len(planned.results)
        1
    """
    planning = PlanningOptions.of(budget=budget, **options)
    _check(model, budget)
    return PlannedFit(model, planning)


def capture(model: keras.Model, batch: Any, *, costs: CostSource = "measured") -> Graph:
    """The graph of the step that `model.fit` runs for a batch, to be planned elsewhere or written to a file.

    Args:
        model: A compiled model, as in `fit_within`.
        batch: The argument of `train_step`, ``(inputs, labels)`` or ``(inputs, labels, sample_weight)``: an element of the data
            set, for example.
        costs: ``"measured"`` runs every distinct op alone a few times; ``"estimated"`` runs nothing.

    Raises:
        OptionError: As in `fit_within`.
        GraphError: The step cannot be traced as one function.

    Examples:
        >>> import keras
        >>> import numpy as np
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> model.compile(optimizer="sgd", loss="mse")
        >>> graph = capture(model, (np.ones((4, 4), "float32"), np.zeros((4, 2), "float32")), costs="estimated")
        >>> sorted({op.phase for op in graph.ops})
        ['backward', 'forward', 'loss', 'optimizer']
    """
    if keras.config.backend() == "jax":
        raise OptionError(
            "Keras runs on jax, where a step is a function of the model's state",
            hint="call checkmate.jax.capture(model.train_step, state, batch), or set KERAS_BACKEND=tensorflow",
        )
    _check(model)
    from checkmate.tf2.planned_steps import capture_step  # imports the framework

    return capture_step(model, batch, costs)


def _check(model: keras.Model, budget: Amount | Budget = "8GiB") -> None:
    """Check that the steps of a model's `fit` can be planned; the budget is for the hint."""
    backend = keras.config.backend()
    if backend not in ("tensorflow", "jax"):
        hint = "set the environment variable KERAS_BACKEND to tensorflow or jax before Keras is imported"
        if backend == "torch":
            hint += f""", or let the backend of torch.compile plan the forward and backward pass of `fit`:
    call = model.call
    planned = torch.compile(call, backend="checkmate", options={{"budget": {budget!r}}})
    model.call = lambda *args, **kwargs: (planned if torch.is_grad_enabled() else call)(*args, **kwargs)"""
        raise OptionError(f"Keras runs on {backend}, and the steps of `fit` can be planned on TensorFlow and JAX only", hint=hint)
    if backend == "tensorflow":
        from checkmate.tf2.trace import check_environment  # imports the framework

        check_environment(model)
    elif keras.distribution.distribution() is not None:
        raise OptionError(
            "keras.distribution spreads the model over several devices, and a step is for one",
            hint="call keras.distribution.set_distribution(None) before the model is built",
        )
    if not model.compiled or model.optimizer is None:
        raise OptionError(
            f"model {model.name!r} is not compiled with an optimizer, and a step applies one",
            hint="call model.compile(optimizer=..., loss=...) before fit_within(model, ...)",
        )
    if model.run_eagerly:
        raise OptionError(
            f"model {model.name!r} is compiled with run_eagerly=True, and only a graph can be planned",
            hint="compile the model without run_eagerly=True",
        )
    if not type(model).make_train_function.__module__.startswith("keras."):
        raise OptionError(
            f"the class {type(model).__name__} has its own make_train_function, which fit_within would replace",
            hint="remove it and write a train_step instead, which is planned as it is",
        )
