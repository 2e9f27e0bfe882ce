"""Gradients that exist before a step and are set to None before its backward count in its forward alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from checkmate import InfeasibleBudgetError
from checkmate.torch import measure_peak
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.steps import live_bytes

WIDTH, LAYERS, ROWS = 256, 6, 64
GRADIENTS = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)


class Loop:
    """A loop in which `zero_grad` comes after the forward, in the steps for which it is called.

    Args:
        budget: The budget.
        inside: Whether the loss is a part of the graph.
        clears: Whether gradients are set to None in a step, by its number.

    Attributes:
        peaks: Measured peak of each step.
        planned: Planned peak of each step.
    """

    def __init__(
        self, budget: object, *, inside: bool = False, clears: Callable[[int], bool] = lambda _: True, steps: int = 4
    ) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return self.net(x).square().mean()

        options = {"budget": budget, "costs": "estimated", "time_limit_s": 3}
        called: Any = torch.compile(loss_of if inside else self.net, backend="checkmate", options=options)
        optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        x = torch.randn(ROWS, WIDTH)
        self.peaks: list[int] = []
        self.planned: list[int] = []

        def step(number: int) -> None:
            result = called(x)
            loss = result if inside else result.square().mean()
            if clears(number):
                optimizer.zero_grad()
            loss.backward()

        for number in range(steps):
            before = live_bytes()
            self.peaks.append(before + measure_peak(lambda number=number: step(number)))
            self.planned.append(coordinator().step_bytes or 0)
            optimizer.step()


@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
def test_the_planned_peak_is_the_measured_one(inside: bool) -> None:
    """The second step does not know it yet, and leaves room for gradients of both steps in its backward."""
    loop = Loop("100%", inside=inside)
    assert loop.planned[1] > loop.peaks[1]
    assert all(0 <= planned - peak <= 64 for planned, peak in zip(loop.planned[2:], loop.peaks[2:], strict=True))


def test_a_budget_that_eager_code_keeps_is_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    """No plan keeps it beside the gradients of two steps. That it may be exceeded is said before it is known to be kept."""
    budget = max(Loop("100%").peaks) + 64
    torch._dynamo.reset()
    coordinator().forget_steps()
    loop = Loop(budget)
    assert max(loop.peaks) <= budget
    said = [r.getMessage() for r in caplog.records if "gradients of the step before" in r.getMessage()]
    assert len(said) == 1 and "may be exceeded by" in said[0]


def test_gradients_that_are_kept_after_all_are_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    """A loop that clears them in some steps alone: the first step that does not is said to have exceeded the budget."""
    loop = Loop("100%", clears=lambda number: number != 3, steps=6)
    assert [r.getMessage() for r in caplog.records if "were expected to be set to None" in r.getMessage()]
    assert loop.peaks[3] > loop.planned[3]
    assert all(planned >= peak for planned, peak in zip(loop.planned[4:], loop.peaks[4:], strict=True))


def test_gradients_that_no_plan_has_room_for_are_refused() -> None:
    """A loop that accumulates is refused once it is known to, and not run over its budget for good."""
    budget = max(Loop("100%").peaks) + 64
    torch._dynamo.reset()
    coordinator().forget_steps()
    with pytest.raises(InfeasibleBudgetError):
        Loop(budget, clears=lambda _: False)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch._dynamo looks
def test_gradients_of_eager_layers_count_once_whatever_step_made_them() -> None:
    """Those of a layer outside of every graph, and batches of two sizes: the step before was of another kind."""
    torch.manual_seed(0)
    first, outside, last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    net = nn.ModuleList([first, outside, last])

    @torch.compiler.disable
    def eager(x: torch.Tensor) -> torch.Tensor:
        return outside(x)

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = eager(torch.tanh(first(x)))
        return last(torch.tanh(hidden))

    options = {"budget": "100%", "costs": "estimated", "time_limit_s": 3}
    called: Any = torch.compile(forward, backend="checkmate", dynamic=False, options=options)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def step(x: torch.Tensor) -> None:
        loss = called(x).square().mean()
        optimizer.zero_grad()
        loss.backward()

    for number, rows in enumerate((64, 64, 32, 64, 32, 64, 32)):
        x = torch.randn(rows, WIDTH)
        before = live_bytes()
        peak = before + measure_peak(lambda x=x: step(x))
        planned = coordinator().step_bytes or 0
        optimizer.step()
        if number in (3, 5):  # after a step of the other kind
            assert 0 <= planned - peak <= 64
