"""All passes on a joint graph before it is planned.

They widen or narrow the choice of plans. Results are bitwise those of the original graph, unless a layout pass changes
the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from checkmate.torch.graph.copy import copy_graph
from checkmate.torch.passes.activation_checkpoint import honour_checkpoints
from checkmate.torch.passes.convolution_backward import split_convolution_backward
from checkmate.torch.passes.input_sizes import read_sizes_from_inputs
from checkmate.torch.passes.loss_storage import correct_loss_storages


def prepare(
    joint: fx.GraphModule,
    *,
    split_convolutions: bool,
    honours_checkpoints: bool = False,
    no_recompute: frozenset[str] = frozenset(),
    layout_pass: Callable[[fx.Graph], fx.Graph] = lambda graph: graph,
    examine: Callable[[fx.Graph], None] = lambda graph: None,
) -> fx.GraphModule:
    """A copy of a joint module with the passes applied.

    Args:
        joint: The joint module. It is not changed, except for the sizes corrected by `correct_loss_storages`, since its fake
            tensors are shared with the copy.
        split_convolutions: Whether to apply `split_convolution_backward`.
        honours_checkpoints: Whether checkpointed regions are recomputed and never kept; see `honour_checkpoints`.
        no_recompute: Names of ops that must run once.
        layout_pass: Applied first; returns a graph whose tensors have other layouts.
        examine: Applied next; marks ops in their metadata.
    """
    graph = layout_pass(copy_graph(joint.graph))
    examine(graph)
    read_sizes_from_inputs(graph)
    if split_convolutions:
        split_convolution_backward(graph)
    if honours_checkpoints:
        honour_checkpoints(graph, no_recompute)
    correct_loss_storages(graph)
    graph.lint()
    return fx.GraphModule(joint, graph)
