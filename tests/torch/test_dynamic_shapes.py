"""One plan for all sizes up to the largest, where the user asks for dynamic shapes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import checkmate.torch
from checkmate import InfeasibleBudgetError
from checkmate.torch import measure_peak
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.networks import NETWORKS, Transformer, input_of, mlp
from tests.torch.steps import ROOMY, Forgetful, close, compiled, observe, planned_bytes, recomputes

QUICK = {"time_limit_s": 0.7}
# Dynamo asks a tensor between two graphs for its gradient, and torch warns of that.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.usefixtures("nothing_else"),
]


QUICKER = ("dropout", "in_place")


@pytest.mark.parametrize(
    "name",
    # "views" unbinds the batch: one size only.
    [pytest.param(n, marks=() if n in QUICKER else pytest.mark.slow) for n in NETWORKS if n != "views"],
)
def test_one_compilation_serves_three_sizes(name: str) -> None:
    """Gradients equal those of keeping everything, to the bit, at every size; the plan is for the largest."""
    model = NETWORKS[name]()
    batches = [input_of(name, rows) for rows in (256, 96, 160)]
    keep_all, kept = compiled(lambda x: model(x).square().mean(), dynamic=True)
    references = [observe(model, lambda x=x: keep_all(x)) for x in batches]
    assert len(kept) == 1
    torch._dynamo.reset()
    run, planned = compiled(lambda x: model(x).square().mean(), dynamic=True, budget=ROOMY, solver=Forgetful())
    assert [r.differs(observe(model, lambda x=x: run(x))) for r, x in zip(references, batches, strict=True)] == [[], [], []]
    assert recomputes(planned) > 5
    peaks = []
    for x in batches:
        peaks.append(measure_peak(lambda x=x: run(x).backward()))
        model.zero_grad(set_to_none=True)
    assert len(planned) == 1
    assert close(peaks[0], planned_bytes(planned))
    assert sorted(peaks) == [peaks[1], peaks[2], peaks[0]]


@pytest.mark.slow
def test_the_largest_size_that_is_announced_is_planned_for() -> None:
    """The first batch is the smallest; the budget holds at the largest, which comes last."""
    model, largest = Transformer(layers=1), 128
    batches = [torch.randn(rows, 16, 32) for rows in (32, 64, largest)]
    keep_all, _ = compiled(lambda x: model(x).square().mean(), dynamic=False)
    references = [observe(model, lambda x=x: keep_all(x)) for x in batches]
    torch._dynamo.reset()
    run, planned = compiled(lambda x: model(x).square().mean(), budget="85%", **QUICK)
    torch._dynamo.mark_dynamic(batches[0], 0, min=2, max=largest)
    assert [r.differs(observe(model, lambda x=x: run(x))) for r, x in zip(references, batches, strict=True)] == [[], [], []]
    assert len(planned) == 1
    interface, result = planned[0]
    parameters = sum(4 * p.numel() for p in model.parameters())
    assert interface.graph.resident_bytes == parameters + batches[-1].nbytes
    assert recomputes(planned) > 5
    measured = measure_peak(lambda: run(batches[-1]).backward())
    assert interface.graph.resident_bytes + measured <= result.budget_bytes + 64
    # What runs is the plan of the step, beside what is held of the steps before: of equal cost, with a peak that may differ.
    assert coordinator().step is not None
    step = coordinator().step.result
    held = step.budget_bytes - result.budget_bytes
    assert close(measured, (step.peak_bytes or 0) - held - interface.graph.resident_bytes)


def test_a_size_beyond_the_largest_is_planned_anew(caplog: pytest.LogCaptureFixture) -> None:
    """Never a run under a plan that was not made for it."""
    model = mlp()
    run, planned = compiled(lambda x: model(x).square().mean(), dynamic=True, budget="70%", **QUICK)
    for rows, count in ((512, 1), (256, 1), (1024, 2), (768, 2), (512, 2)):
        x = torch.randn(rows, 64)
        run(x).backward()
        model.zero_grad(set_to_none=True)
        assert len(planned) == count
        assert measure_peak(lambda x=x: run(x).backward()) <= planned_bytes(planned) + 64
        model.zero_grad(set_to_none=True)
    assert "each new one costs" not in caplog.text


def test_a_size_beyond_what_was_announced_is_planned_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    """The range of `mark_dynamic` is a guard as well."""
    model, x = mlp(), torch.randn(128, 64)
    run, planned = compiled(lambda x: model(x).square().mean(), budget="70%", **QUICK)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=256)
    for batch, count in ((x, 1), (torch.randn(256, 64), 1), (torch.randn(512, 64), 2)):
        run(batch).backward()
        model.zero_grad(set_to_none=True)
        assert len(planned) == count
    assert "each new one costs another compilation" in caplog.text


def test_an_impossible_largest_size_is_refused_at_the_first_batch() -> None:
    """Not at the first batch that is too large, hours later."""
    model, x = mlp(), torch.randn(128, 64)
    fits = 4 * sum(p.numel() for p in model.parameters()) + 60 * x.nbytes
    compiled(lambda x: model(x).square().mean(), budget=fits, **QUICK)[0](x)
    torch._dynamo.reset()
    torch._dynamo.mark_dynamic(x, 0, min=2, max=1 << 14)
    with pytest.raises(InfeasibleBudgetError):
        compiled(lambda x: model(x).square().mean(), budget=fits, **QUICK)[0](x)


def test_sizes_that_shrink_as_the_batch_grows_count_at_their_most() -> None:
    """Padding to a fixed length: there is the more of it, the shorter the batch."""
    model = mlp(2)

    def padded(x: torch.Tensor) -> torch.Tensor:
        pad = x.new_ones(256 - x.shape[0], 64).exp()
        return (model(torch.cat([x, pad])) * pad.sum()).square().mean()

    x = torch.randn(200, 64)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=250)
    run, planned = compiled(padded, budget=ROOMY, **QUICK)
    for rows in (200, 8, 250):
        batch = x if rows == 200 else torch.randn(rows, 64)
        run(batch).backward()
        model.zero_grad(set_to_none=True)
        assert measure_peak(lambda batch=batch: run(batch).backward()) <= planned_bytes(planned) + 64
        model.zero_grad(set_to_none=True)
    assert len(planned) == 1
    assert max(v.size_bytes for v in planned[0][0].graph.values if v.name.startswith("exp")) == 254 * 64 * 4


@pytest.mark.slow
def test_two_dynamic_dimensions_and_sizes_in_the_arithmetic() -> None:
    """Sequence length beside batch, sizes as numbers in the loss, convolutions over dynamic images."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3, stride=2), nn.GELU())

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = net(x)
        pooled = F.adaptive_avg_pool2d(y, 1).flatten(1)
        scores = (pooled @ pooled.t()) / y.shape[-1] ** 0.5
        return F.dropout(scores, 0.1).softmax(-1).square().sum() * x.shape[0] / y.numel() + y.flatten(2).mean()

    batches = [torch.randn(*shape) for shape in ((24, 3, 32, 40), (16, 3, 24, 40), (20, 3, 17, 25))]
    keep_all, _ = compiled(loss, dynamic=True)
    references = [observe(net, lambda x=x: keep_all(x)) for x in batches]
    torch._dynamo.reset()
    run, planned = compiled(loss, dynamic=True, budget=ROOMY, solver=Forgetful())
    assert [r.differs(observe(net, lambda x=x: run(x))) for r, x in zip(references, batches, strict=True)] == [[], [], []]
    assert len(planned) == 1
    assert recomputes(planned) > 5
    assert close(measure_peak(lambda: run(batches[0]).backward()), planned_bytes(planned))


