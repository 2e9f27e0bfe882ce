"""Reduced losses hold the storage of what they reduced."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.torch.steps import compiled

LOSSES = {
    "mse_loss": nn.MSELoss(),
    "smooth_l1_loss": nn.SmoothL1Loss(),
    "binary_cross_entropy": nn.BCELoss(),
    "soft_margin_loss": nn.SoftMarginLoss(),
}


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
