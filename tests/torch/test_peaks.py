"""The planned peak is the measured one, and the measured one keeps the budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import checkmate.torch
from checkmate.torch import measure_peak
from tests.torch.networks import NETWORKS, input_of
from tests.torch.steps import child, close, compiled, observe, planned_bytes, recomputes

BY_NAME = """
import json, sys, torch
torch.set_num_threads(1)
net = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())])
before = "checkmate" in sys.modules
run = torch.compile(net, backend="checkmate", options={"budget": "70%", "time_limit_s": 1})
x = torch.randn(1024, 64)
loss = run(x).square().mean(); loss.backward()
mine = [p.grad.clone() for p in net.parameters()]; net.zero_grad()
net(x).square().mean().backward()
by_name = dict(before=before, same=all(torch.equal(a, p.grad) for a, p in zip(mine, net.parameters())))
from tests.torch.test_peaks import points
"""


def digests() -> list[str]:
    """Of the graphs of some networks, with costs that are computed and not measured."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    found = []
    for name in ("attention", "in_place", "batch_norm"):
        model, example = nn.Sequential(NETWORKS[name](), nn.Flatten(0)), (input_of(name), torch.ones(()))
        found.append(checkmate.torch.capture(model, lambda p, y: p.sum() * y, example=example, costs="estimated").digest)
    return found


def points(name: str, rows: int = 2048) -> list[dict[str, Any]]:
    """Measured peaks of one network, without a budget and within one, beside what was planned."""
    torch.manual_seed(0)
    model, x = NETWORKS[name](), input_of(name, rows)

    def loss() -> torch.Tensor:
        return model(x).square().mean()

    reference = observe(model, loss)
    found = []
    for budget in (None, "60%"):
        torch._dynamo.reset()
        run, planned = compiled(loss, budget=budget, time_limit_s=10)
        differs = reference.differs(observe(model, run))
        state = copy.deepcopy(model.state_dict())
        measured = measure_peak(lambda run=run: run().backward())
        model.load_state_dict(state)
        interface, result = planned[-1]
        limit = result.budget_bytes - interface.graph.resident_bytes
        point = {"measured": measured, "planned": planned_bytes(planned), "limit": limit}
        found.append({**point, "differs": differs, "again": recomputes(planned)})
    return found


@pytest.fixture(scope="module")
def fresh() -> dict[str, Any]:
    """What one process finds that knows only torch at first; its hash seed is given."""
    found = 'print(json.dumps(dict(by_name=by_name, points=points("dropout"))))'
    return child(BY_NAME + found, PYTHONHASHSEED="1")


def check_points(points: list[dict[str, Any]]) -> None:
    for point in points:
        assert point["differs"] == []
        assert point["measured"] <= point["limit"] + 64
        assert close(point["measured"], point["planned"])
    assert [p["again"] > 0 for p in points] == [False, True]
    peaks = [p["measured"] for p in points]
    assert peaks == sorted(peaks, reverse=True)


def test_planned_is_measured_in_a_fresh_process(fresh: dict[str, Any]) -> None:
    """Every byte that the allocator hands out is one that the graph accounts for."""
    check_points(fresh["points"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropout", "batch_norm", "attention"])
def test_planned_is_measured_where_nothing_ran_before(name: str) -> None:
    """The same in a process for each network."""
    code = "import json, torch; torch.set_num_threads(1); from tests.torch.test_peaks import points"
    check_points(child(f"{code}; print(json.dumps(points({name!r})))"))


def test_the_backend_is_found_by_name_alone(fresh: dict[str, Any]) -> None:
    """An entry point makes ``backend="checkmate"`` work in a process that never imports checkmate."""
    assert fresh["by_name"] == {"before": False, "same": True}


@pytest.mark.slow
def test_the_graph_is_the_same_under_two_hash_seeds() -> None:
    """Plans are files: the same program must give the same graph in every process, whatever has run in it before."""
    code = "import json, torch; torch.set_num_threads(1); from tests.torch.test_peaks import digests"
    first, second = (child(f"{code}; print(json.dumps(digests()))", PYTHONHASHSEED=seed) for seed in ("1", "2"))
    assert first == second == digests()


class Attribute(torch.autograd.Function):
    """Keeps a tensor for its backward as an attribute, not by ``save_for_backward``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.slope = x.sin().exp()
        return x.sin() * ctx.slope

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.slope


def test_tensors_that_a_function_keeps_as_attributes_are_freed() -> None:
    """AOTAutograd itself holds them until the backward is over."""
    x = torch.randn(1 << 12, requires_grad=True)

    def loss() -> torch.Tensor:
        y = x.repeat(8).sin().view(8, -1).sum(0)  # the peak is in its backward, after those of the functions
        for _ in range(6):
            y = Attribute.apply(y)
        return y.sum()

    run, planned = compiled(loss)
    run().backward()
    x.grad = None
    assert close(measure_peak(lambda: run().backward()), planned_bytes(planned))
