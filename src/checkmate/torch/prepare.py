"""Rewrites of a joint graph before it is planned: they change the choice of plans, and no bit, if layouts stay."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from checkmate.torch.checkpoints import respect_checkpoints
from checkmate.torch.sizes import concrete

_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_LOSSES = (
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.soft_margin_loss.default,
)
_MASK = 10  # position of `output_mask`: whether the gradients of input, weight and bias are wanted


def prepare(
    joint: fx.GraphModule,
    *,
    split_convolutions: bool,
    respect: bool = False,
    no_recompute: frozenset[str] = frozenset(),
    lay_out: Callable[[fx.Graph], fx.Graph] = lambda graph: graph,
) -> fx.GraphModule:
    """A copy of a joint module with the rewrites applied; the original stays as it is, but for `_true_storages`.

    Args:
        joint: The joint module.
        split_convolutions: See `_split_convolutions`.
        respect: Whether checkpointed regions are walls; see `respect_checkpoints`.
        no_recompute: Names of ops that run once.
        lay_out: Gives tensors other layouts.
    """
    graph = lay_out(copied(joint.graph))
    if split_convolutions:
        _split_convolutions(graph)
    if respect:
        respect_checkpoints(graph, no_recompute)
    _true_storages(graph)
    graph.lint()
    return fx.GraphModule(joint, graph)


def copied(graph: fx.Graph) -> fx.Graph:
    """A graph with nodes of its own, metadata shared item by item."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
    return copy


def _true_storages(graph: fx.Graph) -> None:
    """Give reduced losses the storage that they have: that of every element, of which the scalar is the first.

    Their kernels write the loss of each element where the result goes and then reduce it there, and a traced
    tensor does not know. Nothing else in the op database of torch does so.
    """
    for loss in _LOSSES:
        for node in graph.find_nodes(op="call_function", target=loss):
            elements = max(concrete(n.meta["val"].numel()) for n in node.all_input_nodes)
            value = node.meta["val"]
            size = elements * value.element_size()
            if concrete(value.untyped_storage().nbytes()) < size:
                value.untyped_storage().resize_(size)


def _split_convolutions(graph: fx.Graph) -> None:
    """Make two ops of every convolution's backward: one for the input's gradient, one for the weight's.

    In one op the weight's gradient is born with the input's and stays to the end of the step. By itself
    it can wait, while only the usually smaller activations that it is made of are held.
    """
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION_BACKWARD, sort=True):
        mask = node.args[_MASK]
        if not (mask[0] and mask[1]) or any(user.target is not operator.getitem for user in node.users):
            continue
        weights = [user for user in node.users if user.args[1] != 0]
        value = node.meta["val"]
        with graph.inserting_after(node):
            second = graph.call_function(node.target, (*node.args[:_MASK], [False, mask[1], mask[2]]), dict(node.kwargs))
        second.meta = {**node.meta, "val": (None, *value[1:])}
        node.args = (*node.args[:_MASK], [True, False, False])
        node.meta = {**node.meta, "val": (value[0], None, None)}
        after = second
        for user in weights:
            user.args = (second, user.args[1])
            after.append(user)
            after = user
