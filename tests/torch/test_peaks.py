"""The planned peak is the measured one, and the measured one keeps the budget."""

from __future__ import annotations

import pytest

from tests.torch.steps import child, close

RUN = """
import copy, json, torch
torch.set_num_threads(1)
import checkmate
from checkmate.torch import measure_peak
from tests.torch.networks import NETWORKS, input_of
from tests.torch.steps import compiled, planned_bytes, observe, recomputes
name, rows = {name!r}, 2048
torch.manual_seed(0)
model, x = NETWORKS[name](), input_of(name, rows)
loss = lambda: model(x).square().mean()
reference = observe(model, loss)
found = []
for budget in (None, "75%", "55%"):
    torch._dynamo.reset()
    run, planned = compiled(loss, budget=budget, time_limit_s=3)
    differs = reference.differs(observe(model, run))
    state = copy.deepcopy(model.state_dict())
    measured = measure_peak(lambda: run().backward())
    model.load_state_dict(state)
    limit = planned[-1][1].budget_bytes - planned[-1][0].graph.resident_bytes
    found.append(dict(measured=measured, planned=planned_bytes(planned), limit=limit, differs=differs, again=recomputes(planned)))
print(json.dumps(found))
"""


@pytest.mark.parametrize("name", ["dropout", *(pytest.param(n, marks=pytest.mark.slow) for n in ("batch_norm", "attention"))])
def test_planned_is_measured_in_a_fresh_process(name: str) -> None:
    """Every byte that the allocator hands out is one that the graph accounts for."""
    points = child(RUN.format(name=name))
    for point in points:
        assert point["differs"] == []
        assert point["measured"] <= point["limit"] + 64
        assert close(point["measured"], point["planned"])
    assert [p["again"] > 0 for p in points] == [False, True, True]
    peaks = [p["measured"] for p in points]
    assert peaks == sorted(peaks, reverse=True)


def test_the_backend_is_found_by_name_alone() -> None:
    """An entry point makes ``backend="checkmate"`` work in a process that never imports checkmate."""
    found = child("""
import json, sys, torch
torch.set_num_threads(1)
net = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.GELU())])
before = "checkmate" in sys.modules
run = torch.compile(net, backend="checkmate", options={"budget": "70%", "time_limit_s": 3})
x = torch.randn(1024, 64)
loss = run(x).square().mean(); loss.backward()
mine = [p.grad.clone() for p in net.parameters()]; net.zero_grad()
net(x).square().mean().backward()
print(json.dumps([before, all(torch.equal(a, p.grad) for a, p in zip(mine, net.parameters()))]))
""")
    assert found == [False, True]


def test_the_graph_does_not_depend_on_the_hash_seed() -> None:
    """Plans are files: the same program must give the same graph in every process."""
    code = """
import json, torch, checkmate.torch
torch.set_num_threads(1)
from tests.torch.networks import NETWORKS, input_of
torch.manual_seed(0)
print(json.dumps([checkmate.torch.capture(torch.nn.Sequential(NETWORKS[n](), torch.nn.Flatten(0)), lambda p, y: p.sum() * y,
    example=(input_of(n), torch.ones(())), costs="flops").digest for n in ("attention", "in_place", "batch_norm")]))
"""
    assert child(code, PYTHONHASHSEED="1") == child(code, PYTHONHASHSEED="2")
