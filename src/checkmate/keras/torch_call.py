"""The planned steps of `fit` on PyTorch: the forward pass of the model is compiled with the backend of `checkmate.torch`."""

from __future__ import annotations

from typing import Any

import keras
import torch

from checkmate.core.result import Result


class CompiledCall:
    """Stands in for the `call` of a model while gradients are computed. Keras's `train_step` and loop are unchanged.

    Validation and prediction run without gradients and use the model's own `call`.

    Args:
        model: The compiled model.
        options: Options of the backend.
    """

    def __init__(self, model: keras.Model, options: dict[str, Any]) -> None:
        self._model: Any = model
        self._options = options
        self._call = model.call
        self._compiled: Any = None
        self._optimizer: Any = None
        # Not `setattr`, by which Keras tracks what is assigned.
        vars(self._model)["call"] = self

    @property
    def results(self) -> tuple[Result, ...]:
        """Empty: `checkmate.torch.explain` describes a step of PyTorch, which can be several graphs."""
        return ()

    @property
    def budget_bytes(self) -> int | None:
        """None: as for `results`."""
        return None

    @property
    def measured_bytes(self) -> int | None:
        """None: steps of PyTorch run exactly as planned, and are not measured."""
        return None

    def remove(self) -> None:
        """Let the model run its own `call` again."""
        if vars(self._model).get("call") is self:
            del vars(self._model)["call"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output.

        Args:
            args: Arguments of the model's ``call``.
            kwargs: Keyword arguments of the model's ``call``.
        """
        if not torch.is_grad_enabled():
            return self._call(*args, **kwargs)
        if self._compiled is None or self._optimizer is not self._model.optimizer:  # `model.compile` was called again
            self._optimizer = self._model.optimizer
            options = {**self._options, "reserve": _held_bytes(self._model)}
            self._compiled = torch.compile(self._call, backend="checkmate", options=options)
        return self._compiled(*args, **kwargs)


def _held_bytes(model: keras.Model) -> int:
    """Bytes of the variables of optimizer and metrics, which no graph has."""
    held = (*model.optimizer.variables, *model.metrics_variables)
    return sum(variable.value.nbytes for variable in held)
