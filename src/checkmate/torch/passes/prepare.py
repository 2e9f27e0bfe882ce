"""Rewrites of a joint graph before it is planned: they change the choice of plans, and no bit, if layouts stay."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from checkmate.torch.graph.copy import copy_graph
from checkmate.torch.passes.activation_checkpoint import honour_checkpoints
from checkmate.torch.passes.convolution_backward import split_convolution_backward
from checkmate.torch.passes.loss_storage import correct_loss_storages


def prepare(
    joint: fx.GraphModule,
    *,
    split_convolutions: bool,
    honours_checkpoints: bool = False,
    no_recompute: frozenset[str] = frozenset(),
    layout_pass: Callable[[fx.Graph], fx.Graph] = lambda graph: graph,
) -> fx.GraphModule:
    """A copy of a joint module with the rewrites applied; the original stays as it is, but for `correct_loss_storages`.

    Args:
        joint: The joint module.
        split_convolutions: See `split_convolution_backward`.
        honours_checkpoints: Whether checkpointed regions are recomputed and never kept; see `honour_checkpoints`.
        no_recompute: Names of ops that run once.
        layout_pass: Gives tensors other layouts.
    """
    graph = layout_pass(copy_graph(joint.graph))
    if split_convolutions:
        split_convolution_backward(graph)
    if honours_checkpoints:
        honour_checkpoints(graph, no_recompute)
    correct_loss_storages(graph)
    graph.lint()
    return fx.GraphModule(joint, graph)
