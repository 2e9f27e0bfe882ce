"""The optimizer's state and learning rates as inputs of a compiled whole step."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkmate.core.errors import OptionError
from checkmate.torch.graph.optimizer_ops import updates_of


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The state of one parameter."""

    key: int  # key of its `Updates`
    which: int
    names: tuple[str, ...]
    like: tuple[tuple[Any, ...], ...]  # shape, strides, type and device of each

    @staticmethod
    def of(key: int, which: int, like: Mapping[str, torch.Tensor]) -> ParameterState:
        """The state of a parameter, for tensors like the given ones."""
        return ParameterState(key, which, tuple(like), tuple(signature(t) for t in like.values()))

    def tensors(self, known: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """The state as it is now; it is created if there is none yet."""
        state = updates_of(self.key).state(self.which)
        tensors = [state.get(name) for name in self.names]
        if len(known) == len(tensors) and all(a is b for a, b in zip(tensors, known, strict=True)):
            return list(known)
        for name, tensor, like in zip(self.names, tensors, self.like, strict=True):
            if tensor is None or signature(tensor) != like:
                found = "missing" if tensor is None else f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
                raise OptionError(
                    f"the optimizer's state {name!r} is {found}; the step was compiled for {list(like[0])} {like[2]} on "
                    f"{like[3]}",
                    hint="compile the step again after loading a state of another type or layout, or on another device",
                )
        return tensors  # type: ignore[return-value]

    def zeros(self) -> list[torch.Tensor]:
        """New tensors like the state."""
        return [torch.empty_strided(s, d, dtype=t, device=v).zero_() for s, d, t, v in self.like]


class StepState:
    """Tensors that a compiled whole step reads and writes besides the inputs of its graph."""

    def __init__(self, learning_rates: tuple[tuple[int, int], ...], parameters: tuple[ParameterState, ...]) -> None:
        self._parameters = parameters
        self._groups = learning_rates
        self._options = [self._constant(at) for at in learning_rates]
        self._known: list[list[torch.Tensor]] = [[] for _ in parameters]

    @functools.cached_property
    def _rates(self) -> list[torch.Tensor]:
        return [torch.zeros((), dtype=torch.float64) for _ in self._groups]

    def tensors(self) -> list[torch.Tensor]:
        """The inputs for a step, after those of its graph."""
        for at, rate, compiled in zip(self._groups, self._rates, self._options, strict=True):
            now = self._constant(at)
            if now != compiled:
                name = next(n for n in compiled if now.get(n) != compiled[n])
                raise OptionError(
                    f"{name}={compiled[name]!r} of the optimizer is a constant of the compiled step; it is now {now.get(name)!r}",
                    hint="compile the step again after the change, or with compiler='eager'; the learning rate can change freely",
                )
            key, group = at
            rate.fill_(float(updates_of(key).optimizer.param_groups[group]["lr"]))
        self._known = [each.tensors(known) for each, known in zip(self._parameters, self._known, strict=True)]
        return [*self._rates, *(t for known in self._known for t in known)]

    def zeros(self) -> list[torch.Tensor]:
        """New tensors like the inputs; the optimizer is left alone."""
        return [*(torch.zeros_like(r) for r in self._rates), *(t for each in self._parameters for t in each.zeros())]

    def _constant(self, at: tuple[int, int]) -> dict[str, Any]:
        key, group = at
        return updates_of(key).constant_options(group)


def signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, strides, type and device of a tensor."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device
