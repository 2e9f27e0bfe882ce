"""Frozen weights on the host: fetched as planned, with the bits of a step that holds them on the device, and as many bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import checkmate
import checkmate.torch
from checkmate import Compute, Fetch, Free, HostMemory, Plan, Problem, simulate
from checkmate.core.plan import with_frees
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.reductions.unread import needed_steps
from checkmate.torch._compat.dispatch import FakeTensorMode, traced_on
from checkmate.torch.graph.host_weights import is_frozen
from checkmate.torch.partition.copies import RESIDENTS, pin_weight

FAST = HostMemory(2**30, 10**12, 10**12)
X, Y = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 5
LOSS = nn.functional.cross_entropy


class Packed(nn.Module):
    """A layer whose frozen weight is stored in 4 bits, two numbers in a byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(0, 256, (width, width // 2), dtype=torch.uint8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(width, 1) / 8, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.weight & 15, self.weight >> 4
        return x @ ((torch.cat((low, high), 1).float() - 7.5) * self.scale).t()


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, base: nn.Module, width: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.base(x) + self.up(nn.functional.dropout(self.down(x), 0.1, self.training)))


def network(base: Callable[[int], nn.Module] = lambda width: nn.Linear(width, width)) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(base(64), 64) for _ in range(4)), nn.Linear(64, 5))


def step_of(model: nn.Module, **keywords: object) -> checkmate.torch.Step:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    return checkmate.torch.compile(model, LOSS, optimizer, example=(X, Y), **keywords)  # type: ignore[arg-type]


def trained(model: nn.Module, step: checkmate.torch.Step) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [*[step(X, Y)[1].clone() for _ in range(4)], *(p.detach().clone() for p in model.parameters())]


def fetching(graph: checkmate.Graph, resident: int = 0) -> Plan:
    """A plan that fetches each weight right before each use, but some that are on the device when the step begins and ends."""
    fold = FoldViews.of(graph)
    folded = fold.folded
    weights = [v for v, value in enumerate(folded.values) if value.on_host]
    steps: list[Compute | Fetch | Free] = [Compute(folded.producer[v]) for v in weights[:resident]]
    for o, op in enumerate(folded.ops):
        if not any(folded.values[v].on_host for v in op.outputs):
            needed = [v for v in op.inputs if v in weights[resident:]]
            steps += [*map(Fetch, needed), Compute(o), *map(Free, needed)]
    return with_frees(graph, needed_steps(Problem(graph, "100%", host=FAST), fold.invert_steps(steps)), FAST)


def all_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("base", [lambda width: nn.Linear(width, width), Packed], ids=["linear", "4 bit"])
@pytest.mark.parametrize("resident", [0, 2])
def test_bits_and_bytes_are_as_planned(base: Callable[[int], nn.Module], resident: int) -> None:
    """Losses and parameters of four steps; what is on the device between steps counts as planned, too."""
    model = network(base)
    reference = trained(model, step_of(model))
    graph = step_of(network(base), budget="100%", host="1GiB").graph
    weights = [v for v in graph.values if v.on_host]
    assert len(weights) == 8
    plan = fetching(graph, resident)
    model = network(base)
    step = step_of(model, plan=plan, budget="100%", host="1GiB")
    assert all_equal(reference, trained(model, step))
    timeline = simulate(step.graph, step.plan)
    held = sum(copy.nbytes for copy in RESIDENTS.of(model.parameters()))
    assert held == sum(v.size_bytes for v in weights[:resident])
    assert checkmate.torch.measure_peak(lambda: step(X, Y)) + held == timeline.peak_bytes - step.graph.resident_bytes
    assert timeline.host_peak_bytes == sum(v.size_bytes for v in weights[resident:])


def test_nothing_is_copied_where_everything_fits() -> None:
    """Frozen weights are then on the device when the step begins and ends."""
    model = network()
    reference = trained(model, step_of(model))
    model = network()
    step = step_of(model, budget="100%", host="1GiB")
    assert not any(isinstance(s, Fetch) for s in step.plan.steps)
    assert all_equal(reference, trained(model, step))


def test_weights_that_are_loaded_later_are_those_of_the_next_step() -> None:
    """Their copies on the device are made anew."""
    model = network()
    step = step_of(model, budget="100%", host="1GiB")
    trained(model, step)
    other = {name: -value for name, value in network().state_dict().items()}
    model.load_state_dict(other)
    reference = network()
    reference.load_state_dict(other)
    losses = []
    for run in (step, step_of(reference)):
        torch.manual_seed(2)
        losses.append(run(X, Y)[1].clone())
    assert torch.equal(*losses)


