"""Rewrites before planning widen the choice and change no bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from checkmate import Graph
from tests.torch.networks import Cnn, input_of
from tests.torch.steps import ROOMY, Forgetful, compiled, observe


def _graph(model: nn.Module, x: torch.Tensor) -> Graph:
    run, planned = compiled(lambda: model(x).square().mean())
    run().backward()
    return planned[-1][0].graph


def test_a_split_convolution_has_the_same_gradients() -> None:
    """Both halves are the same kernel under another output mask."""
    model, x = Cnn(), input_of("batch_norm")

    def loss() -> torch.Tensor:
        return model(x).square().mean()

    eager = observe(model, loss)
    run, _ = compiled(loss, budget=ROOMY, solver=Forgetful())
    assert eager.differs(observe(model, run)) == []


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_both_gradients_of_a_convolution_come_from_one_call(compiler: str) -> None:
    """Where a plan computes them in a row: a call takes microseconds, and the peak is that of the two."""
    model, x = Cnn(), input_of("batch_norm")
    run, planned = compiled(lambda: model(x).square().mean(), budget="100%", compiler=compiler)
    for _ in range(3):
        loss = run()
        with torch.profiler.profile() as profile:
            loss.backward()
    calls = sum(event.count for event in profile.key_averages() if event.key == "aten::convolution_backward")
    assert calls == sum(isinstance(layer, nn.Conv2d) for layer in model.modules())
    assert sum(op.kind == "aten.convolution_backward.default" for op in planned[-1][0].graph.ops) > calls


def test_only_what_has_two_gradients_is_split() -> None:
    """The first convolution's input needs none."""
    model, x = Cnn(), input_of("batch_norm")
    assert sum(op.kind == "aten.convolution_backward.default" for op in _graph(model, x).ops) == 7


def test_gradients_of_weights_can_wait() -> None:
    """The gradient of a large weight need not be there while the rest of the backward runs."""
    model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(4)), nn.Flatten())
    x = torch.randn(1, 64, 4, 4, requires_grad=True)
    graph = _graph(model, x)
    weights = [o for o, op in enumerate(graph.ops) if any(graph.values[v].size_bytes == 64 * 64 * 9 * 4 for v in op.outputs)]
    assert len(weights) == 4
    assert all(len(graph.ops[o].outputs) == 2 for o in weights)
    readers = {r for o in weights for v in graph.ops[o].outputs for r in graph.readers[v]}
    assert not readers


class _Masks(nn.Module):
    """Two layers with the same mask each, which the step may change between them."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.register_buffer("limit", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            mask = self.limit.exp().cos()
            if self.between == "dropout":
                mask = nn.functional.dropout(mask, 0.5)
            x = layer(x).sin() * mask
            if self.between == "overwrite":
                self.limit.add_(1)
        return x


@pytest.mark.parametrize(("between", "masks"), [("", 1), ("dropout", 1), ("overwrite", 2)])
def test_equal_ops_of_the_forward_run_once(between: str, masks: int) -> None:
    """Not those whose inputs differ, and not random ones: two layers have two masks of dropout."""
    torch.manual_seed(0)
    model, x = _Masks(between), torch.randn(4, 16)

    def loss() -> torch.Tensor:
        return model(x).square().mean()

    eager = observe(model, loss)
    run, planned = compiled(loss, budget=ROOMY)
    assert eager.differs(observe(model, run)) == []
    kinds = [op.kind for op in planned[-1][0].graph.ops]
    assert kinds.count("aten.exp.default") == masks
    assert kinds.count("aten.native_dropout.default") == 2 * (between == "dropout")
