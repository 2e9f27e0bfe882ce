"""Message passing in pieces of edges: which regions there are, their numbers, and the memory of whole steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
import checkmate.torch
from checkmate import InfeasibleBudgetError, Limits
from checkmate.core.budget import keep_all_bytes
from checkmate.torch import measure_peak
from checkmate.torch.chunking.bits import keeps_bits
from checkmate.torch.chunking.program import chunk_ops_of
from checkmate.torch.chunking.region_groups import RegionGroup, region_groups
from checkmate.torch.chunking.rules.placements import Split
from checkmate.torch.graph.traced import tensor
from tests.torch.chunking.random_regions import outcome_of, region_at, step_of

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("nothing_else")

NODES, EDGES, WIDTH = 64, 8192, 16
Add = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
ADD: dict[str, Add] = {
    "index_add_": lambda to, ends, m: to.index_add_(0, ends, m),
    "index_add": lambda to, ends, m: to.index_add(0, ends, m),
    "scatter_add_": lambda to, ends, m: to.scatter_add_(0, ends.unsqueeze(1).expand_as(m), m),
    "scatter_reduce": lambda to, ends, m: to.scatter_reduce(0, ends.unsqueeze(1).expand_as(m), m, "sum"),
    "index_put": lambda to, ends, m: to.index_put((ends,), m, accumulate=True),
}


class Messages(nn.Module):
    """Layers whose messages depend on both ends of an edge and on a number of its own."""

    def __init__(self, layers: int = 2, add: Add = ADD["index_add_"]) -> None:
        super().__init__()
        torch.manual_seed(0)
        ends = 2 * WIDTH + 1
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(ends, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(layers))
        self.head, self.add = nn.Linear(WIDTH, 1), add

    def forward(self, h: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            added = self.add(torch.zeros_like(h), dst, layer(torch.cat([h[src], h[dst], e], 1)))
            h = h + added * (len(h) / len(src))
        return self.head(h).square().mean()


def batch(edges: int = EDGES, width: int = 1) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(1)
    src, dst = torch.randint(NODES, (2, edges), generator=made)
    return torch.randn(NODES, WIDTH, generator=made), src, dst, torch.rand(edges, width, generator=made)


def around(groups: list[RegionGroup], edges: int = EDGES) -> int:
    """The most numbers of an edge that are whole before or after an op that runs in pieces."""
    placed = [item for group in groups for op in group.chunk_ops for item in (*op.stage.operands, *op.stage.results.items())]
    cut = [tensor(value) for value, placement in placed if isinstance(placement, Split)]
    return max((value.numel() // edges for value in cut if value.is_floating_point()), default=0)


@pytest.mark.parametrize("add", ADD)
def test_no_message_is_whole(add: str) -> None:
    """A layer and its gradient are a region, from the nodes that are gathered to the nodes that are added to."""
    model = Messages(add=ADD[add])
    step = step_of(lambda *given: model(*given), *batch())
    groups = region_groups(step.joint.graph)
    first = [group for group in groups if group.most_pieces]
    assert sum(len(group.regions) for group in first) == 2
    assert around(groups) == 1
    regions = [region for group in first for region in group.regions]
    assert outcome_of(step, regions, 0).wrong == ()


class Interaction(nn.Module):
    """Edges have a state of their own, which each layer updates from the ends, and nodes are updated from edges."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(3 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
            for _ in range(layers)
        )

    def forward(self, h: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        e = self.embed(e)
        for layer in self.layers:
            new = layer(torch.cat([e, h[src], h[dst]], 1))
            e, h = e + new, (h + torch.zeros_like(h).index_add_(0, dst, new)).tanh()
        return h.square().mean()


def test_only_the_state_of_edges_is_whole_between_layers() -> None:
    """Else the backward of each layer would compute all layers before it again."""
    model = Interaction()
    step = step_of(lambda *given: model(*given), *batch(width=4))
    groups = region_groups(step.joint.graph)
    assert sum(len(group.regions) for group in groups if group.most_pieces) == 3
    assert around(groups) == WIDTH
    assert outcome_of(step, [region for group in groups if group.most_pieces for region in group.regions], 0).wrong == ()


class Filters(nn.Module):
    """Messages are products of nodes and filters, and the filters of all layers are computed from one array of distances."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.filters = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 32)) for _ in range(layers))
        self.into, self.out = nn.Linear(3, 32), nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))

    def forward(self, at: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
        h = self.into(at)
        distances = torch.exp(-((at[src] - at[dst]).square().sum(1, keepdim=True) - torch.linspace(0, 4, 8)).square())
        for filters, out in zip(self.filters, self.out, strict=True):
            h = h + out(torch.zeros_like(h).index_add(0, dst, h[src] * filters(distances))) * (len(h) / len(src))
        return h.square().mean()


def places(edges: int = 2 * EDGES) -> tuple[torch.Tensor, ...]:
    h, src, dst, _ = batch(edges)
    return h[:, :3].contiguous(), src, dst


def test_the_last_layer_has_as_many_pieces_as_the_others() -> None:
    """Once the other layers are taken, it is also found as a region of small tensors around a large one, in fewer pieces."""
    model = Filters()
    groups = region_groups(step_of(lambda *given: model(*given), *places()).joint.graph)
    counts = [region.count for group in groups if group.most_pieces for region in group.regions]
    assert len(counts) == 3 and len(set(counts)) == 1


def test_layers_that_cannot_be_told_apart_are_one_region() -> None:
    """Gradients of one array of distances connect the gradients of the filters of all layers."""
    model, example = Filters(), places(8192)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def plainly(at: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, net: nn.Module = model) -> torch.Tensor:
        at = at.detach().requires_grad_()
        energy = net(at, src, dst)
        (forces,) = torch.autograd.grad(energy, at, create_graph=True)
        return energy + (forces + 1).square().mean()

    def step(at: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
        loss = plainly(at, src, dst)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    gradients = torch.autograd.grad(plainly(*example), list(model.parameters()))
    expected = [p - 1e-3 * g for p, g in zip(model.parameters(), gradients, strict=True)]
    loss = plainly(*example).detach()
    whole = checkmate.torch.capture(step, example=example, costs="estimated")
    given: dict[str, Any] = {"budget": keep_all_bytes(whole) // 8, "chunking": "auto", "costs": "estimated"}
    planned = checkmate.torch.compile(step, example=example, **given)
    torch.testing.assert_close(planned(*example), loss)
    for mine, right in zip(model.parameters(), expected, strict=True):
        assert_close(mine, right)
    assert measure_peak(lambda: planned(*example)) <= planned.result.peak_bytes - planned.graph.resident_bytes


@pytest.mark.parametrize("layer", ["GCNConv", "SAGEConv", "GATConv"])
def test_layers_of_pytorch_geometric(layer: str) -> None:
    """Attention over edges, a softmax, has one number for each edge and head that is whole, and no wider array."""
    geometric = pytest.importorskip("torch_geometric.nn")  # tested with 2.8.1
    given = {} if layer == "SAGEConv" else {"add_self_loops": False}
    torch.manual_seed(0)
    convolutions = [getattr(geometric, layer)(WIDTH, WIDTH, **given) for _ in range(2)]

    def loss(h: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        for convolution in convolutions:
            h = convolution(h, ends).relu()
        return h.square().mean()

    h, src, dst, _ = batch(2 * EDGES)
    step = step_of(loss, h, torch.stack([src, dst]))
    groups = [group for group in region_groups(step.joint.graph) if group.most_pieces]
    assert around(groups, 2 * EDGES) <= 1
    assert outcome_of(step, [region for group in groups for region in group.regions], 0).wrong == ()


def least(step: Any, example: Any, **options: Any) -> Any:
    """The step with the smallest budget that is found."""
    with pytest.raises(InfeasibleBudgetError) as refused:
        checkmate.torch.compile(step, example=example, budget=1, costs="estimated", **options)
    return checkmate.torch.compile(step, example=example, budget=refused.value.smallest_bytes, **options)


def assert_close(mine: torch.Tensor | None, expected: torch.Tensor) -> None:
    """A sum of many terms may be close to zero: its error is relative to the others."""
    assert mine is not None
    assert (mine - expected).norm() <= 1e-5 * expected.norm()


def test_a_step_in_pieces_of_edges() -> None:
    """The loss has the bits of the plain step, gradients of weights are sums in another order, and the peak is as planned.

    The first layer differs from the second one: nodes that are given need no gradient. Neither alone lowers the floor.
    """
    model, example = Messages(), batch()
    loss = model(*example)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    keep_all = keep_all_bytes(checkmate.torch.capture(model, example=example, costs="estimated"))
    step = least(model, example, chunking="auto")
    resident = step.graph.resident_bytes
    assert step.result.peak_bytes - resident < (keep_all - resident) / 12

    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        return step(*example)[1]

    assert torch.equal(run(), loss)
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        assert_close(parameter.grad, expected)
    model.zero_grad(set_to_none=True)
    assert measure_peak(run) == step.result.peak_bytes - resident


def test_gradients_of_nodes_alone_have_their_bits_in_pieces() -> None:
    """Forces of a trained model: no sum is cut, and nodes are added to in the order of edges."""
    model, (h, *edges) = Messages().requires_grad_(False), batch()
    h.requires_grad_()
    (expected,) = torch.autograd.grad(model(h, *edges), h)
    with pytest.raises(InfeasibleBudgetError) as refused:
        checkmate.torch.compile(model, example=(h, *edges), budget=1, chunking="off")
    step = checkmate.torch.compile(model, example=(h, *edges), budget=refused.value.floor_bytes // 4)
    step(h, *edges)
    assert h.grad is not None and torch.equal(h.grad, expected)


def of_forces(layers: int, edges: int) -> tuple[Messages, Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """A step that trains forces: its gradient is one of a gradient."""
    model = Messages(layers)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(h: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        h = h.detach().requires_grad_()
        energy = model(h, src, dst, e)
        (forces,) = torch.autograd.grad(energy, h, create_graph=True)
        loss = energy + (forces + 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return model, step, batch(edges)


@pytest.mark.parametrize(("layers", "edges"), [(1, 4096), pytest.param(3, 20_000, marks=pytest.mark.slow)])
def test_forces_are_trained_in_pieces(layers: int, edges: int) -> None:
    """A layer, its gradient and the gradients of both are one region: nothing but nodes is whole between these."""
    model, step, example = of_forces(layers, edges)
    twin, plainly, _ = of_forces(layers, edges)
    planned = least(step, example, chunking="auto")
    eager = measure_peak(lambda: plainly(*example))
    assert torch.equal(planned(*example), of_forces(layers, edges)[1](*example))
    assert measure_peak(lambda: planned(*example)) == planned.result.peak_bytes - planned.graph.resident_bytes < eager / 8
    plainly(*example)
    for mine, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(mine, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("add", ADD)
def test_bits_are_promised_where_the_order_of_additions_is_kept(add: str, dtype: torch.dtype) -> None:
    """A kernel that adds in a wider type rounds once, and its pieces round several times."""
    to, _, ends, _ = batch(512)
    to, message = to.to(dtype), torch.randn(512, WIDTH, dtype=dtype).requires_grad_()
    step = step_of(lambda to, ends, m: ADD[add](to.clone(), ends, m.tanh()).float().square().sum(), to, ends, message)
    region = region_at(step, aten.tanh.default, (0,), 4, exact=True, least_share=0)
    (op,) = [op for op in chunk_ops_of(region, step.joint.graph) if any(op.program.sums)]
    with torch.no_grad():
        whole, made = ADD[add](to.clone(), ends, message), to.clone()
        for some, part in zip(ends.chunk(4), message.chunk(4), strict=True):
            made = ADD[add](made, some, part)
    assert keeps_bits(op) == torch.equal(whole, made)


@pytest.mark.slow
def test_the_largest_number_of_edges() -> None:
    """A function from a number of edges to a graph is all that the search needs; only edges grow."""
    model, budget = Messages(3), 8 << 20

    def graph_of(edges: int) -> Any:
        return checkmate.torch.capture(model, example=batch(1024 * edges), costs="estimated")

    found = checkmate.max_batch(graph_of, budget_bytes=budget, size_name="edges", limits=Limits(time_s=30))
    assert keep_all_bytes(graph_of(found.batch)) > budget >= found.result.peak_bytes
    assert found.upper_bound <= found.batch + 1


@pytest.mark.slow
def test_twenty_times_the_edges_of_what_fits() -> None:
    """The budget is what the plain step takes for a twentieth of the edges."""
    model, fitting = Messages(3), batch(20_000)
    budget = keep_all_bytes(checkmate.torch.capture(model, example=fitting, costs="estimated"))
    example = batch(400_000)
    step = checkmate.torch.compile(model, example=example, budget=budget, chunking="auto")

    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        return step(*example)[1]

    loss = run()
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    assert measure_peak(run) == step.result.peak_bytes - step.graph.resident_bytes
    assert step.result.peak_bytes <= budget
    expected = model(*example)
    assert torch.equal(loss, expected)
    for mine, right in zip(found, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        assert_close(mine, right)
