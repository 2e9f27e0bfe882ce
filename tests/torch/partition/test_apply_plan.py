"""The plan written into a copy of the joint graph."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_simple

from checkmate import Plan
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch import measure_peak
from checkmate.torch.joint.capture import capture_joint
from checkmate.torch.measure.estimates import estimated_costs
from checkmate.torch.partition.apply_plan import apply_plan
from tests.torch.steps import ROOMY, Forgetful, compiled


def test_the_joint_graph_is_not_changed() -> None:
    """Planning may fail at any time, and must leave what it was given."""
    weight = torch.randn(8, 8, requires_grad=True)
    joint = aot_export_joint_simple(lambda x, w: ((x @ w).sin().sum(),), [torch.randn(4, 8), weight], trace_joint=True)
    before = str(joint.graph)
    capture = capture_joint(joint, 1, estimated_costs)
    apply_plan(capture, Plan.from_order(capture.graph, range(len(capture.graph.ops))))
    assert str(joint.graph) == before


class Attention(nn.Module):
    """A block whose attention kernel PyTorch tags as random, although it drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 4, 24).transpose(1, 2).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


def test_a_recomputation_of_attention_is_in_the_backward_alone() -> None:
    """A random op of the backward was copied to the forward, unread, with all that it reads."""
    model, x = nn.Sequential(*(Attention() for _ in range(3))), torch.randn(8, 32, 32)
    run, planned = compiled(lambda: model(x).square().mean(), budget=ROOMY, solver=Forgetful())
    run().backward()
    interface, result = planned[-1]
    kernels = [o for o in result.plan.order if interface.graph.ops[o].kind.startswith("aten._scaled_dot_product_flash")]
    assert len(kernels) > len({*kernels}), "the plan recomputes attention"
    assert measure_peak(run) <= StepMemory.of(interface.graph, result.plan).forward_peak_bytes
