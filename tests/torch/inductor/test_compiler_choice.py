"""``compiler="auto"``: Inductor where that was measured to pay, and the same answer ever after."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

import checkmate.torch
from checkmate.torch._compat import inductor as inductor_names
from checkmate.torch.inductor import compiler_choice
from checkmate.torch.steps.coordinator import COORDINATOR
from tests.torch.networks import input_of, mlp
from tests.torch.steps import Planned, compiled, observe

ROWS = 512


@pytest.fixture(autouse=True)
def _own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that another test compiled costs nothing to compile, so that it would be chosen."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def started(model: nn.Module, x: torch.Tensor, **options: Any) -> tuple[Callable[[], Any], Planned]:
    torch._dynamo.reset()
    COORDINATOR.forget_steps()
    return compiled(lambda: model(x).square().mean(), compiler="auto", time_limit_s=3, **options)


def by_inductor(planned: Planned) -> bool:
    return any("compiled by Inductor" in remark for remark in planned[-1][1].remarks)


def test_a_short_step_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    """It saves nothing that compiling could be paid with; and the log says so."""
    model, x = mlp(2), input_of("dropout", ROWS)
    with caplog.at_level(logging.INFO, "checkmate.torch"):
        run, planned = started(model, x, budget="90%")
        run().backward()
    assert not by_inductor(planned)
    assert "compiler='auto' is 'eager': its ops take" in caplog.text


@pytest.mark.parametrize(("compiled_s", "fused"), [(0.0, True), (1e9, False)])
def test_what_was_measured_decides_and_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiled_s: float, fused: bool
) -> None:
    """Compiled steps round differently: an answer that changed from run to run would change bits."""
    monkeypatch.setattr(compiler_choice, "_PAYOFF", compiler_choice.Payoff(steps=10**9, least_step_s=0.0))
    monkeypatch.setattr(compiler_choice, "time_step", lambda *args, **kwargs: compiled_s)
    model, x = mlp(2), input_of("dropout", ROWS)
    run, planned = started(model, x, budget="90%")
    first = observe(model, run)
    assert by_inductor(planned) == fused

    monkeypatch.setattr(compiler_choice, "time_step", lambda *args, **kwargs: 1e9 - compiled_s)
    with caplog.at_level(logging.INFO, "checkmate.torch"):
        run, planned = started(model, x, budget="90%")
        assert first.differs(observe(model, run)) == []
    assert by_inductor(planned) == fused
    assert f"compiler='auto' is {'inductor' if fused else 'eager'!r}: as chosen before" in caplog.text


def test_without_a_compiler_ops_run_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Nothing fails, and nothing is stored: the next process may have a compiler."""

    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(inductor_names, "get_cpp_compiler", missing)
    model, x = mlp(2), input_of("dropout", ROWS)
    with caplog.at_level(logging.INFO, "checkmate.torch"):
        run, planned = started(model, x, budget="90%")
        run().backward()
    assert not by_inductor(planned)
    assert "no C++ compiler is installed" in caplog.text
    assert not (tmp_path / "measured_plans.sqlite").exists()


def test_a_whole_step_runs_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    """Its updates would be rounded in another way than by the optimizer's own code."""
    model, x, y = mlp(2), input_of("dropout", ROWS), torch.zeros(ROWS, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with caplog.at_level(logging.INFO, "checkmate.torch"):
        step = checkmate.torch.compile(model, nn.functional.mse_loss, optimizer, example=(x, y), budget="90%", compiler="auto")
    assert step.whole
    assert "compiler='auto' is 'eager': updates" in caplog.text
