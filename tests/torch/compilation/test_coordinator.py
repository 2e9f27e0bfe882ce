"""A step as scripts have it: the loss outside of the model, several graphs, outputs that nobody differentiates through."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import checkmate.frontend.planner as planners
from checkmate import InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.units import parse_bytes
from checkmate.frontend import plan_store
from checkmate.torch import LateGradientError, measure_peak
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.networks import input_of, mlp
from tests.torch.steps import close, compiled, live_bytes, observe, planned_bytes

# The second step plans. Where costs as measured make regions worth looking for, it compares the bits of whole arrays too.
QUICK = {"time_limit_s": 1.0, "chunking": "off", "costs": "estimated"}
# Dynamo asks a tensor between two graphs for its gradient, and torch warns of that.
pytestmark = [
    pytest.mark.usefixtures("nothing_in_flight"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Ran:
    """Steps of a model compiled with ``torch.compile(..., backend="checkmate")``, as a user's script runs them.

    Attributes:
        peaks: Measured peak of each step but the first, resident bytes included.
        gradients: Gradients of the last step.
        losses: Loss of each step.
    """

    def __init__(
        self, model: nn.Module, step: Callable[[Callable[..., Any]], torch.Tensor], budget: object, steps: int = 3
    ) -> None:
        torch._dynamo.reset()
        coordinator().forget_steps()
        run = torch.compile(model, backend="checkmate", options={"budget": budget, **QUICK})
        self.peaks: list[int] = []
        self.losses: list[torch.Tensor] = []

        def once() -> None:
            torch.manual_seed(4)
            loss = step(run)
            loss.backward()
            self.losses.append(loss.detach())

        for i in range(steps):
            model.zero_grad(set_to_none=True)
            if i:
                self.peaks.append(live_bytes() + measure_peak(once))
            else:
                once()
        self.gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)

    def same(self, other: Ran) -> bool:
        """Whether losses and gradients are equal to the bit."""
        pairs = [*zip(self.gradients, other.gradients, strict=True), *zip(self.losses, other.losses, strict=True)]
        return all(a is None if b is None else a is not None and torch.equal(a, b) for a, b in pairs)


class Classifier(nn.Module):
    """Logits that are large beside the rest, as those of a language model."""

    def __init__(self, blocks: int = 4, width: int = 64, classes: int = 256) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("share", [70, pytest.param(45, marks=pytest.mark.slow)])
def test_a_loss_outside_of_the_compiled_model_is_part_of_the_step(share: int) -> None:
    """What eager code allocates between forward and backward counts, and the peak is the planned one."""
    model, x, y = Classifier(), torch.randn(512, 64), torch.randint(256, (512,))

    def step(run: Callable[..., Any]) -> torch.Tensor:
        return F.cross_entropy(run(x), y)

    everything = Ran(model, step, "100%")
    ran = Ran(model, step, f"{share}%")
    plan = coordinator().step
    assert plan is not None
    assert max(ran.peaks) <= plan.result.budget_bytes < max(everything.peaks)
    assert close(ran.peaks[-1], plan.result.peak_bytes)
    assert ran.same(everything)


class Broken(nn.Module):
    """A model in as many graphs as it has parts."""

    def __init__(self, parts: int, *, broken: bool = True) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Classifier(2, classes=64) for _ in range(parts))
        self.broken = broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        if self.broken:
            torch._dynamo.graph_break()
        x = self.parts[1](x)
        if len(self.parts) > 2:
            if self.broken:
                torch._dynamo.graph_break()
            x = self.parts[2](x)
        return x.square().mean()


@pytest.mark.parametrize("parts", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_graphs_of_a_step_are_planned_as_one(parts: int) -> None:
    """Two graphs may be equal. At the same budget the overhead is near that without breaks.

    It cannot be equal for a model as small as this: nothing of an earlier graph can be recomputed for a later one.
    """
    torch.manual_seed(0)
    broken = Broken(parts)
    whole = Broken(parts, broken=False)
    whole.load_state_dict(broken.state_dict())
    x = torch.randn(512, 64)
    everything = Ran(broken, lambda run: run(x), "100%")
    ran = Ran(broken, lambda run: run(x), "55%")
    plan = coordinator().step
    assert plan is not None
    assert len(plan.graphs) == parts
    assert close(ran.peaks[-1], plan.result.peak_bytes)
    assert max(ran.peaks) <= plan.result.budget_bytes < max(everything.peaks)
    assert ran.same(everything)
    assert plan.result.gap < 0.05
    unbroken, planned = compiled(whole, budget=plan.result.budget_bytes, **QUICK)
    unbroken(x).backward()
    assert plan.result.overhead == pytest.approx(planned[0][1].overhead, abs=0.05)


@pytest.mark.usefixtures("own_cache")
def test_a_second_process_searches_for_no_plan_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for those of its first step, which runs before the step is known, nor for that of the step."""
    monkeypatch.setattr(plan_store, "_LEAST_S", 0.0)
    searches: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        search = getattr(planners, name)

        def run(*args: Any, **named: Any) -> Any:
            searches.append(name)
            return search(*args, **named)

        return run

    for name in ("quick_peak", "smallest_peak", "solve"):
        monkeypatch.setattr(planners, name, counted(name))
    torch.manual_seed(0)
    model, x = Broken(2), torch.randn(512, 64)
    first = Ran(model, lambda run: run(x), "55%", steps=2)
    plan = coordinator().step
    assert plan is not None and searches == ["quick_peak", "quick_peak", "solve"]
    searches.clear()
    second = Ran(model, lambda run: run(x), "55%", steps=2)
    again = coordinator().step
    assert again is not None and not searches
    assert again.result.plan == plan.result.plan
    assert first.same(second)


