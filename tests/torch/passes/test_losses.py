"""The storages of losses: that of picked tokens is the one of the loss that it replaces, and a reduced one holds all elements."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch.nn.functional import cross_entropy

from checkmate.torch.graph.storages import leaves, storage_key
from checkmate.torch.passes.losses import pick_before_reducing
from tests.torch.steps import compiled

LOSSES = {
    "mse_loss": nn.MSELoss(),
    "smooth_l1_loss": nn.SmoothL1Loss(),
    "binary_cross_entropy": nn.BCELoss(),
    "soft_margin_loss": nn.SoftMarginLoss(),
}


def test_results_and_views_of_a_replaced_loss_share_its_storage() -> None:
    """Aliases are found by storages. A model that returns its loss in an output has two views of it, and none is a value."""
    inputs = [torch.randn(6, 4, requires_grad=True), torch.randint(4, (6,))]
    joint = aot_export_joint_simple(lambda x, y: (cross_entropy(x, y),), inputs, trace_joint=True)
    pick_before_reducing(joint.graph)
    for node in joint.graph.nodes:
        if node.op == "call_function" and "getitem" in node.name:
            made = {storage_key(t) for t in leaves(node.args[0].meta["val"])}
            assert {storage_key(t) for t in leaves(node.meta["val"])} <= made


@pytest.mark.parametrize("name", LOSSES)
def test_a_reduced_loss_counts_the_storage_that_it_has(name: str) -> None:
    """These kernels reduce in place of what they reduce: four bytes of result hold the storage of all elements."""
    x, y = torch.rand(100, 50), torch.rand(100, 50)
    torch._dynamo.reset()
    weight = torch.ones(50, requires_grad=True)
    run, planned = compiled(lambda: LOSSES[name](torch.sigmoid(x * weight), y))
    held = run().detach().untyped_storage().nbytes()
    graph = planned[-1][0].graph
    (loss,) = (op for op in graph.ops if op.kind == f"aten.{name}.default")
    assert graph.values[loss.outputs[0]].size_bytes == held == 100 * 50 * 4
