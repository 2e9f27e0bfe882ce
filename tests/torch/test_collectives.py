"""Collectives in a planned step: run once, in the same order in both processes, whatever is computed again."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow

COMMON = """
import json, os, sys, torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import nn
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[2]}", rank=rank, world_size=2)
from tests.torch.networks import mlp
from tests.torch.steps import ROOMY, Forgetful, close, compiled, observe, planned_bytes, recomputes
from checkmate.torch import measure_peak
GROUP = dist.group.WORLD
class SyncNorm(nn.Module):
    # What nn.SyncBatchNorm does, which itself runs on accelerators only: moments over both processes' batches.
    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        mine = torch.stack([x.mean(0), x.square().mean(0)])[None]
        both = collectives.all_gather_tensor_autograd(mine, 0, GROUP).mean(0)
        mean, variance = both[0], both[1] - both[0].square()
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.count += 1
        return (x - mean) * torch.rsqrt(variance + 1e-5) * self.weight + self.bias
torch.manual_seed(0)
model = nn.Sequential(mlp(2), SyncNorm(64), mlp(2), SyncNorm(64), nn.Linear(64, 64))
torch.manual_seed(10 + rank)
x = torch.randn(128, 64)
"""

SYNCHRONISED = (
    COMMON
    + """
loss = lambda: model(x).square().mean()
eager = observe(model, loss)
reference = observe(model, compiled(loss)[0])
torch._dynamo.reset()
run, planned = compiled(loss, budget=ROOMY, solver=Forgetful())
found = observe(model, run)
interface, result = planned[-1]
talking = [interface.graph.ops[o].name for o in result.plan.order if "_c10d_functional" in interface.graph.ops[o].kind]
run().backward()
model.zero_grad(set_to_none=True)
measured = measure_peak(lambda: run().backward())
near = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(eager.gradients, found.gradients))
print(json.dumps({
    "differs": reference.differs(found), "near": near, "talking": talking, "recomputes": recomputes(planned),
    "statistics": [b.double().sum().item() for n, b in model.named_buffers()],
    "measured": measured, "planned": planned_bytes(planned),
}))
dist.destroy_process_group()
"""
)

PARALLEL = (
    COMMON
    + """
from torch.nn.parallel import DistributedDataParallel
def trained(**options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = mlp(6)
    run = torch.compile(DistributedDataParallel(net), backend="checkmate", options=options)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    torch.manual_seed(20 + rank)
    for _ in range(3):
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [loss.detach(), *[p.detach() for p in net.parameters()], torch.get_rng_state()]
kept, planned = trained(), trained(budget="75%", time_limit_s=5)
print(json.dumps({
    "same": all(torch.equal(a, b) for a, b in zip(kept, planned)),
    "parameters": [p.double().sum().item() for p in planned[1:-1]],
}))
dist.destroy_process_group()
"""
)


def both(code: str) -> list[Any]:
    """What two processes that know each other print last, as JSON."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(rank), str(port)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=300) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], done[0][1][-3000:] + done[1][1][-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def test_synchronised_statistics() -> None:
    """Moments over both batches: gathered once a layer and step, though all around them is computed again."""
    first, second = both(SYNCHRONISED)
    for found in (first, second):
        assert found["differs"] == []
        assert found["near"]
        assert found["recomputes"] > 5
        assert found["measured"] <= found["planned"] + 64
    assert len(first["talking"]) == len(set(first["talking"])) >= 4
    assert first["talking"] == second["talking"]
    assert first["statistics"] == second["statistics"]


def test_data_parallel_training() -> None:
    """A model in `DistributedDataParallel`, compiled: parameters equal in both processes, and to keeping everything."""
    first, second = both(PARALLEL)
    assert first["same"]
    assert second["same"]
    assert first["parameters"] == second["parameters"]
