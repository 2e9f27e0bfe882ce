"""One budget over all graphs in flight, and never a silent run over it."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import nn

from checkmate import InfeasibleBudgetError
from checkmate.torch import InFlightError, measure_peak
from checkmate.torch.compilation.coordinator import COORDINATOR
from tests.torch.networks import input_of, mlp
from tests.torch.steps import close, compiled, observe, planned_bytes, recomputes

QUICK = {"time_limit_s": 3.0}
# Dynamo asks a tensor between two graphs for its gradient, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _nothing_in_flight() -> None:
    gc.collect()  # what an error of the test before still holds
    assert COORDINATOR.held_bytes() == 0


def test_a_second_forward_within_the_budget_runs() -> None:
    """What the first holds and what the second takes are added."""
    model, x = mlp(), input_of("dropout", 512)
    run, planned = compiled(lambda: model(x).mean(), budget="1GiB")
    first = run()
    assert COORDINATOR.held_bytes() > planned_bytes(planned) // 2
    second = run()
    second.backward()
    first.backward()
    assert COORDINATOR.held_bytes() == 0


def test_two_forwards_share_a_budget_from_the_second_step_on(caplog: pytest.LogCaptureFixture) -> None:
    """Each alone may keep everything, both together not: one plan for both, compiled anew after the first step."""
    model, x = mlp(8), input_of("dropout", 1024)
    eager = observe(model, lambda: model(x).mean() + model(x).mean(), steps=3)
    resident = sum(4 * p.numel() for p in model.parameters()) + x.nbytes
    peak = measure_peak(lambda: (model(x).mean() + model(x).mean()).backward())
    model.zero_grad(set_to_none=True)
    run, planned = compiled(lambda: model(x).mean(), budget=resident + int(0.7 * peak), **QUICK)
    assert eager.differs(observe(model, lambda: run() + run(), steps=3)) == []
    assert "2 graphs were in flight together, and this first step took up to" in caplog.text
    assert [recomputes([each]) > 0 for each in planned] == [False, True]
    assert measure_peak(lambda: (run() + run()).backward()) <= int(0.7 * peak)


def test_a_division_that_cannot_be_is_refused_from_the_second_step_on() -> None:
    """Each forward alone has hardly room, and every one in flight holds something, whatever the plan."""
    model, x = mlp(4), input_of("dropout", 1024)
    with pytest.raises(InfeasibleBudgetError) as caught:
        compiled(lambda: model(x).mean(), budget="10KiB")[0]()
    assert caught.value.smallest_bytes is not None
    run, _ = compiled(lambda: model(x).mean(), budget=int(1.02 * caught.value.smallest_bytes), **QUICK)
    sum(run() for _ in range(20)).backward()
    model.zero_grad(set_to_none=True)
    with pytest.raises(InFlightError, match="planned graphs in flight together would take"):
        sum(run() for _ in range(20)).backward()
    run().backward()


def test_a_step_that_is_given_up_is_not_in_flight() -> None:
    """A loss that is dropped without a backward holds nothing any more."""
    model, x = mlp(), input_of("dropout", 1024)
    run, _ = compiled(lambda: model(x).mean(), budget="80%", **QUICK)
    loss = run()
    assert COORDINATOR.held_bytes() > 0
    del loss
    assert COORDINATOR.held_bytes() == 0
    run().backward()


def test_gradients_that_were_not_planned_for_are_counted() -> None:
    """A plan made without gradients may not fit beside those of an earlier step."""
    model, x = mlp(width=256), torch.randn(256, 256)
    run, _ = compiled(lambda: model(x).mean(), budget="75%", **QUICK)
    run().backward()
    with pytest.raises(InFlightError, match="of gradients are there already"):
        run()
    model.zero_grad(set_to_none=True)
    run().backward()


def test_accumulation_can_be_planned_for() -> None:
    """The hint of the error before works."""
    model, x = mlp(width=256), torch.randn(2048, 256)
    size = sum(4 * p.numel() for p in model.parameters())
    run, planned = compiled(lambda: model(x).mean(), budget="75%", accumulate=True, **QUICK)
    run().backward()
    run().backward()
    assert planned[-1][0].graph.resident_bytes == 2 * size + x.nbytes


class Broken(nn.Module):
    """Two graphs a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(3), mlp(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).mean()


def test_a_graph_break_within_the_budget_keeps_it() -> None:
    """The later graph is planned beside what the earlier one holds."""
    model, x = Broken(), input_of("dropout", 1024)
    eager = observe(model, lambda: model(x))
    peak = measure_peak(lambda: model(x).backward())
    budget = int(1.2 * peak) + sum(4 * p.numel() for p in model.parameters()) + x.nbytes
    run, planned = compiled(model, fullgraph=False, budget=budget, **QUICK)
    assert eager.differs(observe(model, lambda: run(x))) == []
    assert len(planned) == 2
    assert measure_peak(lambda: run(x).backward()) <= budget


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_a_graph_break_shares_the_budget_from_the_second_step_on(share: float, caplog: pytest.LogCaptureFixture) -> None:
    """The first graph would take it all; divided, both keep it together, and no bit changes."""
    model, x = Broken(), input_of("dropout", 1024)
    eager = observe(model, lambda: model(x), steps=3)
    resident = sum(4 * p.numel() for p in model.parameters()) + x.nbytes
    peak = measure_peak(lambda: model(x).backward())
    model.zero_grad(set_to_none=True)
    run, planned = compiled(model, fullgraph=False, budget=resident + int(share * peak), **QUICK)
    assert eager.differs(observe(model, lambda: run(x), steps=3)) == []
    assert "with the budget of" in caplog.text
    assert len(planned) == 4
    measured = measure_peak(lambda: run(x).backward())
    assert 0.8 * share * peak < measured <= share * peak


def test_every_shape_keeps_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    """A plan is for one shape: another is planned anew, and said to be."""
    model = mlp()
    run, planned = compiled(lambda x: model(x).square().mean(), budget="70%", **QUICK)
    for count, rows in enumerate((512, 1024, 768), start=1):
        x = torch.randn(rows, 64)
        with caplog.at_level(logging.WARNING, "checkmate.torch"):
            run(x).backward()
        model.zero_grad(set_to_none=True)
        assert close(measure_peak(lambda x=x: run(x).backward()), planned_bytes(planned))
        model.zero_grad(set_to_none=True)
        assert len(planned) == count
        assert planned[-1][1].peak_bytes <= planned[-1][1].budget_bytes
    run(torch.randn(512, 64)).backward()  # its plan is still there
    assert len(planned) == 3
    assert sum("each new shape costs" in m for m in caplog.messages) == 2


def test_a_batch_cut_from_a_large_tensor_is_no_reason_to_refuse() -> None:
    """A slice has the storage of the whole data set, which no plan holds or frees."""
    model, data = mlp(), torch.randn(4096, 64)
    run, planned = compiled(lambda x: model(x).square().mean(), budget="70%", **QUICK)
    run(data[:512].clone()).backward()
    model.zero_grad(set_to_none=True)
    run(data[512:1024]).backward()
    assert len(planned) == 1
