"""One budget over all graphs in flight, and never a silent run over it."""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from torch import nn

from checkmate.torch import InFlightError, measure_peak
from checkmate.torch.coordinator import IN_FLIGHT
from tests.torch.networks import input_of, mlp
from tests.torch.steps import close, compiled, observe, planned_bytes

QUICK = {"time_limit_s": 3.0}
# Dynamo asks a tensor between two graphs for its gradient, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _nothing_in_flight() -> None:
    gc.collect()  # what an error of the test before still holds
    assert IN_FLIGHT.held_bytes() == 0


def test_a_second_forward_within_the_budget_runs() -> None:
    """What the first holds and what the second takes are added."""
    model, x = mlp(), input_of("dropout", 512)
    run, planned = compiled(lambda: model(x).mean(), budget="1GiB")
    first = run()
    assert IN_FLIGHT.held_bytes() > planned_bytes(planned) // 2
    second = run()
    second.backward()
    first.backward()
    assert IN_FLIGHT.held_bytes() == 0


def test_a_second_forward_over_the_budget_is_refused() -> None:
    """Two forwards before a backward take twice the memory: said before it happens."""
    model, x = mlp(), input_of("dropout", 1024)
    run, _ = compiled(lambda: model(x).mean(), budget="80%", **QUICK)
    first = run()
    with pytest.raises(InFlightError, match="2 planned graphs in flight together would take"):
        run()
    first.backward()
    run().backward()


def test_a_step_that_is_given_up_is_not_in_flight() -> None:
    """A loss that is dropped without a backward holds nothing any more."""
    model, x = mlp(), input_of("dropout", 1024)
    run, _ = compiled(lambda: model(x).mean(), budget="80%", **QUICK)
    loss = run()
    del loss
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


def test_a_graph_break_over_the_budget_is_refused() -> None:
    """What the first graph keeps leaves too little for the second."""
    model, x = Broken(), input_of("dropout", 1024)
    peak = measure_peak(lambda: model(x).backward())
    model.zero_grad(set_to_none=True)
    run, _ = compiled(model, fullgraph=False, budget=int(0.55 * peak), **QUICK)
    with pytest.raises(ValueError, match="budget"):
        run(x)


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
    assert sum("each new shape costs" in m for m in caplog.messages) == 2


def test_a_batch_cut_from_a_large_tensor_is_no_reason_to_refuse() -> None:
    """A slice has the storage of the whole data set, which no plan holds or frees."""
    model, data = mlp(), torch.randn(4096, 64)
    run, planned = compiled(lambda x: model(x).square().mean(), budget="70%", **QUICK)
    run(data[:512].clone()).backward()
    model.zero_grad(set_to_none=True)
    run(data[512:1024]).backward()
    assert len(planned) == 1
