"""`fit_within`: the steps that `model.fit` runs are planned, and everything else of `fit` is Keras's own."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol, Self

import keras

from checkmate.core.budget import Budget
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import Amount
from checkmate.frontend.options import CostSource, PlanningOptions, PlanSource
from checkmate.keras.models import check_fit
from checkmate.solvers.session import Solver


class Hook(Protocol):
    """Runs in place of a part of Keras, and has the results of its plans so far."""

    @property
    def results(self) -> tuple[Result, ...]:
        """The solver's result for each signature of a batch, in the order in which they were planned."""
        ...

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None before the first batch."""
        ...

    @property
    def measured_bytes(self) -> int | None:
        """Largest measured peak of a step; None if none was measured."""
        ...

    def remove(self) -> None:
        """Let Keras run its own part again. Does nothing if another hook has taken the place of this one."""
        ...


class PlannedFit:
    """A model whose `fit` keeps a budget. Create one with `fit_within`.

    As a context manager it calls `undo` at the end of the block. On PyTorch, where a step can be several graphs, `results` is
    empty and the bytes are None; `checkmate.torch.last_plan` has the plan of such a step.

    Attributes:
        model: The model.
    """

    def __init__(self, model: keras.Model, hook: Hook) -> None:
        self.model = model
        self._hook = hook

    @property
    def results(self) -> tuple[Result, ...]:
        """The solver's result for each shape of a batch, with its proof, in the order in which they were planned."""
        return self._hook.results

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None before `fit`, since a share refers to the step of the first batch."""
        return self._hook.budget_bytes

    @property
    def measured_bytes(self) -> int | None:
        """Largest measured peak of a step, with variables, slots and batch; None before `fit`, or if nothing was measured."""
        return self._hook.measured_bytes

    def undo(self) -> None:
        """Let `fit` run Keras's own steps again. Weights, optimizer and metrics stay as they are."""
        self._hook.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()


def fit_within(
    model: keras.Model,
    budget: Amount | Budget,
    *,
    solver: Solver | str | None = None,
    time_limit_s: float | None = 60.0,
    plan: PlanSource | None = None,
) -> PlannedFit:
    """Let `model.fit` keep a memory budget: call it after `model.compile`, and train as before.

    Each shape of a batch is planned when it first comes, which takes up to the time limit; a smaller last batch is therefore
    planned at the end of the first epoch. Validation and prediction are not planned. Another call for the same model replaces the
    budget. After another `model.compile` the budget holds for the new optimizer, losses and metrics.

    Args:
        model: A compiled model. It can have its own `train_step`.
        budget: Largest allowed peak on the device during a step, with variables, optimizer slots and batch: ``"8GiB"``, a number
            of bytes, or a share of the whole step of the first batch, such as ``"70%"``.
        solver: A solver or its name; `checkmate.Auto` by default.
        time_limit_s: Seconds of wall time for planning one shape of a batch, or None for no limit.
        plan: A plan, or its file, to run for the first shape of a batch instead of solving.

    Returns:
        What was planned, and the way back: ``fit_within(...).undo()``.

    Raises:
        OptionError: The model is not compiled, is compiled with ``run_eagerly=True``, or an argument cannot be used.

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
    options = PlanningOptions.of(budget=budget, solver=solver, time_limit_s=time_limit_s, plan=plan)
    check_fit(model)
    if keras.config.backend() == "torch":
        from checkmate.keras.torch_call import CompiledCall  # imports the framework

        if plan is not None:
            raise OptionError("a plan cannot be given on PyTorch, where a step can be several graphs", hint="leave out plan")
        return PlannedFit(model, CompiledCall(model, {"budget": budget, "solver": solver, "time_limit_s": time_limit_s}))
    from checkmate.keras.tensorflow_steps import TrainFunctionHook  # imports the framework

    return PlannedFit(model, TrainFunctionHook(model, options))


def capture(model: keras.Model, batch: Any, *, costs: CostSource = "measured") -> Graph:
    """The graph of the step that `model.fit` runs for a batch, to be planned elsewhere or written to a file.

    Args:
        model: A compiled model, as in `fit_within`.
        batch: What `train_step` gets: ``(inputs, labels)`` or ``(inputs, labels, sample_weight)``, such as an element of the data
            set.
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
    check_fit(model)
    if keras.config.backend() != "tensorflow":
        raise OptionError(
            f"Keras runs on {keras.config.backend()}, and the graph of a step of fit can be captured on TensorFlow only",
            hint="call checkmate.torch.capture for a step of PyTorch",
        )
    from checkmate.keras.tensorflow_steps import capture_step  # imports the framework

    return capture_step(model, batch, costs).graph
