"""One op with its arguments, as far as rules depend on them: shapes instead of tensors, so that equal calls compare equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch._compat.sharding import Layout
from checkmate.torch.chunking.rules.placements import WHOLE, Placement, Rule, Split
from checkmate.torch.graph.op_properties import op_properties


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op and what it is called with.

    Attributes:
        op: The op.
        args: Its arguments, with a `Layout` for each tensor and tuples for lists.
        kwargs: Its keyword arguments, likewise, as (name, value).
        outputs: What it returns; None for what is no tensor.
    """

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Layout | None, ...]

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the op's schema, or its default.

        Raises:
            KeyError: The op has no such argument.
        """
        given = dict(self.kwargs)
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                return self.args[position] if position < len(self.args) else given.get(name, argument.default_value)
        raise KeyError(name)

    def get(self, name: str) -> Any:
        """An argument by its name, or None if the op has no such argument."""
        return self[name] if any(argument.name == name for argument in self.op._schema.arguments) else None

    @property
    def inputs(self) -> list[tuple[str, Layout]]:
        """The tensors among the arguments, in the order of `torch.utils._pytree`, with the names of the arguments."""
        names = [argument.name for argument in self.op._schema.arguments]
        # Arguments after the named ones do not exist: only operators with keyword arguments have more.
        arguments = [*zip(names, self.args, strict=False), *self.kwargs]
        return [(name, tensor) for name, value in arguments for tensor in _tensors(value)]

    def rule(self, /, *outputs: Placement | int, **inputs: Placement | int | None) -> Rule:
        """A rule for this call; a number means that this dimension is cut.

        Args:
            outputs: Placement of each output.
            inputs: Placement of tensors by the name of the argument; the others are read whole.
        """
        returned: tuple[Placement | None, ...] = tuple(
            None if out is None else _placement(p) for out, p in zip(self.outputs, outputs, strict=True)
        )
        return Rule(returned, tuple(_placement(inputs.get(name, WHOLE)) for name, _ in self.inputs))


def op_call(node: fx.Node) -> OpCall | None:
    """The call of a node, or None where the op cannot be run piece by piece whatever its arguments are.

    That is so for ops that draw random numbers or have a side effect, for higher-order ops, for tensors that are not strided, and
    where a size is symbolic: it may be another in the next step, or depend on data.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    properties = op_properties(node)
    if properties.random or properties.effect or properties.pinned:
        return None
    returned = node.meta.get("val")
    returned = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), _traced)
        outputs = tuple(_freeze(value) if isinstance(value, torch.Tensor) else None for value in returned)
        return OpCall(node.target, _freeze(tuple(args)), tuple((k, _freeze(v)) for k, v in kwargs.items()), outputs)
    except _UnsupportedError:
        return None


class _UnsupportedError(Exception):
    """A value of which no rule speaks."""


def _traced(node: fx.Node) -> Any:
    return node.meta.get("val")


def _freeze(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        numbers = (*value.shape, *value.stride()) if value.layout is torch.strided else ()
        if value.layout is not torch.strided or not all(type(n) is int for n in numbers):
            raise _UnsupportedError
        return Layout.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_freeze, value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, fx.Node, slice, dict)):
        raise _UnsupportedError
    return value


def thaw(value: Any) -> Any:
    """A value of `OpCall` as PyTorch's schemas have it: lists again."""
    return [thaw(each) for each in value] if isinstance(value, tuple) else value


def _tensors(value: Any) -> list[Layout]:
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, Layout) else []


def _placement(given: Placement | int | None) -> Placement:
    if given is None:
        return WHOLE
    return Split((given,)) if isinstance(given, int) else given
