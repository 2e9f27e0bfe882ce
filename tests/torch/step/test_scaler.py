"""A gradient scaler in whole steps: the bits of a plain loop, in which the third step overflows."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checkmate.torch
from checkmate import OptionError
from checkmate.torch import measure_peak

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(32, 8))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Five batches, of which the third has a number that overflows in the gradients of the loss."""
    torch.manual_seed(1)
    found = [(torch.randn(512, 32), torch.randn(512, 8)) for _ in range(5)]
    found[2][1][0, 0] = 3e38
    return found


def outcome(step: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> list[Any]:
    """All that five steps leave: losses, weights, optimizer state, and the scale and its counter after each step."""
    torch.manual_seed(2)
    left: list[Any] = []
    for x, y in batches():
        left += [step(x, y).detach(), {**scaler.state_dict()}, *(p.detach().clone() for p in model.parameters())]
    return [*left, *(state for _, state in sorted(copy.deepcopy(optimizer.state_dict()["state"]).items()))]


def same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(same(mine[k], theirs[k]) for k in mine)
    return torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


def new_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("momentum", {"clip_norm": 0.5}),
        ("foreach", {}),
        ("fused", {"micro_batches": 2, "budget": "80%"}),
        ("rmsprop", {"whole": False, "clip_norm": 0.5}),
    ],
)
def test_a_scaled_step_is_that_of_a_plain_loop(kind: str, options: dict[str, Any]) -> None:
    """Loss, weights, state, and the scale with its growth: the step with an overflow changes nothing but the scale."""
    model, scaler = network(), new_scaler()
    optimizer = OPTIMIZERS[kind](model.parameters())
    parts = options.get("micro_batches", 1)

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for some, some_y in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = nn.functional.mse_loss(model(some), some_y) / parts
            scaler.scale(loss).backward()
            total = total + loss.detach()
        if "clip_norm" in options:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return total

    expected = outcome(plain, model, optimizer, scaler)
    model, scaler = network(), new_scaler()
    optimizer = OPTIMIZERS[kind](model.parameters())
    given = {"loss": nn.functional.mse_loss, "optimizer": optimizer, "example": batches()[0]}
    options = {"budget": "70%", "chunking": "off", "time_limit_s": 1, **options}
    step = checkmate.torch.compile(model, **given, scaler=scaler, **options)
    assert step.whole == options.get("whole", True)
    found = outcome(lambda x, y: step(x, y)[1], model, optimizer, scaler)
    assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not same(a, b)] == []
    assert same(found[1]["scale"], 2.0**20) and scaler.get_scale() == 2.0**21  # up, down in the third step, and up again


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_half_precision_is_scaled_alike_in_and_after_the_step(dtype: torch.dtype) -> None:
    """Under autocast a traced step has other bits than eager mode; the scaler then calls the optimizer itself."""
    outcomes = []
    for whole in (True, False):
        model, scaler = network(), new_scaler()
        optimizer = OPTIMIZERS["rmsprop"](model.parameters())
        given = {"loss": nn.functional.mse_loss, "optimizer": optimizer, "example": batches()[0]}
        step = checkmate.torch.compile(model, scaler=scaler, autocast=dtype, whole=whole, **given)
        outcomes.append(outcome(lambda x, y, step=step: step(x, y)[1], model, optimizer, scaler))
    assert all(map(same, *outcomes))


def test_the_planned_peak_is_the_measured_one() -> None:
    """All gradients exist at once, and nothing twice."""
    model, scaler = nn.Sequential(*[nn.Linear(128, 128) for _ in range(6)]), new_scaler()
    x, optimizer = torch.randn(16, 128), torch.optim.AdamW(model.parameters())
    given = {"loss": nn.functional.mse_loss, "optimizer": optimizer, "example": (x, x)}
    step = checkmate.torch.compile(model, scaler=scaler, **given)
    for _ in range(2):
        step(x, x)
    measured = step.graph.resident_bytes + measure_peak(lambda: step(x, x))
    assert abs(measured - step.result.peak_bytes) <= 64  # numbers of the scaler itself


def test_half_precision_needs_a_scaler_that_is_on() -> None:
    """Small gradients would become zero; a scaler that is off is none."""
    model = network()
    given = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "example": batches()[0]}
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        with pytest.raises(OptionError, match=r"scaler=torch\.amp\.GradScaler\(\)"):
            checkmate.torch.compile(model, **given, autocast=torch.float16, scaler=scaler)
    with pytest.raises(OptionError, match=r"1\.0 is no gradient scaler"):
        checkmate.torch.compile(model, **given, scaler=1.0)
    with pytest.raises(OptionError, match="a scaler decides on them"):
        checkmate.torch.compile(model, **given, scaler=new_scaler(), compiler="inductor", whole=True)
