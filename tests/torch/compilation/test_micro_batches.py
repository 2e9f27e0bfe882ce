"""Steps of several micro batches: the gradients exist once, and plans say so to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkmate.torch import measure_peak
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.compilation.test_accumulation import QUICK
from tests.torch.steps import compiled, live_bytes

WIDTH, WORDS = 64, 128
# Dynamo asks a tensor between two graphs for its gradient, and torch warns of that.
pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Language(nn.Module):
    """A language model whose gradients are larger than its activations.

    Args:
        inside: Whether the loss is part of it.
        broken: Whether it is two graphs.
        tied: Whether embedding and head share a weight.
    """

    def __init__(self, *, inside: bool = True, broken: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.inside, self.broken = inside, broken
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks[:1]:
            h = h + block(h)
        if self.broken:
            torch._dynamo.graph_break()
        for block in self.blocks[1:]:
            h = h + block(h)
        logits = self.head(h)
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


def micro_batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randint(WORDS, (4, 16), generator=generator), torch.randint(WORDS, (4, 16), generator=generator))] * count


class Accumulated:
    """Three steps of four micro batches each, in a plain loop.

    Attributes:
        gradients: The accumulated gradients of the last step.
        peaks: Measured peak of each micro batch of the last step, above the memory at its begin.
        planned: Planned peaks, above the same; none without a budget.
    """

    def __init__(self, model: Language, budget: str | None) -> None:
        torch._dynamo.reset()
        coordinator().forget_steps()
        options: dict[str, Any] = {} if budget is None else {"options": {"budget": budget, **QUICK}}
        run = torch.compile(model, backend="aot_eager" if budget is None else "checkmate", **options)
        parameters = list(model.parameters())

        def micro(x: torch.Tensor, y: torch.Tensor) -> None:
            loss = run(x, y) if model.inside else F.cross_entropy(run(x).flatten(0, 1), y.flatten())
            loss.backward()

        for step in range(3):
            model.zero_grad(set_to_none=True)
            self.peaks: list[int] = []
            self.planned: list[int] = []
            for x, y in micro_batches():
                before = {id(p): p.grad.data_ptr() for p in parameters if p.grad is not None}
                resident = live_bytes()
                if step < 2:
                    micro(x, y)
                else:
                    self.peaks.append(measure_peak(lambda x=x, y=y: micro(x, y)))  # type: ignore[misc]
                    self.planned.append((coordinator().step_bytes or 0) - resident)
                assert all(p.grad.data_ptr() == before.get(id(p), p.grad.data_ptr()) for p in parameters if p.grad is not None)
        self.gradients = [p.grad.clone() for p in parameters if p.grad is not None]
        model.zero_grad(set_to_none=True)


KINDS: dict[str, dict[str, bool]] = {
    "plain": {},
    "broken": {"broken": True},
    "outside": {"inside": False},
    "tied": {"tied": True},
    "all": {"inside": False, "broken": True, "tied": True},
}


@pytest.mark.parametrize(
    ("name", "budgets"),
    [("plain", ["60%"]), *(pytest.param(name, ["100%", "70%", "60%"], marks=pytest.mark.slow) for name in KINDS)],
)
def test_micro_batches_take_one_gradient_more_than_one_backward(name: str, budgets: list[str]) -> None:
    """No second set of gradients exists, and plans say so to the byte."""
    torch.manual_seed(0)
    model = Language(**KINDS[name])
    largest = max(p.nbytes for p in model.parameters())
    wanted = Accumulated(model, None)
    for budget in budgets:
        found = Accumulated(model, budget)
        assert all(map(torch.equal, wanted.gradients, found.gradients))
        assert max(found.peaks[1:]) <= found.peaks[0] + largest
        assert found.peaks == found.planned
        if "tied" not in KINDS[name]:  # gradients are larger than activations here
            assert max(found.peaks[1:]) < found.peaks[0] - largest / 2


@pytest.mark.parametrize("broken", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_that_exist_before_anything_is_compiled(broken: bool) -> None:
    """As after training without compilation: autograd adds to them once. A later step without any has a plan that holds, too."""
    torch.manual_seed(0)
    model = Language(broken=broken)
    (x, y), *_ = micro_batches()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    # AOTAutograd of PyTorch 2.11 holds the gradients that a backward is given until it is over: nothing can be given up.
    budget = "95%" if torch.__version__ >= (2, 13) else "100%"
    run = torch.compile(model, backend="checkmate", options={"budget": budget, **QUICK})
    resident = sum(p.nbytes for p in model.parameters()) + x.nbytes + y.nbytes
    for existing in (True, True, False, True):
        if not existing:
            model.zero_grad(set_to_none=True)
        run(x, y).backward()
    took = measure_peak(lambda: run(x, y).backward())
    assert took == (coordinator().step_bytes or 0) - resident - sum(p.nbytes for p in model.parameters())
    model.zero_grad(set_to_none=True)
    took = measure_peak(lambda: run(x, y).backward())
    # A plan for existing gradients leaves room for what there was.
    assert took <= (coordinator().step_bytes or 0) - resident


def test_with_accumulate_one_plan_serves_all_micro_batches() -> None:
    """It is made for existing gradients before there are any."""
    torch.manual_seed(0)
    model = Language()
    run, planned = compiled(model, budget="70%", accumulate=True, **QUICK)
    for step in range(2):
        model.zero_grad(set_to_none=True)
        for i, (x, y) in enumerate(micro_batches()):
            took = measure_peak(lambda x=x, y=y: run(x, y).backward()) if step else run(x, y).backward()  # type: ignore[misc]
            assert coordinator().step is None
            interface, result = planned[-1]
            gradients = sum(p.nbytes for p in model.parameters())
            if step and i:
                assert took == result.peak_bytes - interface.graph.resident_bytes
            elif step:
                assert took <= result.peak_bytes - interface.graph.resident_bytes + gradients
    assert len(planned) == 1
