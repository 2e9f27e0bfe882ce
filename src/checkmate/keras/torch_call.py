"""The planned steps of `fit` on PyTorch: the forward pass of the model is compiled with the backend of `checkmate.torch`."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

import keras
import torch
from keras.src.backend.common.global_state import get_global_attribute

from checkmate.core.result import Result
from checkmate.keras.replaced import Replaced
from checkmate.keras.torch_layers import make_traceable
from checkmate.keras.torch_update import CheckedUpdate, GroupedUpdate
from checkmate.torch.graph.storages import leaves, unique_bytes


class CompiledCall:
    """Stands in for the `call` of a model while gradients are computed. Keras's `train_step` and loop are unchanged.

    Validation and prediction run without gradients and use the model's own `call`.

    Args:
        model: The compiled model.
        options: Options of the backend.
    """

    def __init__(self, model: keras.Model, options: dict[str, Any]) -> None:
        before = vars(model).get("call")
        if isinstance(before, CompiledCall):
            before.remove()
        self._model: Any = model
        self._options = options
        self._call, self._train_step, self._compute_loss = model.call, model.train_step, model.compute_loss
        self._compiled: Any = None
        self._optimizer: Any = None
        self._held_bytes = 0  # when the optimizer begins: batch, outputs and loss of the present step, and logs
        self._logs_bytes = 0  # of the last step, which `fit` holds until the present one has ended
        self._replaced, self._replaced_inside = Replaced(), Replaced()
        self._replaced.put(model, "call", self)
        self._replaced.put(model, "train_step", self.train_step)
        self._replaced.put(model, "compute_loss", self.compute_loss)

    @property
    def results(self) -> tuple[Result, ...]:
        """Empty: `checkmate.torch.last_plan` has the plan of a step of PyTorch, which can be several graphs."""
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
        self._replaced_inside.restore()
        self._replaced.restore()

    def train_step(self, data: Any) -> Any:
        """Run the model's own `train_step`.

        Args:
            data: The batch.
        """
        self._held_bytes = unique_bytes(leaves(data)) + self._logs_bytes
        logs = self._train_step(data)
        self._logs_bytes = unique_bytes(leaves(logs))
        return logs

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's own `compute_loss`.

        Args:
            args: Its arguments.
            kwargs: Its keyword arguments.
        """
        loss = self._compute_loss(*args, **kwargs)
        self._held_bytes += unique_bytes(leaves(loss))
        return loss

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output.

        Args:
            args: Arguments of the model's ``call``.
            kwargs: Keyword arguments of the model's ``call``.
        """
        if not torch.is_grad_enabled():
            return self._call(*args, **kwargs)
        if self._compiled is None or self._optimizer is not self._model.optimizer:  # `model.compile` was called again
            self._compiled = self._compile()
        with _names_unchanged():
            outputs = self._compiled(*args, **kwargs)
        tensors = leaves(outputs)
        logits = [getattr(t, "_keras_logits", None) for t in tensors]  # which Keras attaches to the output of a softmax
        self._held_bytes += unique_bytes(leaves([tensors, logits]))
        return outputs

    def _compile(self) -> Any:
        self._replaced_inside.restore()
        self._optimizer = self._model.optimizer
        make_traceable(self._model, self._replaced_inside)
        GroupedUpdate(self._optimizer, self._replaced_inside)
        CheckedUpdate(self._model, lambda: self._held_bytes, self._replaced_inside)
        return torch.compile(self._call, backend="checkmate", options=dict(self._options))


@contextlib.contextmanager
def _names_unchanged() -> Generator[None]:
    """Keep Keras's counters of names, which Dynamo guards: an op that a layer makes in each call (`ZeroPadding2D`) counts one on.

    Each step was compiled and planned again, until Dynamo reached its limit of 8 compilations and ran steps without a plan.
    """
    names = get_global_attribute("object_name_uids")
    before = None if names is None else dict(names)
    try:
        yield
    finally:
        if names is not None and before is not None:
            names.clear()
            names.update(before)
