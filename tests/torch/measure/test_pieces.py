"""Estimates of ops that run piece by piece, against measurements and against the ops that run whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from checkmate.cost.device import load_device
from checkmate.torch.chunking.choose import ChunkableStep, cuttable
from checkmate.torch.chunking.program import CHUNKED
from checkmate.torch.chunking.region_groups import RegionGroup, region_groups
from checkmate.torch.chunking.replace import with_regions
from checkmate.torch.emulate.device import EmulatedDevice, fake_inputs
from checkmate.torch.graph.op_properties import makes_views
from checkmate.torch.joint.capture import Capture
from checkmate.torch.measure.estimates import estimate_ns, estimated_costs, pieces_workspace_bytes
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.options import Options
from checkmate.torch.step.recipe import StepRecipe
from checkmate.torch.step.tracing import trace_step
from tests.torch.chunking.test_chunked_steps import TOKENS, VOCABULARY, WIDTH, Language, batch


class Head(torch.nn.Module):
    """Embedding and head: the logits are by far the largest tensor."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.head = torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.head(self.embedding(tokens).tanh()).flatten(0, 1), labels.flatten())


def traced(
    model: torch.nn.Module, target: EmulatedDevice | None = None, loss: Any = None, example: Any = None, updates: bool = False
) -> ChunkableStep[Capture]:
    with fake_inputs(example or batch(), model) as given:
        optimizer = torch.optim.SGD(model.parameters(), 0.1) if updates else None
        recipe = StepRecipe(model=model, loss=loss, example=given, optimizer=optimizer)
        return trace_step(recipe.spec(), given, Options(costs="measured" if target is None else "estimated"), target)


def kinds_and_ops(step: ChunkableStep[Capture]) -> list[tuple[RegionGroup, list[fx.Node]]]:
    """Each kind of regions, with the nodes that run it."""
    (whole,) = step.joints
    joint = cuttable(whole)
    found = [(kind, with_regions(joint, kind.chunk_ops)) for kind in region_groups(joint.graph)]
    return [(kind, [node for node in module.graph.nodes if node.target is CHUNKED]) for kind, module in found]


@pytest.mark.parametrize("updates", [False, True])
def test_the_modelled_workspace_of_pieces_is_the_measured_one(updates: bool) -> None:
    """Temporary tensors, buffers that pieces share, and sums: to the byte, where no op has workspace. Estimates add that."""
    ops = [op for _, ops in kinds_and_ops(traced(Language(), updates=updates)) for op in ops]
    assert len(ops) >= (1 if updates else 3)
    for op, measured, estimated in zip(ops, Profiler()(ops), estimated_costs(ops), strict=True):
        assert 0 < measured.workspace_bytes == pieces_workspace_bytes(op) <= estimated.workspace_bytes


def test_the_workspace_of_a_convolution_in_pieces_is_estimated() -> None:
    """Its kernel copies what it is given: an op of a piece has workspace as a whole one has."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 5), torch.nn.BatchNorm2d(32), torch.nn.Hardtanh(0, 20), torch.nn.Flatten())
    example = torch.randn(8, 3, 40, 40), torch.zeros(8, 32 * 36 * 36)
    step = traced(model, loss=torch.nn.functional.mse_loss, example=example)
    ops = [op for _, ops in kinds_and_ops(step) for op in ops]
    assert ops
    for measured, estimated in zip(Profiler()(ops), estimated_costs(ops), strict=True):
        assert measured.workspace_bytes <= estimated.workspace_bytes


def test_sums_in_half_precision_take_memory_in_float32() -> None:
    """The gradient of the head is added up in float32 and cast at the end, when both exist; a term of it is in half precision."""
    h100 = EmulatedDevice(load_device("H100"), cpu_costs=Profiler())
    with torch.device("meta"):
        model = Language().to(torch.bfloat16)
    (kind, (op,)), *fewer = kinds_and_ops(traced(model, h100, updates=True))
    assert all(other.is_fewer_pieces_of(kind) for other, _ in fewer)
    assert kind.description.startswith("head + loss, ")
    gradient = 2 * VOCABULARY * WIDTH
    count = kind.regions[0].count
    logits = 4 * TOKENS // count * VOCABULARY
    (cost,) = h100.costs([op])
    assert 2 * gradient <= cost.workspace_bytes <= 2 * gradient + 3 * logits


def test_pieces_take_no_less_time_than_the_whole_ops() -> None:
    """Each piece has its launches, and reads the weights again; what is cut is read once, and no product is free."""
    device = load_device("H100")
    with torch.device("meta"):
        model = Head(65536, 512)
        tokens = torch.zeros(2, 2048, dtype=torch.long)
    example = {"tokens": tokens, "labels": tokens}
    found = kinds_and_ops(traced(model, EmulatedDevice(device, cpu_costs=Profiler()), example=example, updates=True))
    (region,) = found[0][0].regions
    whole = sum(estimate_ns(node, device) for node in region.rules if not makes_views(node))
    most, *fewer = [estimate_ns(op, device) for _, (op,) in found]
    assert whole < min(fewer) < most < 1.3 * whole
