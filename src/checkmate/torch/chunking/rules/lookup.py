"""All ways to run one op piece by piece.

A rule says nothing about strides: a slice may not have the view that the whole tensor has. The code that writes
pieces must therefore trace them first, and leave the op whole if that raises.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import fx

from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch.chunking.rules.candidates import OpCall, candidates
from checkmate.torch.chunking.rules.placements import SUM, Layout, Rule, Split
from checkmate.torch.graph.op_properties import op_properties

aten = torch.ops.aten


def rules_of(node: fx.Node) -> tuple[Rule, ...]:
    """All known ways to run the op of a node piece by piece; none if there is no way.

    All tensors that a rule cuts have the same number of elements along the axis, more than one. There is no rule for ops that
    draw random numbers or have a side effect, for higher-order ops, for tensors that are not strided, and for symbolic sizes: a
    symbolic size may change in the next step, or depend on data.
    """
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return ()
    properties = op_properties(node)
    if properties.random or properties.effect or properties.pinned:
        return ()
    returned = node.meta.get("val")
    returned = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    try:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        outputs = tuple(_frozen(value) if isinstance(value, torch.Tensor) else None for value in returned)
        call = OpCall(node.target, _frozen(tuple(args)), tuple((k, _frozen(v)) for k, v in kwargs.items()), outputs)
    except _UnsupportedError:
        return ()
    return _rules(call)


class _UnsupportedError(Exception):
    """A value that no rule covers."""


def _frozen(value: Any) -> Any:
    """An argument with layouts for tensors and tuples for lists: equal calls compare equal. An error if no rule covers it."""
    if isinstance(value, torch.Tensor):
        numbers = (*value.shape, *value.stride()) if value.layout is torch.strided else ()
        if value.layout is not torch.strided or not all(type(n) is int for n in numbers):
            raise _UnsupportedError
        return Layout.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, fx.Node, slice, dict)):
        raise _UnsupportedError
    return value


@functools.lru_cache(maxsize=1 << 14)  # layers repeat: a graph of some 1,300 ops has some 150 distinct calls
def _rules(call: OpCall) -> tuple[Rule, ...]:
    if all(out is None for out in call.outputs):
        return ()
    if call["dropout_p"]:  # a backward that draws the mask from a seed would draw another position's mask
        return ()
    single = [rule for rule in dict.fromkeys(candidates(call)) if _holds_for(rule, call)]
    both = (_both(first, second) for first in single for second in single)
    found = dict.fromkeys([*single, *(rule for rule in both if rule is not None and _holds_for(rule, call))])
    return tuple(rule for rule in found if call.op not in _READS_STORAGE or _contiguous(rule, call))


def _holds_for(rule: Rule, call: OpCall) -> bool:
    """Whether a rule covers the tensors of a call, and all its cuts have the same length, of more than one element."""
    tensors = (*call.outputs, *(tensor for _, tensor in call.inputs))
    placements = (*rule.outputs, *rule.inputs)
    if len(rule.outputs) != len(call.outputs) or len(placements) != len(tensors):
        return False
    lengths: set[int] = set()
    for tensor, placement in zip(tensors, placements, strict=True):
        if (tensor is None) != (placement is None):
            return False
        if isinstance(placement, Split):
            assert tensor is not None
            if math.prod(tensor.shape) == 0 or any(not 0 <= d < len(tensor.shape) or tensor.shape[d] < 2 for d in placement.dims):
                return False
            lengths.add(placement.length(tensor.shape))
        elif placement == SUM and tensor is not None and tensor.dtype is torch.bool:
            return False
    return len(lengths) == 1


def _contiguous(rule: Rule, call: OpCall) -> bool:
    """Whether slices of contiguous inputs are contiguous themselves."""
    pairs = zip((tensor for _, tensor in call.inputs), rule.inputs, strict=True)
    return all(math.prod(tensor.shape[: p.dims[0]]) == 1 for tensor, p in pairs if isinstance(p, Split))


def _both(first: Rule, second: Rule) -> Rule | None:
    """The rule of a cut along two neighbouring dimensions, from the rule of each, if these agree operand by operand."""
    joined: list[Any] = []
    for one, other in zip((*first.outputs, *first.inputs), (*second.outputs, *second.inputs), strict=True):
        if isinstance(one, Split) and isinstance(other, Split):
            if not (len(one.dims) == len(other.dims) == 1 and other.dims[0] == one.dims[0] + 1):
                return None
            joined.append(Split((*one.dims, *other.dims)))
        elif one != other:
            return None
        else:
            joined.append(one)
    return Rule(tuple(joined[: len(first.outputs)]), tuple(joined[len(first.outputs) :]))


_READS_STORAGE = (
    aten.native_layer_norm_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten._scaled_dot_product_flash_attention_backward.default,  # sums of exponentials
)
"""Ops whose kernel reads an input as if it were contiguous (torch 2.13.0): a strided slice gives wrong numbers."""
