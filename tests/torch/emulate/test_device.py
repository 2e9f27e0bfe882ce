"""The graph of a step on a device that is not there."""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch
from torch import nn

import checkmate
from checkmate.cost import load_device
from tests.torch.networks import NETWORKS, Cnn, input_of, mlp


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def test_a_step_on_another_device_has_its_granules_and_no_measure() -> None:
    """Every storage is rounded up to 512 bytes; the matrix library's workspace is resident."""
    model, x = Cnn(), input_of("batch_norm", 16)
    y = torch.ones(())
    graph = checkmate.torch.capture(model, lambda p, y: p.mean() * y, example=(x, y), device="T4")
    assert all(value.size_bytes % 512 == 0 for value in graph.values)
    there = sum(-(-t.untyped_storage().nbytes() // 512) * 512 for t in (*tensors(model), x, y))
    assert graph.resident_bytes == there + load_device("T4").blas_workspace_bytes


def test_random_states_on_a_cuda_device_are_small() -> None:
    """A state is 16 bytes there, in memory of the host, and 5056 on a processor."""
    graph = checkmate.torch.capture(
        mlp(), lambda p, y: p.mean() * y, example=(input_of("dropout"), torch.ones(())), device="H100"
    )
    assert {op.replay_bytes for op in graph.ops} == {0, 16}


@pytest.mark.parametrize("device", ["H100", "RTX 4090", "T4", "CPU"])
def test_what_costs_more_is_told_by_the_profile(device: str) -> None:
    """Costs are those of the roofline: no op takes less than its launch, but views, and a faster device takes less."""
    example = (input_of("dropout"), torch.ones(()))
    graph = checkmate.torch.capture(mlp(), lambda p, y: p.mean() * y, example=example, device=device)
    least = load_device(device).launch_ns
    assert all(op.cost >= least or op.cost in (0, 100) for op in graph.ops)
    slow = checkmate.torch.capture(mlp(), lambda p, y: p.mean() * y, example=example, costs="estimated")
    assert graph.cost <= max(slow.cost, 2 * least * len(graph.ops))


@pytest.mark.parametrize("device", ["T4", "CPU"])
def test_what_was_measured_on_a_device_is_what_ops_cost_there(device: str) -> None:
    """By the op and the types, sizes and strides of its arguments; other ops have the roofline."""
    model, example = nn.Linear(8, 4), (torch.ones(2, 8), torch.ones(()))
    kind = load_device(device).kind
    given = ("[4][1]", "[2, 8][8, 1]", "[8, 4][1, 8]")
    product = f"aten.addmm.default ({','.join(f'torch.float32{layout}@{kind}' for layout in given)}) {{}}"
    profile = msgspec.structs.replace(load_device(device), measured={product: (12345, 678)})
    found = [
        {op.kind: (op.cost, op.workspace_bytes) for op in graph.ops}
        for graph in (
            checkmate.torch.capture(model, lambda p, y: p.mean() * y, example=example, device=d) for d in (device, profile)
        )
    ]
    assert found[0].pop("aten.addmm.default") != found[1].pop("aten.addmm.default") == (12345, 678)
    assert found[0] == found[1]


def test_statistics_of_norms_are_float32_on_the_device() -> None:
    """A processor keeps them in the type of the input."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)).bfloat16(), torch.randn(512, 64, dtype=torch.bfloat16)
    y = torch.ones((), dtype=torch.bfloat16)
    graph = checkmate.torch.capture(model, lambda p, y: p.mean() * y, example=(x, y), device="A100")
    norm = next(op for op in graph.ops if "native_layer_norm." in op.kind)
    assert [graph.values[v].size_bytes for v in norm.outputs] == [512 * 64 * 2, 512 * 4, 512 * 4]


@pytest.mark.parametrize("name", ["tied", *(pytest.param(n, marks=pytest.mark.slow) for n in ("attention", "batch_norm"))])
def test_shapes_alone_give_the_same_graph(name: str) -> None:
    """A model on the meta device has all that is asked for; it stays there, and so does its optimizer."""
    flat = nn.Sequential(NETWORKS[name](), nn.Flatten(0))
    x, y = input_of(name), torch.ones(())
    shapes = copy.deepcopy(flat).to("meta")
    before = {id(t) for t in tensors(shapes)}
    loss, graphs = (lambda p, y: p.mean() * y), []
    for model, example in ((flat, (x, y)), (shapes, (x.to("meta"), y.to("meta"))), (shapes, (x, y))):
        torch._dynamo.reset()
        optimizer = torch.optim.AdamW(model.parameters())
        graphs.append(checkmate.torch.capture(model, loss, example=example, optimizer=optimizer, device="A100"))
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert {graph.digest for graph in graphs} == {graphs[0].digest}
    assert {id(t) for t in tensors(shapes)} == before


def test_a_model_that_cannot_be_traced_is_given_back() -> None:
    """What was lent is taken back also when something fails."""
    with torch.device("meta"):
        model, x = nn.Linear(4, 4), torch.empty(2, 5)
    before = [id(p) for p in model.parameters()]
    with pytest.raises(Exception, match=r"shape|size|\(2, 5\)"):
        checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x), device="A100")
    assert [id(p) for p in model.parameters()] == before
