"""`prediction, loss = step(x, y)` is the training step that it replaces."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from checkmate.torch import measure_peak
from checkmate.torch._compat import dynamo
from checkmate.torch.graph.storages import leaves, unique_bytes
from checkmate.torch.measure.device_memory import state_bytes
from tests.torch.networks import Cnn, input_of, mlp
from tests.torch.steps import ROOMY, Forgetful

LOG = logging.getLogger("a library")
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
}


def classifier() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network with dropout and BatchNorm, its input and its target."""
    torch.manual_seed(0)
    model = nn.Sequential(Cnn(), nn.Flatten(), mlp(2, 128), nn.Linear(128, 10))
    return model, input_of("batch_norm"), torch.arange(128) % 10


def test_training_is_the_same_to_the_bit() -> None:
    """Three steps of eager training and three of a plan that recomputes everything."""
    trained = []
    for planned in (False, True):
        model, x, y = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses = []
        if planned:
            step = checkmate.torch.compile(
                model, nn.functional.cross_entropy, optimizer, example=(x, y), budget=ROOMY, solver=Forgetful()
            )
            assert len(step.plan.order) > len(step.graph.ops)
        torch.manual_seed(5)
        for _ in range(3):
            if planned:
                prediction, loss = step(x, y)
            else:
                prediction = model(x)
                loss = nn.functional.cross_entropy(prediction, y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert prediction.shape == (128, 10)
            losses.append(loss.detach())
        trained.append([*losses, *model.state_dict().values(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_construction_touches_nothing() -> None:
    """The example is traced, not trained on."""
    model, x, y = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    step = checkmate.torch.compile(model, nn.functional.cross_entropy, optimizer, example=(x, y), budget="80%", time_limit_s=3)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert checkmate.validate(step.graph, step.plan, step.result.budget_bytes) == ()


class Derived(torch.optim.Rprop):
    """An optimizer that torch does not know: a trial tells its state."""


STATES = {
    **OPTIMIZERS,
    "derived": Derived,
    "rmsprop, centered": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "adamw, fused": lambda p: torch.optim.AdamW(p, fused=True),
    **{kind.__name__.lower(): kind for kind in (torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax)},
    **{kind.__name__.lower(): kind for kind in (torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop)},
}


@pytest.mark.parametrize("kind", STATES)
def test_the_state_of_an_optimizer_is_foreseen(kind: str) -> None:
    """What is reserved before the first step is what is there after it."""
    model, x, _ = classifier()
    optimizer = STATES[kind](model.parameters())
    foreseen = state_bytes(optimizer)
    model(x).sum().backward()
    optimizer.step()
    assert foreseen == unique_bytes(t for state in optimizer.state.values() for t in leaves(state)) == state_bytes(optimizer)


def test_an_unknown_optimizer_is_said_to_be_unknown(caplog: pytest.LogCaptureFixture) -> None:
    """Memory that is not reserved is not passed over in silence."""

    class Mine(torch.optim.Rprop):
        def step(self, closure: Any = None) -> None:
            self.total = sum(p.grad.norm().item() for p in self.param_groups[0]["params"])
            super().step()

    state_bytes(Mine(mlp().parameters()))
    assert "Mine allocates at its first step is unknown" in caplog.text


def test_without_an_optimizer_gradients_stay() -> None:
    """They are the caller's to use."""
    model, x, y = classifier()
    checkmate.torch.compile(model, nn.functional.cross_entropy, example=(x, y))(x, y)
    assert all(p.grad is not None for p in model.parameters())


def test_a_mapping_goes_to_the_model_by_name() -> None:
    """A model that computes its own loss gets no target; its prediction is not kept."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(2)

        def forward(self, *, features: torch.Tensor, scale: float) -> torch.Tensor:
            return self.body(features).mean() * scale

    model, x = WithLoss(), input_of("dropout")
    step = checkmate.torch.compile(model, example={"features": x, "scale": 2.0})
    prediction, loss = step(features=x, scale=2.0)
    assert prediction is None
    assert loss.shape == ()
    assert not loss.requires_grad


def test_another_shape_is_planned_anew(caplog: pytest.LogCaptureFixture) -> None:
    """The last batch of an epoch is smaller."""
    model, x, y = classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = checkmate.torch.compile(model, nn.functional.cross_entropy, optimizer, example=(x, y), budget="80%", time_limit_s=1)
    step(x, y)
    step(x[:50], y[:50])
    assert "the step was compiled again and planned" in caplog.text
    first = measure_peak(lambda: step(x, y))
    assert measure_peak(lambda: step(x[:50], y[:50])) < first


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    """Plan once, on any machine; run it where the graph is the same."""
    model, x, y = classifier()
    loss = nn.functional.cross_entropy
    graph = checkmate.torch.capture(model, loss, example=(x, y))
    result = checkmate.solve(checkmate.Problem(graph, "75%"), limits=checkmate.Limits(time_s=1))
    for content, name in ((result.plan, "a.plan.json"), (result, "a.result.json")):
        checkmate.write(content, tmp_path / name)
        step = checkmate.torch.compile(model, loss, example=(x, y), plan=str(tmp_path / name))
        assert step.graph.digest == graph.digest
        assert step.plan.order == result.plan.order
        assert step.result.peak_bytes == result.peak_bytes


def test_capture_is_free_of_side_effects() -> None:
    """Nothing runs: not even BatchNorm's counter moves."""
    model, x, y = classifier()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    graph = checkmate.torch.capture(model, nn.functional.cross_entropy, example=(x, y))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert graph == checkmate.torch.capture(model, nn.functional.cross_entropy, example=(x, y))


def test_a_line_of_a_log_does_not_break_the_graph() -> None:
    """Models of libraries warn about their configuration from within their forward."""

    class Talkative(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            LOG.warning("a line of %s", "its log")
            return super().forward(x)

    x = torch.randn(4, 8)
    step = checkmate.torch.compile(Talkative(8, 8), nn.functional.mse_loss, example=(x, x))
    assert step(x, x)[1].isfinite()


def test_settings_that_cannot_be_logged_are_not(fails: Callable[..., list[Any]]) -> None:
    """PyTorch 2.11 sorts the functions among Dynamo's settings at each compilation, and prints a traceback."""
    fails("torch._dynamo.utils._get_dynamo_config_for_logging", TypeError("'<' not supported"))
    with dynamo.patched_settings(ignore_logging_functions={len, print}):
        assert dynamo.dynamo_utils._get_dynamo_config_for_logging() is None
        assert dynamo.dynamo_config.ignore_logging_functions == {len, print}
    with pytest.raises(TypeError):
        dynamo.dynamo_utils._get_dynamo_config_for_logging()


@pytest.mark.parametrize("budget", ["100%", "1KiB"])
def test_a_model_is_freed_with_its_step(budget: str) -> None:
    """PyTorch keeps every backend; a model that one holds would count against the budget of the next attempt in a notebook."""
    model = mlp()
    freed, x, y = weakref.ref(model), input_of("mlp"), torch.zeros(())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with contextlib.suppress(checkmate.InfeasibleBudgetError):
        step = checkmate.torch.compile(
            model, lambda out, y: out.square().mean() + y, optimizer, example=(x, y), budget=budget, costs="estimated"
        )
        step(x, y)
        del step
    del model, optimizer
    gc.collect()
    assert freed() is None
