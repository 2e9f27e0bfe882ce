"""Correct the storage sizes of reduced losses in a traced graph."""

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
    """Give the scalar result of a reduced loss the storage that its CPU kernel allocates: one element per input element.

    The kernels write the elementwise loss into the result and reduce it in place (``aten/src/ATen/native/Loss.cpp``), so that
    the scalar keeps the larger storage alive. Fake tensors do not show this, and the plan would be short by the size of
    the prediction. A test compares every op of torch's own op database; only these do so.

    Args:
        graph: A joint graph; the fake tensors in its metadata are resized in place.
    """
    for loss in _LOSSES:
        for node in graph.find_nodes(op="call_function", target=loss):
            elements = max(concrete(n.meta["val"].numel()) for n in node.all_input_nodes)
            value = node.meta["val"]
            size = elements * value.element_size()
            if concrete(value.untyped_storage().nbytes()) < size:
                value.untyped_storage().resize_(size)
