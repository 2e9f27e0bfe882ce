"""Small steps keep every promise, and one that does not is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.doctor import Report, examine, steps
from checkmate.doctor.networks import Example
from checkmate.doctor.steps import PATHS, Path, check_path, run


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """One thread, and plans that are found in little time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(steps, "_PLANNING_S", 0.3)
    monkeypatch.setattr(steps, "_ROUNDS", 1)
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
    check = check_path(Path(name="planted", build=hoarding), "cpu", 1)
    assert check.verdict == "failed"
    assert "exceeds the budget" in check.detail
    assert "checkmate doctor --json" in check.cure
    assert check.figures["measured_bytes"] > check.figures["budget_bytes"] + (32 << 20)


def test_other_bits_are_found():
    """One bit of one tensor, or of one loss."""
    keep = run(Path(name="small", build=small), "cpu", 1, None)
    assert steps._identical(keep, keep)
    changed = [t.clone() for t in keep.state]
    changed[0].view(torch.uint8)[0] ^= 1
    assert not steps._identical(dataclasses.replace(keep, state=tuple(changed)), keep)
    assert not steps._identical(dataclasses.replace(keep, losses=(*keep.losses[:-1], keep.losses[-1] + 1)), keep)


def test_rounding_is_not_a_fault_and_a_wrong_number_is():
    """The comparison for fused kernels of a GPU: floating numbers may differ in their last places, and nothing else may."""
    keep = run(Path(name="small", build=small), "cpu", 1, None)
    floating = next(k for k, t in enumerate(keep.state) if t.is_floating_point() and t.abs().max() > 0)
    whole = next(k for k, t in enumerate(keep.state) if not t.is_floating_point())

    def changed(k, change):
        return dataclasses.replace(keep, state=tuple(change(t) if j == k else t for j, t in enumerate(keep.state)))

    assert steps._equal_up_to_rounding(changed(floating, lambda t: t * (1 + 1e-6)), keep)
    assert not steps._equal_up_to_rounding(changed(floating, lambda t: t * 1.01), keep)
    assert not steps._equal_up_to_rounding(changed(floating, lambda t: t * float("nan")), keep)
    assert not steps._equal_up_to_rounding(changed(whole, lambda t: t + 1), keep)


def test_an_examination_is_green(monkeypatch):
    """On a machine where everything holds, every check is made and none fails."""
    pieces = next(path for path in PATHS if path.pieces)
    monkeypatch.setattr(
        steps, "QUICK", (Path(name="loop", build=small, plain=True), Path(name="whole", build=small, whole=True), pieces)
    )
    seen: list[str] = []
    report = examine("cpu", quick=True, on_check=lambda check: seen.append(check.name))
    holds(report)
    assert seen == [check.name for check in report.checks]
    assert {"python", "torch", "packages", "C++ compiler", "cache folder", "stores", "HiGHS", "local search"} <= set(seen)
    assert report.as_json()["format"] == "checkmate.doctor/1"
    assert next(check for check in report.checks if check.name == pieces.name).figures["in_pieces"]


def holds(report: Report) -> None:
    """No check failed, and every step needs less than keeping everything, with its bits."""
    assert [c for c in report.checks if c.verdict == "failed"] == []
    assert report.holds
    ran = [check.figures for check in report.checks if "measured_bytes" in check.figures]
    assert len(ran) >= 3
    for figures in ran:
        assert figures["measured_bytes"] <= figures["budget_bytes"] < figures["keep_all_bytes"]
        assert figures["identical"]


@pytest.mark.slow
def test_the_whole_examination_is_green():
    """Every path, Inductor too."""
    report = examine("cpu")
    holds(report)
    assert {path.name for path in PATHS} <= {check.name for check in report.checks}
