"""Whatever trains with ``backend="aot_eager"`` trains with ours at ``"100%"``, with the same bits."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import checkmate.torch
from checkmate.torch.steps.coordinator import coordinator

Compile = Callable[[Any], Any]
QUICK = {"time_limit_s": 2}

# Dynamo looks at the gradient of every input.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def mlp(blocks: int = 3, width: int = 32) -> nn.Sequential:
    parts = [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)]
    return nn.Sequential(*parts)


def overwritten_batch(compiled: Compile) -> list[torch.Tensor]:
    """The batch is normalised in place between forward and backward, as in fast_neural_style of pytorch/examples."""
    net = nn.Sequential(nn.ReflectionPad2d(2), nn.Conv2d(3, 8, 5), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))
    run = compiled(net)
    for _ in range(3):
        x = torch.rand(2, 3, 16, 16)
        y = run(x)
        x.div_(255.0)
        (y - x).square().mean().backward()
    return [p.grad for p in net.parameters()]  # type: ignore[misc]


def sparse_in_eager_code(compiled: Compile) -> list[torch.Tensor]:
    """Dynamo takes no sparse tensor: what is done with it runs between graphs."""
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    adjacency = (torch.rand(30, 30) < 0.1).float().to_sparse()
    one, two = compiled(first), compiled(last)
    for _ in range(3):
        two(F.relu(torch.mm(adjacency, one(torch.randn(30, 8))))).square().mean().backward()
    return [p.grad for p in (*first.parameters(), *last.parameters())]  # type: ignore[misc]


def sparse_gradients(compiled: Compile) -> list[torch.Tensor]:
    """The documented way to have sparse gradients: the embedding is not compiled."""
    table, net = nn.Embedding(50, 32, sparse=True), mlp(2)
    run = compiled(net)
    for _ in range(3):
        run(torch.compiler.disable(table)(torch.randint(50, (8,)))).square().mean().backward()
    return [table.weight.grad.to_dense(), *(p.grad for p in net.parameters())]  # type: ignore[union-attr, list-item]


def copies_of_saved_tensors(compiled: Compile) -> list[torch.Tensor]:
    """Hooks that copy what autograd saves, as those do that write it to a disk."""
    net = mlp()
    run = compiled(net)
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            loss = run(torch.randn(16, 32)).square().mean()
        loss.backward()
    return [p.grad for p in net.parameters()]  # type: ignore[misc]


class Dropped(nn.Module):
    """A block that draws random numbers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(16, hidden), nn.Linear(hidden, 16), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.b(F.relu(self.a(x))))


def checkpoint_around_compiled_blocks(compiled: Compile) -> list[torch.Tensor]:
    """The layout of several trainers: each block is compiled, and checkpointed by eager code."""
    blocks = nn.ModuleList(Dropped(hidden) for hidden in (32, 64, 32))
    runs = [compiled(block) for block in blocks]
    for _ in range(3):
        x = torch.randn(64, 16)
        for run in runs:
            x = checkpoint(run, x, use_reentrant=False)  # type: ignore[assignment]
        x.square().mean().backward()
    return [p.grad for p in blocks.parameters()]  # type: ignore[misc]


def profiled(compiled: Compile) -> list[torch.Tensor]:
    """A profiler of the user is active in the steps that are planned."""
    net = mlp()
    run = compiled(net)
    for _ in range(3):
        with torch.profiler.profile(profile_memory=True):
            run(torch.randn(16, 32)).square().mean().backward()
    return [p.grad for p in net.parameters()]  # type: ignore[misc]


PROGRAMS = [
    overwritten_batch, sparse_in_eager_code, sparse_gradients, copies_of_saved_tensors,
    checkpoint_around_compiled_blocks, profiled,
]  # fmt: skip


def trained(program: Callable[[Compile], list[torch.Tensor]], backend: str, **options: Any) -> list[torch.Tensor]:
    torch._dynamo.reset()
    coordinator().forget_steps()
    torch.manual_seed(0)
    return program(lambda model: torch.compile(model, backend=backend, **({"options": options} if options else {})))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_aot_eager_trains_is_trained_with_the_same_bits(program: Callable[[Compile], list[torch.Tensor]]) -> None:
    wanted = trained(program, "aot_eager")
    got = trained(program, "checkmate", budget="100%", **QUICK)
    assert all(map(torch.equal, wanted, got))


def test_lossy_hooks_give_the_same_bits_at_every_budget(caplog: pytest.LogCaptureFixture) -> None:
    """What is saved passes through them, so that it must not depend on the plan. That no budget is kept then is said once."""

    def program(compiled: Compile) -> list[torch.Tensor]:
        net = mlp()
        run = compiled(net)
        for _ in range(3):
            with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.bfloat16, torch.Tensor.float):
                loss = run(torch.randn(16, 32)).square().mean()
            loss.backward()
        return [p.grad for p in net.parameters()]  # type: ignore[misc]

    everything = trained(program, "checkmate", budget="100%", **QUICK)
    caplog.clear()
    half = trained(program, "checkmate", budget="50%", **QUICK)
    assert all(map(torch.equal, everything, half))
    assert caplog.text.count("saved_tensors_hooks are active") == 1


BACKWARD_INSIDE = """
import faulthandler, logging, sys
faulthandler.dump_traceback_later(240, exit=True)  # it once waited for a lock that its own thread held
import torch
from torch import nn
torch.set_num_threads(1)
found = []
for backend, options in (("aot_eager", None), ("checkmate", {"budget": "100%", "time_limit_s": 2})):
    torch._dynamo.reset(); torch.manual_seed(0)
    net = nn.Sequential(*[part for _ in range(3) for part in (nn.Linear(32, 32), nn.Tanh())])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    def train_step(x):
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
    run = torch.compile(train_step, backend=backend, options=options)
    for _ in range(3):
        loss = run(torch.randn(16, 32))
    found.append((loss.item(), [p.sum().item() for p in net.parameters()]))
sys.exit(found[0] != found[1])
"""


@pytest.mark.slow
def test_a_backward_inside_of_a_compiled_function_returns() -> None:
    """With the optimizer, as in PyTorch's own tutorials. In a separate process, since it would not return."""
    done = subprocess.run([sys.executable, "-c", BACKWARD_INSIDE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_call_of_which_nothing_can_be_planned_runs_at_100_percent(caplog: pytest.LogCaptureFixture) -> None:
    """Keeping everything keeps that budget without any plan; below it the call is refused."""
    adjacency = (torch.rand(30, 30) < 0.1).float().to_sparse()
    weight = torch.randn(30, 4, requires_grad=True)

    def multiply(adjacency: torch.Tensor) -> torch.Tensor:
        return torch.mm(adjacency, weight)

    with caplog.at_level(logging.WARNING):
        torch.compile(multiply, backend="checkmate", options={"budget": "100%"})(adjacency).sum().backward()
    assert "nothing of this call is planned" in caplog.text
    torch._dynamo.reset()
    with pytest.raises(checkmate.torch.NothingPlannedError):
        torch.compile(multiply, backend="checkmate", options={"budget": "90%"})(adjacency)