def test_one_graph_that_runs_twice_has_a_plan_for_each_place() -> None:
    """Two forwards before one backward: the second is not the first."""
    model, x = mlp(6), input_of("dropout", 1024)

    def step(run: Callable[..., Any]) -> torch.Tensor:
        return run(x).mean() + run(x).mean()

    everything = Ran(model, step, "100%")
    ran = Ran(model, step, "60%")
    plan = coordinator().step
    assert plan is not None
    assert len(plan.graphs) == 2
    assert plan.graphs[0] is plan.graphs[1]
    assert max(ran.peaks) <= plan.result.budget_bytes < max(everything.peaks)
    assert ran.same(everything)


class TwoOutputs(nn.Module):
    """A loss and the logits beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Classifier(classes=512)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.body(x)
        return F.cross_entropy(logits, y), logits


def test_a_gradient_that_is_not_defined_costs_nothing() -> None:
    """Logits that come back beside the loss, and are held: the peak is that of the loss alone and of the logits."""
    model, x, y = TwoOutputs(), torch.randn(256, 64), torch.randint(512, (256,))
    resident = live_bytes()
    held: list[torch.Tensor] = []

    def step(run: Callable[..., Any]) -> torch.Tensor:
        held.clear()
        loss, logits = run(x, y)
        held.append(logits)
        return loss

    ran = Ran(model, step, "100%")
    plan = coordinator().step
    assert plan is not None
    assert plan.programs[0].undefined == {1}
    assert held[0].requires_grad

    def eager() -> None:
        held.clear()
        loss, logits = model(x, y)
        held.append(logits)
        loss.backward()

    held.clear()
    torch.manual_seed(4)
    assert ran.peaks[-1] <= resident + measure_peak(eager) + 64
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), ran.gradients, strict=True))  # type: ignore[arg-type]


def test_a_gradient_that_comes_late_is_right_and_planned_for_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    """The step is not wrong, and the next ones are planned with it."""
    model, x, y = TwoOutputs(), torch.randn(64, 64), torch.randint(512, (64,))
    run = torch.compile(model, backend="checkmate", options={"budget": "1GiB", **QUICK})
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run(x, y)[0].backward()
    for late in (True, False):
        model.zero_grad(set_to_none=True)
        caplog.clear()
        loss, logits = run(x, y)
        (loss + logits.square().mean()).backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        loss, logits = model(x, y)
        (loss + logits.square().mean()).backward()
        for mine, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad)
        assert ("a gradient came for an output that had none before" in caplog.text) is late


@pytest.mark.parametrize("lost", ["freed", "overwritten"])
def test_a_late_gradient_without_its_inputs_is_an_error(lost: str) -> None:
    """Never a wrong gradient. The loss does not depend on the scale, so that no backward before has saved it."""
    model, y = TwoOutputs(), torch.randint(512, (64,))

    def scaled(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss, logits = model(x, y)
        return loss, logits * scale

    run = torch.compile(scaled, backend="checkmate", options={"budget": "1GiB", **QUICK})
    x, scale = torch.randn(64, 64), torch.randn(512)
    for _ in range(2):
        run(x, y, scale)[0].backward()
    loss, logits = run(x, y, scale)
    if lost == "freed":
        del scale
    else:
        scale.zero_()
    with pytest.raises(LateGradientError, match="has been freed"):
        (loss + logits.square().mean()).backward()


@pytest.mark.slow
def test_two_networks_one_of_which_is_only_run_forward() -> None:
    """The steps of a GAN: the discriminator's has a forward of the generator whose result is detached."""
    generator, discriminator = mlp(3, dropout=0.0), Classifier(3, classes=1)
    torch._dynamo.reset()
    coordinator().forget_steps()
    options = {"budget": "60%", **QUICK}
    made, judged = (torch.compile(m, backend="checkmate", options=options) for m in (generator, discriminator))
    x, z = torch.randn(1024, 64), torch.randn(1024, 64)

    def of_discriminator() -> None:
        (judged(x).mean() - judged(made(z).detach()).mean()).backward()

    def of_generator() -> None:
        judged(made(z)).mean().backward()

    for step in (of_discriminator, of_generator) * 3:
        for module in (generator, discriminator):
            module.zero_grad(set_to_none=True)
        step()
    resident = live_bytes()
    for step, graphs in ((of_discriminator, 2), (of_generator, 2)):
        for module in (generator, discriminator):
            module.zero_grad(set_to_none=True)
        peak = measure_peak(step)
        plan = coordinator().step
        assert plan is not None
        assert sum(program is not None for program in plan.programs) == graphs
        assert peak + resident <= plan.result.budget_bytes


