"""The plan written into a copy of the joint graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkmate.frontend.step_memory import StepMemory
from checkmate.torch import measure_peak
from checkmate.torch.partition import split as partition
from tests.torch.networks import input_of, mlp
from tests.torch.steps import ROOMY, Forgetful, compiled


def test_the_joint_graph_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning may fail at any time, and must leave what it was given."""
    model, x = mlp(2), input_of("dropout")
    seen: list[tuple[str, str]] = []
    original = partition.apply_plan

    def spy(capture: object, plan: object) -> torch.fx.GraphModule:
        before = str(capture.joint.graph)  # type: ignore[attr-defined]
        module = original(capture, plan)  # type: ignore[arg-type]
        seen.append((before, str(capture.joint.graph)))  # type: ignore[attr-defined]
        return module

    monkeypatch.setattr(partition, "apply_plan", spy)
    run, _ = compiled(lambda: model(x).mean(), budget=ROOMY, solver=Forgetful())
    run()
    assert seen
    assert seen[0][0] == seen[0][1]


class Attention(nn.Module):
    """A block whose attention kernel PyTorch tags as random, although it drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 4, 24).transpose(1, 2).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def test_a_recomputation_of_attention_is_in_the_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random op of the backward was copied to the forward, unread, with all that it reads."""
    halves: list[torch.fx.GraphModule] = []
    original = partition.default_partition

    def spy(*args: Any, **kwargs: Any) -> Any:
        halves[:] = original(*args, **kwargs)
        return tuple(halves)

    monkeypatch.setattr(partition, "default_partition", spy)
    model, x = nn.Sequential(*(Attention() for _ in range(3))), torch.randn(8, 32, 32)
    run, planned = compiled(lambda: model(x).square().mean(), budget=ROOMY, solver=Forgetful())
    run().backward()
    kernels = [sum("scaled_dot_product" in str(n.target) for n in half.graph.nodes) for half in halves]
    assert kernels[1] > 3, "the plan recomputes attention"
    assert kernels[0] == 3
    interface, result = planned[-1]
    assert measure_peak(run) <= StepMemory.of(interface.graph, result.plan).forward_peak_bytes
