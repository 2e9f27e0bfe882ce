"""The largest batch runs within its budget, on the plan that is returned, and the next one does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
import checkmate.torch
from checkmate import InfeasibleBudgetError, OptionError, load_device, parse_bytes
from checkmate.studies.affine import AffineGraph
from checkmate.torch import largest_batch, measure_peak
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.forecast.largest_batch import parabolas
from checkmate.torch.forecast.tracer import DeviceTracer, Growing
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.step.recipe import StepRecipe

pytestmark = pytest.mark.usefixtures("nothing_else")


class Attention(nn.Module):
    """Attention that holds its scores, so that sizes grow with the square of the length."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(50, dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embed(ids)).chunk(3, -1)
        return self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Labelled(nn.Module):
    """A model that is called with names and returns its loss, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Attention()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return tokens_loss(self.net(input_ids), labels)


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(256, 256).requires_grad_(False)
        self.down, self.up = nn.Linear(256, 4, bias=False), nn.Linear(4, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.base(x) + self.up(self.down(x)))


def tokens_loss(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(prediction.flatten(0, 1), y.flatten())


def tokens(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(batch * length).view(batch, length) % 50, torch.ones(batch, length, dtype=torch.long)


def total(step: checkmate.torch.Step, *batch: Any) -> int:
    """Bytes of a step as they are counted by a budget: measured, after two steps."""
    step(*batch), step(*batch)
    return step.graph.resident_bytes + measure_peak(lambda: step(*batch))


@pytest.mark.slow
@pytest.mark.usefixtures("plenty")
def test_batch_and_sequence_run_within_the_budget() -> None:
    """Both on the plans that were returned: measured, they keep the budget and need most of it."""
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.AdamW(model.parameters())
    given: dict[str, Any] = {"budget": "1MiB", "time_limit_s": 12, "max_overhead": 10}
    found = largest_batch(model, tokens_loss, optimizer, example=tokens(2, 32), sequence_dim=1, **given)
    longest = found.longest_sequence
    assert longest is not None
    assert 2 < found.batch <= found.upper_bound
    assert 32 < longest.batch <= longest.upper_bound < 2 * longest.batch
    assert found.remarks == ()
    for batch, plan in ((tokens(found.batch, 32), found.plan), (tokens(2, longest.batch), longest.plan)):
        torch._dynamo.reset()
        step = checkmate.torch.compile(model, tokens_loss, optimizer, example=batch, budget="1MiB", plan=plan)
        assert 0.8 * 2**20 < total(step, *batch) <= 2**20


@pytest.mark.usefixtures("plenty")
def test_the_upper_bound_is_where_compiling_fails() -> None:
    """One layer: one op sets the floor, and the answer is exact."""
    model, loss = nn.Linear(256, 256), nn.functional.mse_loss
    found = largest_batch(model, loss, example=(torch.ones(4, 256), torch.ones(4, 256)), budget="2MiB", time_limit_s=4)
    assert found.batch == found.upper_bound
    more = torch.ones(found.batch + 1, 256), torch.ones(found.batch + 1, 256)
    with pytest.raises(InfeasibleBudgetError):
        checkmate.torch.compile(model, loss, example=more, budget="2MiB")
    assert f"batch {found.batch}: " in str(found)


def test_nothing_of_the_training_changes() -> None:
    """Weights, gradients, optimizer state and random state are those before the call; also after some steps."""
    torch.manual_seed(0)
    model = Attention()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        tokens_loss(model(tokens(2, 8)[0]), tokens(2, 8)[1]).backward()
        optimizer.step()
    before = [p.clone() for p in model.parameters()], [p.grad for p in model.parameters()], torch.get_rng_state()
    moments = [s["exp_avg"].clone() for s in optimizer.state.values()]
    largest_batch(model, tokens_loss, optimizer, example=tokens(2, 8), budget="300KiB", time_limit_s=3)
    assert all(torch.equal(a, b) for a, b in zip(before[0], model.parameters(), strict=True))
    assert all(a is p.grad for a, p in zip(before[1], model.parameters(), strict=True))
    assert torch.equal(before[2], torch.get_rng_state())
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, optimizer.state.values(), strict=True))


def test_micro_batches_divide_the_batch() -> None:
    """The batch that is found runs on its plan, and does not fit in one part."""
    model, loss = nn.Linear(64, 64), nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given: dict[str, Any] = {"budget": "512KiB", "outputs": "released"}
    x = torch.ones(6, 64)
    found = largest_batch(model, loss, optimizer, example=(x, x), micro_batches=3, time_limit_s=8, **given)
    assert found.batch % 3 == 0
    batch = torch.ones(found.batch, 64), torch.zeros(found.batch, 64)
    step = checkmate.torch.compile(model, loss, optimizer, example=batch, micro_batches=3, plan=found.plan, **given)
    assert total(step, *batch) <= 2**19
    with pytest.raises(InfeasibleBudgetError):
        checkmate.torch.compile(model, loss, optimizer, example=batch, time_limit_s=2, **given)


def test_a_mapping_and_a_model_with_its_loss() -> None:
    """As models of transformers are called."""
    ids, labels = tokens(2, 8)
    example = {"input_ids": ids, "labels": labels}
    found = largest_batch(Labelled(), example=example, budget="200KiB", time_limit_s=3)
    assert found.batch > 2


def test_a_budget_below_a_batch_of_one_is_refused() -> None:
    """The hint of the refusal works."""
    model = Attention()
    with pytest.raises(InfeasibleBudgetError) as refused:
        largest_batch(model, tokens_loss, example=tokens(4, 32), budget="20KiB", time_limit_s=4)
    enough = max(refused.value.floor_bytes, 2 * parse_bytes("20KiB"))
    assert largest_batch(model, tokens_loss, example=tokens(4, 32), budget=enough, time_limit_s=4).batch >= 1


def test_a_step_after_the_backward_counts() -> None:
    """With the updates outside of the plan all gradients exist at once, at any batch."""
    model = nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(InfeasibleBudgetError, match="the optimizer's step needs"):
        largest_batch(model, nn.functional.mse_loss, optimizer, example=(torch.ones(1, 512),) * 2, budget="850KiB", whole=False)


def test_an_example_without_a_common_size_is_refused() -> None:
    """Which dimension is the batch, or the sequence, must be clear."""
    model = nn.Linear(4, 4)
    with pytest.raises(OptionError, match="dimension 0"):
        largest_batch(model, nn.functional.mse_loss, example=(torch.ones(3, 4), torch.ones(())[None]), budget="1MiB")
    with pytest.raises(OptionError, match="dimension 1"):
        largest_batch(model, tokens_loss, example=(torch.ones(3, 4), torch.ones(3, 5)), budget="1MiB", sequence_dim=1)
    with pytest.raises(checkmate.UnitError, match="share"):
        largest_batch(model, nn.functional.mse_loss, example=(torch.ones(3, 4),) * 2, budget="50%")


def test_parabolas_are_the_graph_at_other_lengths() -> None:
    """Every size at a length that was not traced, from three that were; and more than lines say."""
    model = Attention()

    def at(length: int) -> checkmate.Graph:
        return checkmate.torch.capture(model, tokens_loss, example=tokens(2, length), costs="estimated")

    traces = {size: at(size) for size in (8, 16, 32)}
    lines = AffineGraph(traces[16], 16, traces[32], 32)
    wanted, found, linear = at(80), parabolas(traces, lines)(80), lines(80)
    sizes = [value.size_bytes for value in wanted.values]
    assert [value.size_bytes for value in found.values] == sizes
    assert sum(sizes) > sum(value.size_bytes for value in linear.values)


def test_an_example_may_be_a_slice_of_a_data_set() -> None:
    """Its storage is as large as the data set: what is resident would not grow with the batch, and no trace confirm any."""
    rows = torch.ones(1024, 64)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def resident(x: torch.Tensor) -> list[int]:
        target = EmulatedDevice(load_device("H100"), cpu_costs=Profiler())
        recipe = StepRecipe(model=model, loss=nn.functional.mse_loss, example=(x, x))
        tracer = DeviceTracer(recipe, math.inf, target)
        larger = Growing.along((x, x), "batch", 0)
        return [tracer.traced(larger, size).graph.resident_bytes for size in (len(x), 128)]

    small, slice_, own = resident(rows[:1]), resident(rows[:64]), resident(torch.ones(64, 64))
    assert slice_ == own and small[1] == own[1] and small[0] < own[0] < own[1]


def test_an_example_keeps_its_memory_format_at_every_size() -> None:
    """The graph of channels-last images is another than that of contiguous ones."""
    x = torch.ones(4, 3, 8, 8).to(memory_format=torch.channels_last)
    larger = Growing.along((x,), "batch", 0)
    assert larger is not None
    for size in (4, 8):
        (resized,) = larger.resized((x,), size)
        assert resized.is_contiguous(memory_format=torch.channels_last) and resized.shape[1:] == x.shape[1:]


Batch = tuple[torch.Tensor, ...]


def structure(atoms: int, edges: int) -> Batch:
    return torch.randn(atoms, 3), torch.randint(atoms, (edges,)), torch.randint(atoms, (edges,)), torch.randn(atoms, 3)


def forces() -> Callable[..., torch.Tensor]:
    """A step that trains on forces, by messages along edges."""
    net = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 16))
    optimizer = torch.optim.AdamW(net.parameters())

    def step(at: torch.Tensor, source: torch.Tensor, target: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        at = at.detach().requires_grad_()
        messages = net(at[source] - at[target])
        energy = torch.zeros(len(at), 16).index_add(0, target, messages).tanh().sum()
        (slope,) = torch.autograd.grad(energy, at, create_graph=True)
        loss = (slope + expected).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


EDGES, ATOMS = {0: "edges"}, {0: torch.export.Dim("atoms")}


@pytest.mark.parametrize(
    ("grows", "name"),
    [((None, EDGES, EDGES, None), "edges"), pytest.param((ATOMS, EDGES, EDGES, ATOMS), "atoms", marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("plenty")
def test_the_largest_structure_runs_within_the_budget(grows: Any, name: str) -> None:
    """Sizes grow along dimensions with names, alone or in proportion; the step is a function that takes its gradients."""
    step = forces()
    given: dict[str, Any] = {"budget": "2MiB", "time_limit_s": 6}
    found = largest_batch(step, example=structure(64, 256), dynamic_shapes=grows, **given)
    assert found.name == name and str(found).splitlines()[1].startswith(f"{name} {found.batch}: ")
    factor = found.batch / (256 if name == "edges" else 64)
    assert 2 < factor <= found.upper_bound
    batch = structure(64 if name == "edges" else found.batch, math.ceil(256 * factor))
    planned = checkmate.torch.compile(step, example=batch, budget="2MiB", plan=found.plan)
    assert 0.8 * 2**21 < total(planned, *batch) <= 2**21


@pytest.mark.parametrize(
    ("grows", "named"),
    [
        (3, "not like the example"),
        ((EDGES,), "not like the example"),
        ((EDGES, EDGES, None, None), "'edges' has the sizes 64 and 256"),
        ((None, {1: "edges"}, None, None), r"\(256,\) has no dimension 1"),
        ((None,) * 4, "names no dimension"),
    ],
)
def test_names_of_dimensions_that_do_not_match_are_refused(grows: Any, named: str) -> None:
    with pytest.raises(OptionError, match=rf"{named}(?s:.*)hint"):
        largest_batch(forces(), example=structure(64, 256), budget="2MiB", dynamic_shapes=grows)


@pytest.mark.usefixtures("nothing_else")
def test_weights_that_exceed_the_budget_are_fetched() -> None:
    """Frozen ones need not stay on the device: the plan that is returned runs within the budget, to the plain step's bits."""
    loss, x = nn.functional.mse_loss, torch.randn(16, 256)

    def adapted() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Adapted() for _ in range(4)))
        return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)

    (model, optimizer), (plain, updates) = adapted(), adapted()
    budget = sum(p.nbytes for p in model.parameters() if not p.requires_grad) - 2**18
    given: dict[str, Any] = {"budget": budget, "host": "1GiB"}
    found = largest_batch(model, loss, optimizer, example=(x, x), **given, time_limit_s=20, max_overhead=20.0)
    assert found.batch > 16
    assert found.plan.host is not None
    batch = (torch.randn(found.batch, 256),) * 2
    step = checkmate.torch.compile(model, loss, optimizer, example=batch, plan=found.plan, **given)
    for _ in range(2):
        expected = loss(plain(batch[0]), batch[1])
        expected.backward()
        updates.step()
        updates.zero_grad()
        assert torch.equal(step(*batch)[1], expected)
    assert total(step, *batch) <= budget  # without weights that are there when it begins, and that it may free
