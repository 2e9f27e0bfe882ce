"""The optimizer's update of a step of `fit` on PyTorch, which no graph has: with little memory, and checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from checkmate.core.units import format_at_least, format_bytes
from checkmate.keras.replaced import Replaced
from checkmate.torch._compat.profiler import profiler_running
from checkmate.torch.graph.storages import leaves, unique_bytes
from checkmate.torch.measure.peak import measure_peak
from checkmate.torch.steps.coordinator import coordinator

_log = logging.getLogger("checkmate.keras")

_CHECKED_UPDATES = 4
"""As many as the steps of TensorFlow that are monitored."""

_ELEMENTWISE = ("sgd", "adam", "adamw", "adamax", "adagrad", "adadelta", "rmsprop", "lion")
"""Modules of Keras's updates of lists of variables, in which no variable depends on another.

`Nadam` is not one of them: each call of its update multiplies a product of the momentum's schedule into a variable.
"""


class GroupedUpdate:
    """Stands in for an optimizer's update of all variables at once, which holds copies of all of them: three for Adam.

    It updates a few variables at a time, as many as are together no larger than the largest one. Each element is computed as
    before, so that all bits are the same. Without it the update of a small network took more than its forward and backward.

    Args:
        optimizer: The optimizer.
        replaced: Takes note of what is replaced.
    """

    def __init__(self, optimizer: keras.Optimizer, replaced: Replaced) -> None:
        inner: Any = getattr(optimizer, "inner_optimizer", optimizer)
        self._update: Callable[..., None] | None = getattr(inner, "_parallel_update_step", None)
        package, _, module = getattr(self._update, "__module__", "").rpartition(".torch_")
        if package == "keras.src.backend.torch.optimizers" and module in _ELEMENTWISE:
            replaced.put(inner, "_parallel_update_step", self)

    def __call__(self, grads: Sequence[torch.Tensor], variables: Sequence[keras.Variable], learning_rate: Any) -> None:
        """Update variables.

        Args:
            grads: The gradient of each variable.
            variables: The variables.
            learning_rate: The learning rate.
        """
        assert self._update is not None
        for group in groups([variable.value.nbytes for variable in variables]):
            self._update([grads[i] for i in group], [variables[i] for i in group], learning_rate)


def groups(sizes: Sequence[int]) -> list[list[int]]:
    """Cut a list into runs, each no larger than the largest element.

    Examples:
        >>> groups([1, 2, 8, 4, 4, 1])
        [[0, 1], [2], [3, 4], [5]]
    """
    most, found, room = max(sizes, default=0), list[list[int]](), -1
    for i, size in enumerate(sizes):
        if size > room:
            found.append([])
            room = most
        found[-1].append(i)
        room -= size
    return found


class CheckedUpdate:
    """Stands in for `apply` of an optimizer: the memory of the first updates is compared with the budget.

    A plan covers forward and backward. When the optimizer begins, variables, gradients and batch are held, and its own tensors
    come on top: those of clipping, of unscaling, and of the update.

    Args:
        model: The compiled model.
        held_bytes: Bytes of the batch, and of what the model returned.
        replaced: Takes note of what is replaced.
    """

    def __init__(self, model: Any, held_bytes: Callable[[], int], replaced: Replaced) -> None:
        self._model, self._held_bytes = model, held_bytes
        self._apply = model.optimizer.apply
        self._updates = self._most = 0
        replaced.put(model.optimizer, "apply", self)

    def __call__(self, grads: Sequence[Any], trainable_variables: Sequence[keras.Variable] | None = None) -> None:
        """Apply gradients.

        Args:
            grads: The gradient of each variable.
            trainable_variables: The variables; those of the model by default.
        """
        self._updates += 1
        plan = coordinator().result
        # In the first step a share of the budget refers to a graph, not to the step.
        if 1 < self._updates <= 1 + _CHECKED_UPDATES and plan is not None and not profiler_running():
            variables = (*self._model.variables, *self._model.optimizer.variables, *self._model.metrics_variables)
            held = self._held_bytes() + unique_bytes(leaves([*grads, *(variable.value for variable in variables)]))
            self._most = max(self._most, held + measure_peak(lambda: self._apply(grads, trainable_variables)))
        else:
            self._apply(grads, trainable_variables)
        # Once, for the largest of them: they differ by a few scalars.
        if self._updates == 1 + _CHECKED_UPDATES and plan is not None and self._most > plan.budget_bytes:
            _log.warning(
                "the update by %s needs %s, and the budget is %s: no plan changes what an optimizer allocates; raise the budget "
                "to at least %s, or use an optimizer that needs less, such as SGD",
                type(self._model.optimizer).__name__,
                format_bytes(self._most),
                format_bytes(plan.budget_bytes),
                format_at_least(self._most),
            )
