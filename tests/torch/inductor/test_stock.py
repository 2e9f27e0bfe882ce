"""PyTorch's own partitions: plans of the captured graph, whose code is counted beside that of our plans."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from checkmate import Graph, Op, Plan, Value, validate
from checkmate.core.graph import BOUNDARY
from checkmate.cost.store import OpCost
from checkmate.frontend.planner import keep_everything
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.aot import aot_autograd, boxed, default_partition
from checkmate.torch.compilation.compilation import Compilation, Hooks
from checkmate.torch.graph.traced import copy_graph
from checkmate.torch.inductor.search import CalibratedSearch
from checkmate.torch.inductor.stock import as_stock
from checkmate.torch.joint.capture import capture_joint
from checkmate.torch.options import Options

ROOT = Path(__file__).parents[3]


def joint(model: nn.Module, x: torch.Tensor) -> fx.GraphModule:
    """Forward and backward of a model and its loss in one graph."""
    found: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        found.append(fx.GraphModule(module, copy_graph(module.graph)))
        return default_partition(module, inputs, **kwargs)

    backend = aot_autograd(fw_compiler=lambda module, inputs: boxed(module), partition_fn=keep)
    torch._dynamo.reset()
    torch.compile(lambda: model(x).square().mean(), backend=backend)()
    return found[0]


def test_a_partition_of_pytorch_is_a_plan() -> None:
    """The factors of a gradient are computed again in the kernel that reads them; equal ops are merged, as in stock Inductor."""
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Tanh(), nn.Linear(64, 32))
    module = joint(model, torch.randn(16, 32))
    recapture = functools.partial(capture_joint, num_fwd_outputs=1, costs=lambda nodes: [OpCost(1, 0)] * len(nodes))
    capture, partitions = as_stock(recapture(module), recapture)
    assert partitions is not None
    plans = [Plan.from_order(capture.graph, partitions(budget) or ()) for budget in (1.0, 0.1)]
    assert not any(validate(capture.graph, plan) for plan in plans)
    saved = [StepMemory.of(capture.graph, plan).saved_bytes for plan in (keep_everything(capture.graph).plan, *plans)]
    assert saved[0] >= saved[1] > saved[2]


def two_layers() -> Graph:
    """A forward of two ops, and their backward."""
    ops = (
        Op("a", (), (0,), 10),
        Op("b", (0,), (1,), 10),
        Op(BOUNDARY, (1,), (2,), cost=0, recomputable=False, phase="loss", kind=BOUNDARY),
        Op("db", (0, 2), (3,), 10, phase="backward"),
        Op("da", (0, 3), (4,), 10, phase="backward"),
    )
    return Graph(ops, (Value("a", 100), Value("b", 4), Value("tangent", 4), Value("db", 100), Value("da", 100, kept=True)))


KEPT, AGAIN, TWICE = (0, 1, 2, 3, 4), (0, 1, 2, 0, 3, 4), (0, 1, 2, 0, 3, 0, 4)


@pytest.mark.parametrize(
    ("budget", "costs", "tried", "chosen"),
    [
        (None, {KEPT: 50, AGAIN: 40}, [KEPT, AGAIN], AGAIN),  # kept, and the partition for 1.0
        (None, {KEPT: 40, AGAIN: 50}, [KEPT, AGAIN], KEPT),
        (400, {KEPT: 50, AGAIN: 40, TWICE: 45}, [KEPT, AGAIN, TWICE], TWICE),  # that for 1.0 takes more than the budget
        (400, {KEPT: 50, AGAIN: 60, TWICE: 70}, [KEPT, AGAIN], KEPT),  # and the next ones would cost still more
    ],
)
def test_the_cheapest_code_that_fits_is_chosen(
    budget: int | None, costs: dict[tuple[int, ...], int], tried: list[tuple[int, ...]], chosen: tuple[int, ...]
) -> None:
    """Op by op a partition costs more; its code may not. Of PyTorch's partitions the first that fits ends the search."""
    options = Options(budget=budget, compiler="inductor", time_limit_s=1)
    search = CalibratedSearch(Compilation(fx.Graph(), (), options, Hooks()), "some compiler")

    def partitions(fraction: float) -> tuple[int, ...]:
        return AGAIN if fraction > 0.8 else TWICE

    peaks, made = {KEPT: 350, AGAIN: 500, TWICE: 320}, []

    def compiled() -> StepMemory:
        _, result = search.plan(two_layers(), partitions=partitions)
        made.append(result.plan.order)
        return StepMemory(forward_peak_bytes=0, saved_bytes=0, backward_peak_bytes=peaks[made[-1]], gradient_bytes=0)

    measured = lambda index: search.trials[index].outcome.memory  # noqa: E731
    best = search.choose(compiled(), compiled, measured, lambda index: costs[made[index]])
    assert made == tried
    assert best is not None
    assert made[best] == chosen


@pytest.mark.skipif(
    torch.version.cuda is None or importlib.util.find_spec("triton") is None, reason="needs a CUDA build of PyTorch, and Triton"
)
def test_code_for_an_h100_is_no_worse_than_that_of_stock_inductor(tmp_path: Path) -> None:
    """Kernels, moved bytes and peak, keeping everything; bytes within the peaks of stock's budgets. No GPU is needed."""
    script = ROOT / "benchmarks" / "torch_h100_code.py"
    command = [sys.executable, "-W", "ignore", str(script), "--child", "tiny", "1", "1"]
    environment = {**os.environ, "CHECKMATE_CACHE": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    answer = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert answer is not None, done.stderr
    row = json.loads(answer.removeprefix("RESULT "))
    from benchmarks.torch_h100_code import verdict

    assert verdict("tiny", row) == []