def test_gradients_that_exist_are_planned_for() -> None:
    """A script that never clears its gradients is planned again, and keeps its budget."""
    model, x = mlp(8, width=128, dropout=0.0), torch.randn(1024, 128)
    resident = live_bytes()
    peak = resident + measure_peak(lambda: model(x).square().mean().backward())
    size = sum(p.nbytes for p in model.parameters())
    model.zero_grad(set_to_none=True)
    budget = int(0.7 * peak) + size
    run, _ = compiled(lambda: model(x).square().mean(), budget=budget, **QUICK)
    for i in range(4):
        took = measure_peak(lambda: run().backward()) if i > 1 else run().backward()
        assert i < 2 or resident + size + took <= budget  # type: ignore[operator]


def test_a_step_without_a_plan_is_refused_before_it_begins() -> None:
    """The first step shows what a step takes; the smallest budget that the refusal names is one."""
    model, x = mlp(4), input_of("dropout", 1024)
    run = torch.compile(lambda: model(x).mean(), backend="checkmate", options={"budget": "1.7MiB", **QUICK})

    def step(run: Callable[..., Any]) -> None:
        sum(run() for _ in range(20)).backward()  # type: ignore[union-attr]
        model.zero_grad(set_to_none=True)

    step(run)
    with pytest.raises((InfeasibleBudgetError, PlanNotFoundError)) as caught:
        step(run)
    assert all(p.grad is None for p in model.parameters())
    named = re.search(r"raise the budget to at least (\S+?)(?:,| \()", caught.value.hint)
    assert named is not None
    budget = named[1]
    torch._dynamo.reset()
    coordinator().forget_steps()
    run = torch.compile(lambda: model(x).mean(), backend="checkmate", options={"budget": budget, **QUICK})
    step(run)
    assert live_bytes() + measure_peak(lambda: step(run)) <= parse_bytes(budget)


def test_a_refusal_by_one_graph_of_a_step_does_not_promise_that_its_own_peak_is_enough() -> None:
    """What the loss outside takes is not known when the model is compiled. The hint names a budget that works."""
    model, x, y = Classifier(2), torch.randn(256, 64), torch.randint(256, (256,))

    def once(budget: str) -> None:
        run, _ = compiled(model, budget=budget, **QUICK)
        F.cross_entropy(run(x), y).backward()
        F.cross_entropy(run(x), y).backward()

    with pytest.raises(InfeasibleBudgetError) as refused:
        once("100KiB")
    assert "raise the budget to" not in refused.value.hint
    assert '"100%"' in refused.value.hint
    once("100%")


def test_a_step_that_turns_out_differently_runs_and_is_planned(caplog: pytest.LogCaptureFixture) -> None:
    """Another branch, and back again."""
    model, x = Broken(2), torch.randn(256, 64)
    run, _ = compiled(model, fullgraph=False, budget="80%", **QUICK)

    def twice() -> torch.Tensor:
        return run(x) + run(x)

    wanted = observe(model, lambda: model(x) + model(x))
    for step in (lambda: run(x), lambda: run(x), twice, twice, lambda: run(x), twice):
        model.zero_grad(set_to_none=True)
        step().backward()
    assert wanted.differs(observe(model, twice)) == []


def test_a_step_that_is_given_up_is_not_in_flight() -> None:
    """A loss that is dropped without a backward holds nothing any more."""
    model, x = mlp(), input_of("dropout", 1024)
    run, _ = compiled(lambda: model(x).mean(), budget="80%", **QUICK)
    loss = run()
    assert coordinator().held_bytes() > 0
    del loss
    assert coordinator().held_bytes() == 0
    run().backward()


def test_every_shape_keeps_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    """A plan is for one shape: another is planned, and said to be."""
    model = mlp()
    run, planned = compiled(lambda x: model(x).square().mean(), budget="70%", **{**QUICK, "costs": "measured"})
    for count, rows in enumerate((512, 1024, 768), start=1):
        x = torch.randn(rows, 64)
        with caplog.at_level(logging.WARNING, "checkmate.torch"):
            run(x).backward()
        model.zero_grad(set_to_none=True)
        assert close(measure_peak(lambda x=x: run(x).backward()), planned_bytes(planned))
        model.zero_grad(set_to_none=True)
        assert len(planned) == count
        assert planned[-1][1].peak_bytes <= planned[-1][1].budget_bytes
    run(torch.randn(512, 64)).backward()  # its plan is still there
    assert len(planned) == 3
    assert sum("each new one costs" in m for m in caplog.messages) == 2


def test_a_batch_cut_from_a_large_tensor_is_no_reason_to_refuse() -> None:
    """A slice has the storage of the whole data set, which no plan holds or frees."""
    model, data = mlp(), torch.randn(4096, 64)
    run, planned = compiled(lambda x: model(x).square().mean(), budget="70%", **QUICK)
    run(data[:512].clone()).backward()
    model.zero_grad(set_to_none=True)
    run(data[512:1024]).backward()
    assert len(planned) == 1
