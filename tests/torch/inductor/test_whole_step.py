"""Whole steps compiled by Inductor: the budget is kept, no bit depends on it, and the optimizer's state is its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checkmate.torch
from checkmate import OptionError
from checkmate.torch import Step, measure_peak
from checkmate.torch.inductor.whole_step import TensorFactors
from tests.torch.networks import Mixed, input_of, mlp

pytestmark = pytest.mark.usefixtures("nothing_else")

ROWS = 512
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True, weight_decay=1e-2, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.1),
    # With the default eps the update of a gradient near zero has the rounding of the gradient.
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, eps=1e-3, momentum=0.5, centered=True),
}


def small() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return mlp(depth=2), input_of("dropout", ROWS), torch.arange(ROWS) % 64


def large() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return Mixed(depth=3), input_of("batch_norm", ROWS), torch.arange(ROWS) % 128


def whole(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Step:
    torch._dynamo.reset()
    options = {"compiler": "inductor", "whole": True, "time_limit_s": 3, **options}
    return checkmate.torch.compile(model, nn.functional.cross_entropy, optimizer, example=(x, y), **options)


def left_by(run: Callable[[], Any], model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Any]:
    """Everything that some steps from a fixed seed leave."""
    torch.manual_seed(5)
    results = [r for _ in range(steps) for r in run()]
    return copy.deepcopy([*results, *model.state_dict().values(), *states(optimizer), torch.get_rng_state()])


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [v for _, s in sorted(optimizer.state_dict()["state"].items()) for v in s.values()]


def same(mine: list[Any], theirs: list[Any]) -> bool:
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def peak_above_resident(step: Step, x: torch.Tensor, y: torch.Tensor) -> int:
    return measure_peak(lambda: step(x, y))


def without_dropout(model: nn.Module) -> nn.Module:
    """Inductor draws other masks than eager mode."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def eagerly(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, clip: float | None = None
) -> Any:
    loss = nn.functional.cross_entropy(prediction := model(x), y)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return prediction.detach(), loss.detach()


def test_the_budget_is_kept_and_no_bit_changes() -> None:
    """Predictions, losses, parameters, state and random numbers; compiling itself changes nothing."""
    outcomes, peaks, limits, computed = [], [], [], []
    for share in (None, 0.8):
        model, x, y = small()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        before = copy.deepcopy([*model.state_dict().values(), torch.get_rng_state()])
        budget = None if share is None else limits[0] + int(share * peaks[0])
        step = whole(model, optimizer, x, y, budget=budget)
        computed.append(len(step.plan.order))
        assert step.whole
        assert same(before, [*model.state_dict().values(), torch.get_rng_state()])
        assert not optimizer.state
        outcomes.append(left_by(lambda step=step, x=x, y=y: step(x, y), model, optimizer))
        peaks.append(peak_above_resident(step, x, y))
        limits.append(step.graph.resident_bytes)
    assert same(*outcomes)
    assert peaks[1] <= 0.8 * peaks[0]
    assert computed[1] > computed[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_no_bit_depends_on_the_budget(kind: str) -> None:
    """For each optimizer whose updates are compiled, at two budgets."""
    model, x, y = large()
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = whole(model, optimizer, x, y)
    reference = left_by(lambda: step(x, y), model, optimizer)
    everything, resident = peak_above_resident(step, x, y), step.graph.resident_bytes
    for share in (0.8, 0.65):
        model, x, y = large()
        optimizer = OPTIMIZERS[kind](model.parameters())
        step = whole(model, optimizer, x, y, budget=resident + int(share * everything))
        assert same(left_by(lambda step=step, x=x, y=y: step(x, y), model, optimizer), reference)
        assert peak_above_resident(step, x, y) <= share * everything
        assert any("compiled by Inductor" in remark for remark in step.result.remarks)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_are_those_of_the_optimizer_up_to_rounding(kind: str) -> None:
    """Its own code is traced; only scalars are computed on tensors."""
    outcomes = []
    for compiled in (True, False):
        model, x, y = small()
        optimizer = OPTIMIZERS[kind](without_dropout(model).parameters())
        step = whole(model, optimizer, x, y) if compiled else None
        for _ in range(4):
            if step is None:
                eagerly(model, optimizer, x, y)
            else:
                step(x, y)
        outcomes.append([*model.state_dict().values(), *states(optimizer)])
    assert len(outcomes[0]) == len(outcomes[1])
    for mine, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


def test_gradients_never_meet() -> None:
    """What is counted before kernels are built is measured: updates take no memory of their own, and gradients are freed."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]), torch.randn(16, 256), torch.zeros(16).long()
    optimizer = torch.optim.AdamW(model.parameters())
    step = whole(model, optimizer, x, y)
    step(x, y)
    measured = peak_above_resident(step, x, y)
    assert abs(measured - (step.result.peak_bytes - step.graph.resident_bytes)) <= 64
    assert measured < 0.3 * sum(p.nbytes for p in model.parameters())


def test_the_learning_rate_can_change_and_other_options_cannot() -> None:
    """It is an input of the compiled step; the others are constants of it, which is said and not ignored."""
    model, x, y = small()
    optimizer = torch.optim.SGD(without_dropout(model).parameters(), 0.1, momentum=0.5)
    other = copy.deepcopy(model)
    eager = torch.optim.SGD(other.parameters(), 0.1, momentum=0.5)
    step = whole(model, optimizer, x, y)
    for rate in (0.1, 0.0, 0.3):
        optimizer.param_groups[0]["lr"] = eager.param_groups[0]["lr"] = rate
        step(x, y)
        eagerly(other, eager, x, y)
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
    before = copy.deepcopy([*model.parameters()])
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(OptionError, match=r"momentum=0.5 of the optimizer is a constant of the compiled step; it is now 0.9"):
        step(x, y)
    assert same(before, [*model.parameters()])


def test_state_saved_and_loaded_goes_on_the_same() -> None:
    """``state_dict`` is the optimizer's own: what is loaded is what the next step reads, and its type is checked."""
    model, x, y = small()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = whole(model, optimizer, x, y)
    step(x, y)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    reference = left_by(lambda: step(x, y), model, optimizer)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(copy.deepcopy(saved[1]))
    assert same(left_by(lambda: step(x, y), model, optimizer), reference)
    moment = next(iter(optimizer.state.values()))
    moment["exp_avg"] = moment["exp_avg"].double()
    with pytest.raises(OptionError, match=r"'exp_avg' is .*float64 on cpu; the step was compiled for .*float32 on cpu"):
        step(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"clip_norm": 0.01}, {"micro_batches": 4}], ids=["clip_norm", "micro_batches"])
