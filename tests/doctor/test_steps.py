"""Small steps keep every promise, and one that does not is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.doctor import Check, examine, steps
from checkmate.doctor.steps import PATHS, StepPath, check_path
from checkmate.doctor.training import Example, equal_up_to_rounding
from checkmate.torch.graph.storages import same_bytes

QUICK = {"planning_s": 0.3, "timed_steps": 1}


@pytest.fixture(autouse=True)
def _quick():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(scale: int) -> Example:
    """A few layers, with dropout: the networks of the doctor take several seconds each."""
    torch.manual_seed(0)
    layers = [m for _ in range(3) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    return Example(nn.Sequential(*layers), nn.functional.mse_loss, (torch.randn(2048, 64), torch.randn(2048, 64)))


class Hoarding(nn.Module):
    """A model whose backward allocates what no graph shows."""

    def __init__(self, model: nn.Module, size_bytes: int) -> None:
        super().__init__()
        self.model, self.size = model, size_bytes
        self.hoard: list[torch.Tensor] = []
        next(model.parameters()).register_post_accumulate_grad_hook(self._take)

    def _take(self, _: Any) -> None:
        self.hoard[:] = [torch.empty(self.size, dtype=torch.uint8)]
        self.hoard.clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


def hoarding(scale: int) -> Example:
    example = small(scale)
    return dataclasses.replace(example, model=Hoarding(example.model, 64 << 20))


def test_a_planted_model_over_budget_is_found():
    """What the model takes behind the plan's back is measured, and the check fails with what to do."""
    check = check_path(StepPath(name="planted", build=hoarding, **QUICK), "cpu")
    assert check.verdict == "failed"
    assert check.detail.startswith("exceeds the budget; the peak is not the planned one (measured ")
    assert "checkmate doctor --json" in check.cure
    assert check.figures["measured_bytes"] > check.figures["budget_bytes"] + (32 << 20)


STATE = (torch.tensor([0.5, 0.0]), torch.tensor([1.0, -2.0, 0.0]), torch.tensor([3, 4]))
"""As of a training: losses and parameters, and a random state."""


def changed(k, change):
    return tuple(change(tensor.clone()) if j == k else tensor for j, tensor in enumerate(STATE))


def test_other_bits_are_found():
    """One bit of one tensor; zeros of either sign are two."""
    assert all(map(same_bytes, STATE, changed(0, lambda t: t)))
    assert not all(map(same_bytes, STATE, changed(0, lambda t: -t * torch.tensor([-1.0, 1.0]))))
    assert not all(map(same_bytes, STATE, changed(1, lambda t: t * (1 + 2**-23))))
    assert not all(map(same_bytes, STATE, changed(2, lambda t: t + 1)))


def test_rounding_is_not_a_fault_and_a_wrong_number_is():
    """The comparison for fused kernels of a GPU: floating numbers may differ in their last places, and nothing else may."""
    assert equal_up_to_rounding(STATE, changed(1, lambda t: t * (1 + 1e-6)))
    assert not equal_up_to_rounding(STATE, changed(1, lambda t: t * 1.01))
    assert not equal_up_to_rounding(STATE, changed(1, lambda t: t * float("nan")))
    assert not equal_up_to_rounding(STATE, changed(2, lambda t: t + 1))


def test_small_steps_hold():
    """A step of one's own loop, and a whole one."""
    checks = [check_path(StepPath(name=name, build=small, **{name: True}, **QUICK), "cpu") for name in ("plain", "whole")]
    assert [c for c in checks if c.verdict == "failed"] == []
    keep_their_promises(checks)


def keep_their_promises(checks: Sequence[Check]) -> None:
    """Every step needs less than keeping everything, with its bits."""
    ran = [check.figures for check in checks if "measured_bytes" in check.figures]
    assert len(ran) >= 2
    for figures in ran:
        assert figures["measured_bytes"] <= figures["budget_bytes"] < figures["keep_all_bytes"]
        assert figures["identical"]


def test_what_a_step_raises_is_told_with_the_cure_of_its_compiler(monkeypatch):
    """The error of a missing compiler is PyTorch's, and says which program was tried."""

    def broken(scale: int) -> Example:
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found: (None, '/nowhere')\nmore")

    monkeypatch.setattr(steps, "PATHS", (StepPath(name="Inductor", build=broken, compiler="inductor"),))
    check = examine("cpu").checks[-1]
    assert (check.name, check.verdict) == ("Inductor", "failed")
    assert "No working C++ compiler found: (None, '/nowhere')" in check.detail and "or set CXX" in check.cure


@pytest.mark.slow
@pytest.mark.parametrize("quick", [True, False])
def test_the_whole_examination_is_green(quick):
    """On a machine where everything holds, every check is made and none fails."""
    seen: list[str] = []
    report = examine("cpu", quick=quick, on_check=lambda check: seen.append(check.name))
    assert [c for c in report.checks if c.verdict == "failed"] == []
    assert report.holds
    keep_their_promises(report.checks)
    assert seen == [check.name for check in report.checks]
    assert {"name", "torch", "store", "solvers", "device"} <= set(seen)
    assert {path.name for path in PATHS if not (quick and path.compiler == "inductor")} == set(seen) & {p.name for p in PATHS}
    assert report.as_json()["format"] == "checkmate.doctor/1"