@pytest.mark.slow
def test_a_number_is_bounded_only_where_it_is_a_size() -> None:
    """A counter may grow without another compilation; a length that is cut to may not outgrow its plan."""
    model, x = mlp(2), torch.randn(256, 64)
    run, planned = compiled(lambda x, n: (model(x) * n).square().mean() / n, dynamic=True, budget="80%", **QUICK)
    for n in (5, 6, 700):
        reference = observe(model, lambda n=n: (model(x) * n).square().mean() / n)
        assert reference.differs(observe(model, lambda n=n: run(x, n))) == []
    assert len(planned) == 1
    torch._dynamo.reset()
    run, planned = compiled(lambda x, n: model(x[:n]).square().mean(), dynamic=True, budget="80%", **QUICK)
    for n, count in ((100, 1), (50, 1), (200, 2)):
        run(x, n).backward()
        model.zero_grad(set_to_none=True)
        assert len(planned) == count
        assert measure_peak(lambda n=n: run(x, n).backward()) <= planned_bytes(planned) + 64
        model.zero_grad(set_to_none=True)


def test_graphs_that_share_a_budget_share_it_at_every_size() -> None:
    """A graph break under dynamic shapes: planned once, at the largest."""
    first, second = mlp(2), mlp(2)
    model = nn.ModuleList([first, second])

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = first(x)
        torch._dynamo.graph_break()
        return second(y).square().mean()

    x = input_of("dropout", 1024)
    resident = sum(4 * p.numel() for p in model.parameters()) + x.nbytes
    peak = measure_peak(lambda: loss(x).backward())
    model.zero_grad(set_to_none=True)
    batches = [x, x[:512].clone(), x[:700].clone()]
    references = [observe(model, lambda x=x: loss(x), steps=1) for x in batches]
    run, planned = compiled(loss, fullgraph=False, dynamic=True, budget=resident + int(0.75 * peak), **QUICK)
    for _ in range(2):
        run(x).backward()
        model.zero_grad(set_to_none=True)
    count = len(planned)
    found = [observe(model, lambda x=x: run(x), steps=1) for x in batches]
    assert [r.differs(f) for r, f in zip(references, found, strict=True)] == [[], [], []]
    assert measure_peak(lambda: run(x).backward()) <= int(0.75 * peak)
    assert len(planned) == count == 2
    assert coordinator().held_bytes() == 0


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_for_every_size_up_to_its_example(whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The last batch of an epoch, without another compilation; parameters and optimizer equal to the bit."""

    def trained(dynamic: bool, **options: Any) -> tuple[list[torch.Tensor], Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(50, 64), mlp(2), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        ids = torch.arange(256 * 8).view(256, 8) % 50
        y = ids % 10

        def loss(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(prediction.flatten(0, 1), y.flatten())

        step = checkmate.torch.compile(model, loss, optimizer, example=(ids, y), whole=whole, dynamic=dynamic, **options)
        torch.manual_seed(1)
        losses = [step(ids[:rows], y[:rows])[1] for rows in (256, 96, 160)]
        left = copy.deepcopy([*losses, *model.parameters(), *_states(optimizer), torch.get_rng_state()])
        if options:
            assert measure_peak(lambda: step(ids, y)) <= step.result.peak_bytes - step.graph.resident_bytes + 64
        return left, step

    expected, _ = trained(dynamic=True)
    caplog.clear()
    found, step = trained(dynamic=True, budget="80%", **QUICK)
    assert "was compiled again" not in caplog.text
    assert len(step.plan.order) > len(set(step.plan.order))
    assert len(found) > 30
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]


class Reshaped(nn.Module):
    """Linear layers on three dimensions, with shapes that are asked of computed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.relu(self.first(x)).view(-1, 8)
        return self.second(torch.relu(rows)).view(rows.shape[0] // 4, 32).sin()


@pytest.mark.parametrize("ask", ["first", "all"])
def test_the_graph_of_dynamic_sizes_is_that_of_the_static_ones(ask: str) -> None:
    """Arithmetic on sizes is no op: one that shapes a view would tie it to its place, and cost memory or time for a number."""
    torch.manual_seed(0)
    model, x = Reshaped(), torch.randn(8, 4, 16)
    forward = model.first if ask == "first" else model
    found = []
    for dynamic in (False, True):
        torch._dynamo.reset()
        run, planned = compiled(lambda x: forward(x).square().mean(), dynamic=dynamic, costs="estimated")
        run(x).backward()
        model.zero_grad(set_to_none=True)
        found.append(planned[0][0].graph)
    assert [op.kind for op in found[0].ops] == [op.kind for op in found[1].ops]
    assert found[0].digest == found[1].digest