def test_clipped_and_in_micro_batches(options: dict[str, Any]) -> None:
    """The same training as without them compiled, up to rounding, and no bit depends on the budget."""
    model, x, y = small()
    optimizer = torch.optim.AdamW(without_dropout(model).parameters(), 1e-2)
    other = copy.deepcopy(model)
    eager = torch.optim.AdamW(other.parameters(), 1e-2)
    step = whole(model, optimizer, x, y, **options)
    reference = left_by(lambda: step(x, y), model, optimizer)
    everything = peak_above_resident(step, x, y)
    resident = step.graph.resident_bytes + sum(t.nbytes for t in states(optimizer))  # which it was compiled without
    for _ in range(3):
        eagerly(other, eager, x, y, options.get("clip_norm"))
    for mine, theirs in zip(reference[6:], [*other.state_dict().values(), *states(eager)], strict=False):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    model, x, y = small()
    optimizer = torch.optim.AdamW(without_dropout(model).parameters(), 1e-2)
    step = whole(model, optimizer, x, y, budget=resident + int(0.95 * everything), **options)
    assert same(left_by(lambda: step(x, y), model, optimizer), reference)
    assert peak_above_resident(step, x, y) <= 0.95 * everything


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.NAdam, "NAdam is not among the optimizers whose updates are compiled: SGD, Adam"),
        (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, dampening=0.5), "SGD has dampening"),
    ],
)
def test_updates_that_cannot_be_compiled_are_refused(make: Callable[[Any], torch.optim.Optimizer], words: str) -> None:
    """Before anything is traced; a step with the update after it is compiled without being asked for."""
    model = nn.Linear(4, 4)
    batch = torch.ones(2, 4), torch.zeros(2).long()
    with pytest.raises(OptionError, match=words):
        whole(model, make(model.parameters()), *batch)
    with pytest.raises(OptionError, match=words):
        whole(model, make(model.parameters()), *batch, whole=None, micro_batches=2)


def test_parameters_of_one_storage_are_refused() -> None:
    """Inductor takes inputs for separate memory: reads of one would not wait for the update of the other."""
    both = torch.randn(2, 4, 4)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, part in zip(model, both, strict=True):
        layer.weight = nn.Parameter(part)
    with pytest.raises(OptionError, match="shares its storage with another input"):
        whole(model, torch.optim.SGD(model.parameters(), 0.1), torch.ones(2, 4), torch.zeros(2).long())


def test_factors_may_be_tensors() -> None:
    """As under `torch.compile`: a learning rate that is a tensor is a factor in the updates of most optimizers."""
    x, a, b = torch.ones(3), torch.full((3,), 3.0), torch.full((3,), 2.0)
    factor: Any = torch.tensor(0.5)
    with TensorFactors():
        assert torch.add(x, a).tolist() == [4.0] * 3
        assert x.add(a, alpha=factor).tolist() == [2.5] * 3
        assert x.addcmul(a, b, value=factor).tolist() == [4.0] * 3
        assert x.addcdiv_(a, b, value=factor) is x
    assert x.tolist() == [1.75] * 3