def test_a_step_that_fails_leaves_the_weights_as_they_were() -> None:
    """The next step has the bits of a step that nothing preceded."""
    model = network()
    reference = trained(model, step_of(model))
    graph = step_of(network(), budget="100%", host="1GiB").graph
    model = network()
    step = step_of(model, plan=fetching(graph, 3), budget="100%", host="1GiB")
    with pytest.raises(IndexError, match="out of bounds"):
        step(X, Y + 5)
    assert all_equal(reference, trained(model, step))


def test_a_weight_that_is_tied_or_trained_stays() -> None:
    """A storage that another parameter shares is not fetched; nor is a weight that is made trainable later."""
    model = network()
    model[1].base.weight = nn.Parameter(model[0].base.weight.detach(), requires_grad=False)  # another tensor, one storage
    step = step_of(model, budget="100%", host="1GiB")
    assert sum(v.on_host for v in step.graph.values) == 6
    trained(model, step)
    model[2].base.bias.requires_grad_(True)
    step = step_of(model, budget="100%", host="1GiB")
    assert sum(v.on_host for v in step.graph.values) == 5


def test_weights_of_a_file_that_is_mapped_are_fetched(tmp_path: Path) -> None:
    """Their storages are the file's pages: nothing reads them before the step does."""
    torch.save(network().state_dict(), tmp_path / "weights.pt")
    model = network()
    model.load_state_dict(torch.load(tmp_path / "weights.pt", mmap=True), assign=True)
    for name, p in model.named_parameters():
        p.requires_grad_("base" not in name)
    reference = network()
    step = step_of(model, budget="100%", host="1GiB")
    assert all_equal(trained(reference, step_of(reference)), trained(model, step))


def test_frozen_weights_on_the_host_are_traced_on_the_device_of_the_step() -> None:
    """Their ops meet tensors of the device; here it is the meta device."""
    model = network()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, traced_on(torch.device("meta"), is_frozen):
        fake = {name: mode.from_tensor(p).device.type for name, p in model.named_parameters()}
    assert {kind for name, kind in fake.items() if "base" in name} == {"meta"}
    assert {kind for name, kind in fake.items() if "base" not in name} == {"cpu"}


def test_a_weight_is_pinned_where_it_is(
    seeming_gpu: Callable[..., None], seeming_pins: dict[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    """It has no second copy on the host. Nothing here was run on a GPU."""
    weight = nn.Parameter(torch.randn(10, 10), requires_grad=False)
    where = weight.data_ptr()
    pin_weight(weight, torch.device("cuda", 0))
    assert seeming_pins == {where: 400}
    del weight
    assert not seeming_pins

    def fails(status: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    seeming_gpu(check_error=fails)
    pin_weight(nn.Parameter(torch.randn(10, 10), requires_grad=False), torch.device("cuda", 0))
    assert "cannot be pinned" in caplog.text and "ulimit -l" in caplog.text


@pytest.mark.usefixtures("nothing_else")
@pytest.mark.parametrize("part", [0.1, pytest.param(0.3, marks=pytest.mark.slow), pytest.param(0.7, marks=pytest.mark.slow)])
def test_a_budget_below_the_weights_is_kept(part: float) -> None:
    """The planner decides which weights stay on the device, which are fetched and when."""
    model = network(Packed)
    reference = trained(model, step_of(model))
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    with pytest.raises(checkmate.InfeasibleBudgetError) as refusal:
        step_of(network(Packed), budget="1KiB", host="1GiB")
    assert refusal.value.smallest_bytes is not None
    budget = refusal.value.smallest_bytes + int(part * frozen)
    model = network(Packed)
    step = step_of(model, budget=budget, host="1GiB", time_limit_s=2)
    assert any(isinstance(s, Fetch) for s in step.plan.steps)
    assert all_equal(reference, trained(model, step))
    planned = simulate(step.graph, step.plan).peak_bytes
    assert planned <= budget
    RESIDENTS.forget(model.parameters())  # the profiler does not see frees of what was there before: the step copies them anew
    assert checkmate.torch.measure_peak(lambda: step(X, Y)) <= planned - step.graph.resident_bytes
