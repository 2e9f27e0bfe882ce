"""Costs are measured once, kept, and shared by processes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import checkmate
from checkmate.torch._compat.profiler import memory_trace
from tests.torch.networks import input_of, mlp
from tests.torch.steps import compiled


def test_a_second_capture_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Costs come from the store, so that plans are the same from run to run."""
    monkeypatch.setenv("CHECKMATE_CACHE", str(tmp_path))
    model, x = mlp(), input_of("dropout")
    with caplog.at_level(logging.INFO, "checkmate.torch"):
        first = checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x))
        second = checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x))
    assert sum("measured" in m for m in caplog.messages) == 1
    assert first == second
    assert all(op.cost > 0 for op in first.ops if op.kind != "boundary")


def test_workspace_is_measured() -> None:
    """A convolution's backward needs memory that is neither input nor output."""
    model, x = nn.Conv2d(8, 8, 3, padding=1), torch.randn(4, 8, 16, 16)
    graph = checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x))
    assert max(op.workspace_bytes for op in graph.ops) > 1000


def test_an_op_that_cannot_be_measured_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its cost is estimated, and not in silence."""
    monkeypatch.setenv("CHECKMATE_CACHE", str(tmp_path))

    @torch.library.custom_op("checkmate_test::moody", mutates_args=())
    def moody(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("not today")

    moody.register_fake(torch.empty_like)
    moody.register_autograd(lambda ctx, gradient: gradient * 2)
    model = nn.Linear(8, 8)
    graph = checkmate.torch.capture(model, lambda p, y: moody(p).mean() * y, example=(torch.ones(4, 8), torch.ones(())))
    assert "not today" in caplog.text
    assert next(op for op in graph.ops if "moody" in op.kind).cost > 0


def test_measuring_inside_a_profiler_is_refused_unless_all_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Profilers do not nest; a workspace of zero would be a lie."""
    monkeypatch.setenv("CHECKMATE_CACHE", str(tmp_path))
    model, x = mlp(2), input_of("dropout")
    run, _ = compiled(lambda: model(x).mean())
    with memory_trace(), pytest.raises(checkmate.CheckmateError, match="another torch profiler is active"):
        run()
    run().backward()
    torch._dynamo.reset()
    with memory_trace():
        run().backward()
