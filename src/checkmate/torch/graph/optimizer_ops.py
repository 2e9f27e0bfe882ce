"""An optimizer's own step as ops of a graph, one for every parameter, and the memory of its state.

``checkmate::gradient_ready`` marks a gradient in the program that is traced; it has no effect, so that it goes
through AOTAutograd as it is. `apply_optimizer_in_backward` makes ``checkmate::update`` of it, which overwrites the
parameter by the optimizer's own code: the arithmetic, the state and its file format are the optimizer's.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import optim

# The schema of `update` says what it overwrites; that is all a planner needs to know of it.
_library = torch.library.Library("checkmate", "DEF")
_library.define("gradient_ready(Tensor parameter, Tensor gradient, int optimizer, int which) -> Tensor")
_library.define("update(Tensor(a!) parameter, Tensor gradient, int optimizer, int which) -> ()")

GRADIENT_READY = torch.ops.checkmate.gradient_ready.default
UPDATE = torch.ops.checkmate.update.default

_PER_PARAMETER_OPTIMIZERS = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
"""Optimizers that update each parameter by itself, whatever becomes of the others."""

_NOT_COST = ("params", "lr", "initial_lr")


class Updates:
    """The updates of an optimizer, one for each of its parameters.

    Args:
        optimizer: See `unsupported_reason` for which can be taken apart.
    """

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.key = next(_KEYS)
        self._at = [
            (g, i) for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"]) if p.requires_grad
        ]
        step = type(optimizer).step
        # torch wraps every step for profiles and hooks; what is inside still turns gradients off.
        self._step: Callable[[optim.Optimizer], object] = step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]
        _LIVE[self.key] = self

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Parameters that require a gradient, in the order of their updates."""
        return [self.optimizer.param_groups[g]["params"][i] for g, i in self._at]

    def run(self, which: int, gradient: torch.Tensor) -> None:
        """Update one parameter from its gradient."""
        g, i = self._at[which]
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        group, parameters = groups[g], groups[g]["params"]
        parameter = parameters[i]
        parameter.grad = gradient
        optimizer.param_groups, group["params"] = [group], [parameter]
        try:
            self._step(optimizer)
        finally:
            optimizer.param_groups, group["params"] = groups, parameters
            parameter.grad = None

    def clone_for_measurement(self, which: int, parameter: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], None]:
        """The same update of another tensor with a state of its own, to be measured."""
        group = self.optimizer.param_groups[self._at[which][0]]
        shadow = copy.copy(self.optimizer)
        dummy = torch.nn.Parameter(parameter)
        shadow.state = defaultdict(dict)
        shadow.param_groups = [{**group, "params": [dummy]}]

        def update(_: torch.Tensor, gradient: torch.Tensor) -> None:
            dummy.grad = gradient
            self._step(shadow)
            dummy.grad = None

        return update

    def temporary_count(self, which: int) -> int | None:
        """Tensors of a parameter's size that its update makes and drops again; None where that is not known."""
        return temporary_count(self.optimizer, self.optimizer.param_groups[self._at[which][0]])

    def describe(self, which: int) -> str:
        """What the cost of an update depends on besides the shape."""
        group = self.optimizer.param_groups[self._at[which][0]]
        return f"{type(self.optimizer).__name__}{sorted((k, v) for k, v in group.items() if k not in _NOT_COST)}"


_KEYS = itertools.count()
_LIVE: weakref.WeakValueDictionary[int, Updates] = weakref.WeakValueDictionary()


def updates_of(key: int) -> Updates:
    """The updates that a node of a graph refers to."""
    return _LIVE[key]


@torch.library.register_fake("checkmate::gradient_ready", lib=_library)
def _gradient_ready_fake(parameter: torch.Tensor, gradient: torch.Tensor, optimizer: int, which: int) -> torch.Tensor:
    return gradient.new_empty(0)


@torch.library.impl(_library, "update", "CompositeExplicitAutograd")
def _update(parameter: torch.Tensor, gradient: torch.Tensor, optimizer: int, which: int) -> None:
    _LIVE[optimizer].run(which, gradient)


def unsupported_reason(optimizer: optim.Optimizer, model: torch.nn.Module) -> str | None:
    """Why an optimizer's step cannot be taken apart and planned with the rest, or None if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in _PER_PARAMETER_OPTIMIZERS:
        return f"{name} is not known to update each parameter by itself"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} is differentiable"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return f"{name} has hooks on its step, which would run once for every parameter"
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in mine]
    if others:
        return f"{name} does not have {others[0]!r}, whose gradient has to stay"
    return None


def temporary_count(optimizer: optim.Optimizer, group: dict[str, Any]) -> int | None:
    """Tensors of a parameter's size that its update makes on a CUDA device and drops again; None where that is not known."""
    decays = bool(group.get("weight_decay")) and not isinstance(optimizer, optim.AdamW)
    if type(optimizer) is optim.SGD:
        return decays + bool(group["nesterov"]) + bool(group["maximize"])
    if type(optimizer) in (optim.Adam, optim.AdamW):
        return 1 + decays + bool(group["maximize"])
    return None
