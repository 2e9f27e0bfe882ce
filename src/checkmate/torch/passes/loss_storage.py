"""Correct the storages of reduced losses in a traced graph."""

from __future__ import annotations

import torch
from torch import fx

from checkmate.torch.graph.storages import concrete

_LOSSES = (
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.mse_loss.default,
    torch.ops.aten.smooth_l1_loss.default,
    torch.ops.aten.soft_margin_loss.default,
)


def correct_loss_storages(graph: fx.Graph) -> None:
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
