"""Memory that no graph of a step is given: parameters that none reads, and outputs of eager code that the user holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkmate.torch import measure_peak
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.compilation.test_coordinator import QUICK, Classifier, Ran
from tests.torch.steps import close, live_bytes


class WithUnused(Classifier):
    """A parameter and a buffer that take no part in the step."""

    def __init__(self, *, loss: bool) -> None:
        super().__init__(2, classes=64)
        self.unused = nn.Parameter(torch.zeros(200_000))
        self.register_buffer("count", torch.zeros(100_000))
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = super().forward(x)
        return z.square().mean() if self.loss else z


@pytest.mark.parametrize("loss", [True, False], ids=["one graph", "loss outside"])
def test_parameters_that_no_graph_reads_are_resident(loss: bool) -> None:
    model, x = WithUnused(loss=loss), torch.randn(512, 64)

    def step(run: Callable[..., Any]) -> torch.Tensor:
        return run(x) if loss else run(x).square().mean()

    ran = Ran(model, step, "60%")
    result = coordinator().result
    assert result is not None
    assert max(ran.peaks) <= result.budget_bytes
    assert close(ran.peaks[-1], result.peak_bytes)


class WithEagerHead(nn.Module):
    """Logits and loss are made by eager code after the only graph, and both are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Classifier(3, classes=64)
        self.head = nn.Linear(64, 512, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.classify(self.trunk(x), y)

    @torch.compiler.disable
    def classify(self, z: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(z)
        return F.cross_entropy(logits, y), logits


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_held_outputs_of_eager_code_are_in_the_budget() -> None:
    """Eager code is seen in the first step only. The logits of the step before are held until those of this one are returned."""
    model, x, y = WithEagerHead(), torch.randn(512, 64), torch.randint(512, (512,))
    torch._dynamo.reset()
    coordinator().forget_steps()
    run = torch.compile(model, backend="checkmate", options={"budget": "70%", **QUICK})
    held: list[torch.Tensor] = []

    def step() -> None:
        held[:] = run(x, y)
        held[0].backward()

    step()
    held.clear()  # the profiler does not see a tensor freed whose allocation it has not seen
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        peak, plan = live_bytes() + measure_peak(step), coordinator().step
        assert plan is not None
        assert close(peak, plan.result.peak_bytes)
        assert peak <= plan.result.budget_bytes


@pytest.mark.parametrize("eager", [False, True], ids=["of a graph", "of eager code"])
def test_outputs_that_are_held_until_the_next_step_is_over(eager: bool, caplog: pytest.LogCaptureFixture) -> None:
    """``outputs = train(batch)``: the old ones are freed when the function returns. That is seen once, and then planned for."""
    model, x = Classifier(6, classes=512), torch.randn(512, 64)
    torch._dynamo.reset()
    coordinator().forget_steps()
    run = torch.compile(model, backend="checkmate", options={"budget": "60%", **QUICK})
    held: list[torch.Tensor] = []

    def train() -> torch.Tensor:
        outputs = run(x) * 2 if eager else run(x)
        outputs.square().mean().backward()
        return outputs.detach()

    def step() -> None:
        held[:] = [train()]

    for _ in range(3):
        step()
        model.zero_grad(set_to_none=True)
    assert caplog.text.count("outputs of the step before were held until this step was over") == 1
    peak, plan = live_bytes() + measure_peak(step), coordinator().step
    assert plan is not None
    assert close(peak, plan.result.peak_bytes)
    assert peak <= plan.result.budget_bytes


class Recompiled(Classifier):
    """The first forward sets an attribute that Dynamo guards: it compiles the same graph once more for the second."""

    def __init__(self) -> None:
        super().__init__(6, classes=64)
        self.kind: str | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kind is None:
            self.kind = "regression"
        z = super().forward(x)
        return z.square().mean(), z


@pytest.mark.slow
def test_a_graph_that_is_compiled_again_has_the_plan_of_the_step() -> None:
    model, x = Recompiled(), torch.randn(512, 64)
    graphs: list[Any] = []

    def step(run: Callable[..., Any]) -> torch.Tensor:
        loss = run(x)[0]
        graphs.append(coordinator().step)
        return loss

    ran = Ran(model, step, "50%")
    assert [plan is not None for plan in graphs] == [False, True, True]
    assert max(ran.peaks) <= graphs[1].result.budget_bytes
    model.kind = None
    assert ran.same(Ran(model, step, "100%"))


class ManyOutputs(Classifier):
    """A loss and all activations: the graph is compiled as if gradients flowed into all of them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = [x]
        for block in self.blocks:
            outputs.append(outputs[-1] + block(outputs[-1]))
        return self.head(outputs[-1]).square().mean(), *(z.repeat(1, 4) for z in outputs[1:])


def test_a_first_step_that_may_exceed_its_share_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    """The share is of what the step takes without the gradients that do not exist, and smaller than it seems at first."""
    model, x = ManyOutputs(6, classes=16), torch.randn(512, 64)
    torch._dynamo.reset()
    coordinator().forget_steps()
    run = torch.compile(model, backend="checkmate", options={"budget": "30%", **QUICK})

    def step() -> None:
        outputs = run(x)
        outputs[0].backward()

    for _ in range(2):
        step()
        model.zero_grad(set_to_none=True)
    planned = coordinator().step
    assert planned is not None
    coordinator().forget_steps()
    caplog.clear()
    assert live_bytes() + measure_peak(step) > planned.result.budget_bytes
    assert "a first step may take up to" in caplog.text


@pytest.mark.parametrize("forwards", [1, 2])
def test_a_first_step_whose_loss_takes_more_than_the_budget_is_announced(forwards: int, caplog: pytest.LogCaptureFixture) -> None:
    """The graph alone keeps the budget; what the loss outside takes is seen, and is said before most of it is taken."""
    model, x = nn.Linear(64, 64), torch.randn(1024, 64)
    run = torch.compile(model, backend="checkmate", options={"budget": "2MiB", **QUICK})

    def step() -> None:
        scores = [F.softmax(run(x).repeat(1, 4), 1).log().square() for _ in range(forwards)]
        torch.stack([score.mean() for score in scores]).sum().backward()

    peak = live_bytes() + measure_peak(step)
    said = [float(amount) for amount in re.findall(r"a first step may take up to ([\d.]+) MiB", caplog.text)]
    assert said
    assert 2 < peak / 2**20 <= max(said) + 0.005
    assert len(said) <= 3


@pytest.mark.parametrize("chunking", ["exact", "auto"])
def test_a_first_step_at_100_percent_keeps_everything(chunking: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it takes is what everything takes, and nothing is computed twice, although other graphs are not known yet."""
    model, x = Classifier(3, classes=64), torch.randn(512, 64)
    torch._dynamo.reset()
    coordinator().forget_steps()
    run = torch.compile(model, backend="checkmate", options={"budget": "100%", "chunking": chunking, **QUICK})
    F.softmax(run(x).repeat(1, 4), 1).log().square().mean().backward()
    assert "may take" not in caplog.text
    assert coordinator().result is not None and coordinator().result.overhead == 1


def test_a_step_of_another_kind_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    """It runs plans of its graphs that know nothing of each other, and may exceed the budget until it is planned."""
    model, x = Classifier(3, classes=64), torch.randn(512, 64)
    torch._dynamo.reset()
    coordinator().forget_steps()
    run = torch.compile(model, backend="checkmate", options={"budget": "3MiB", **QUICK})
    for _ in range(2):
        run(x).square().mean().backward()
        model.zero_grad(set_to_none=True)
    caplog.clear()
    (run(x) + run(-x) + run(2 * x)).square().mean().backward()
    assert "a step that runs other graphs than those before may take up to" in caplog.text
