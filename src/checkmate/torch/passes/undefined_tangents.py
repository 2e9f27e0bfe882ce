"""Drop the gradients of outputs into which no gradient flows.

AOTAutograd traces a backward for every differentiable output of a graph, and allocates zeros where autograd has no gradient for
one. Autograd itself computes nothing for such an output. This pass gives a joint graph the same behaviour: a node that depends on
tangents only through undefined ones is undefined, and so computes nothing.

A backward is linear in its tangents, and so is each of its nodes in all of its operands that depend on tangents together. Hence
a node is zero if all of these operands are, whatever else it reads. A sum of a zero and a defined gradient is the defined one.
Any other node with both kinds of operand reads zeros that are made for it.
"""

from __future__ import annotations

from collections.abc import Set

import torch
from torch import fx

from checkmate.torch._compat.aot import is_tangent
from checkmate.torch.graph.copy import copy_graph
from checkmate.torch.graph.op_properties import UNDEFINED, op_properties

_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


def without_tangents(joint: fx.GraphModule, undefined: Set[int]) -> fx.GraphModule:
    """A copy of a joint module without what depends on undefined tangents alone.

    Args:
        joint: The joint module; it is not changed.
        undefined: Tangents that are None, by their position among the tangents.

    Returns:
        The copy. Its undefined tangents are marked and have no users; a gradient that is zero is None.
    """
    graph = copy_graph(joint.graph)
    tangents = [n for n in graph.nodes if is_tangent(n)]
    zero = {n for t, n in enumerate(tangents) if t in undefined}
    for node in zero:
        node.meta[UNDEFINED] = True
    depends = set(tangents)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        operands = [n for n in node.all_input_nodes if n in depends]
        if not operands:
            continue
        depends.add(node)
        undefined_operands = [n for n in operands if n in zero]
        if len(undefined_operands) == len(operands) and not op_properties(node).effect:
            zero.add(node)
        elif undefined_operands and (summand := _summand(node, zero)) is not None:
            _copy_layout(node, summand)
            zero.add(node)  # it has no users left, and is erased with the zeros
        elif undefined_operands:
            for operand in undefined_operands:
                node.replace_input_with(operand, _zeros(node, operand))
    output = next(iter(reversed(graph.nodes)))
    output.args = (fx.map_arg(output.args[0], lambda n: None if n in zero else n),)
    for node in reversed(list(graph.nodes)):
        if node in zero and node.op == "call_function" and not node.users:
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(joint, graph)


def _summand(node: fx.Node, zero: Set[fx.Node]) -> fx.Node | None:
    """The defined operand of a sum of a gradient and a zero, where the sum is equal to it; None otherwise."""
    if node.target not in _SUMS or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    first, second = node.args
    other = second if first in zero else first
    if not isinstance(other, fx.Node) or other in zero:
        return None
    mine, its = node.meta["val"], other.meta["val"]
    alike = mine.shape == its.shape and mine.dtype == its.dtype
    return other if alike and (mine.stride() == its.stride() or mine.is_contiguous()) else None


def _copy_layout(node: fx.Node, summand: fx.Node) -> None:
    """Replace a sum by its defined operand, in the layout of the sum: later views depend on it."""
    mine, its = node.meta["val"], summand.meta["val"]
    if mine.stride() == its.stride():
        node.replace_all_uses_with(summand)
        return
    with mine.fake_mode, node.graph.inserting_before(node):
        copy = node.graph.call_function(torch.ops.aten.clone.default, (summand,), {"memory_format": torch.contiguous_format})
        copy.meta = {**node.meta, "val": torch.ops.aten.clone.default(its, memory_format=torch.contiguous_format)}
    assert copy.meta["val"].stride() == mine.stride()
    node.replace_all_uses_with(copy)


def _zeros(before: fx.Node, like: fx.Node) -> fx.Node:
    """A node of zeros with the layout of an undefined operand."""
    value = like.meta["val"]
    extent = (
        1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    )
    with value.fake_mode, before.graph.inserting_before(before):
        flat_args, options = ([extent], 0), {"dtype": value.dtype, "device": value.device}
        flat = before.graph.call_function(torch.ops.aten.full.default, flat_args, options)
        flat.meta = {**like.meta, "val": torch.ops.aten.full.default(*flat_args, **options)}
        view_args = (list(value.shape), list(value.stride()))
        view = before.graph.call_function(torch.ops.aten.as_strided.default, (flat, *view_args))
        view.meta = {**like.meta, "val": torch.ops.aten.as_strided.default(flat.meta["val"], *view_args)}
    return view
