"""How a budget travels: its text is parsed once, and it becomes bytes once, on every path from the user to the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
import checkmate.torch
from checkmate import Budget
from checkmate.core.budget import fixed_bytes, keep_all_bytes
from checkmate.core.graph import Graph
from checkmate.torch.backend import compile_graph
from checkmate.torch.compilation.resident_account import Hooks
from checkmate.torch.options import Options
from tests.torch.steps import functorch_settings

OPTIONS = {"budget": "60%", "time_limit_s": 2, "costs": "estimated"}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often a share was parsed, and for how many graphs it was resolved, where no earlier run has left compiled code."""
    counted: Counter[str] = Counter()
    graphs = set[str]()
    parse, resolve = Budget.parse.__func__, Budget.resolve  # type: ignore[attr-defined]

    def counting_parse(cls: type[Budget], amount: Any) -> Budget:
        counted["parsed"] += isinstance(amount, str) and amount.endswith("%")
        return parse(cls, amount)

    def counting_resolve(self: Budget, graph: Graph) -> int:
        graphs.update([graph.digest] * (self.total_bytes is None))
        counted["resolved"] = len(graphs)
        return resolve(self, graph)

    for name, counting in {"parse": classmethod(counting_parse), "resolve": counting_resolve}.items():
        monkeypatch.setattr(Budget, name, counting)
    with functorch_settings(enable_autograd_cache=False):
        yield counted


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(6))), torch.randn(256, 64)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_the_backend_parses_and_resolves_once(calls: Counter[str], compiler: str) -> None:
    """A share that is resolved against two graphs is two budgets."""
    model, x = network()
    step = torch.compile(lambda x: model(x).square().mean(), backend="checkmate", options={**OPTIONS, "compiler": compiler})
    step(x).backward()
    assert calls == {"parsed": 1, "resolved": 1}


@pytest.mark.slow
def test_a_whole_step_parses_and_resolves_once(calls: Counter[str]) -> None:
    """From the call to the plan, and not again when the step runs."""
    model, x = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = checkmate.torch.compile(model, nn.functional.mse_loss, optimizer, example=(x, x), **OPTIONS)  # type: ignore[arg-type]
    step(x, x)
    assert step.result.budget_bytes == Budget.parse("60%").resolve(step.graph)
    assert calls == {"parsed": 2, "resolved": 1}  # one is parsed in the line above


def test_the_command_line_parses_and_resolves_once(calls: Counter[str], inside: Path) -> None:
    """`checkmate plan` reports the budget that it plans for."""
    from checkmate.cli import main

    chain = Graph.from_dag(cost=[1] * 6, size_bytes=[100] * 6, edges=[(i, i + 1) for i in range(5)], kept=[5])
    checkmate.write(chain, inside / "chain.graph.json")
    assert main(["plan", "chain.graph.json", "--budget", "100%", "--json"]) == 0
    assert calls == {"parsed": 1, "resolved": 1}


class Wide(nn.Module):
    """A small CNN whose gradients outweigh its activations, as those of a ResNet do at batch 4; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 32, 3)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(32 * 14 * 14, 100)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.blocks(self.stem(x)).flatten(1)), y)


def test_a_share_is_the_same_of_a_model_with_large_gradients_on_both_paths() -> None:
    """Counted among what is shared, its gradients alone would be above the share, and every plan be refused."""
    model, (x, y) = Wide(), (torch.randn(2, 3, 16, 16), torch.tensor([3, 7]))
    step = checkmate.torch.compile(model, example={"x": x, "y": y}, **OPTIONS)  # type: ignore[arg-type]
    planned: list[int] = []
    hooks = Hooks(planned=lambda capture, result: planned.append(result.budget_bytes))
    run = torch.compile(model, backend=lambda gm, inputs: compile_graph(gm, inputs, Options(**OPTIONS), hooks), fullgraph=True)
    run(x, y).backward()
    assert planned == [step.result.budget_bytes]
    graph = step.graph
    gradients, above = fixed_bytes(graph) - graph.resident_bytes, keep_all_bytes(graph) - graph.resident_bytes
    assert gradients > 0.6 * above
    assert graph.resident_bytes + gradients < step.result.peak_bytes <= step.result.budget_bytes
