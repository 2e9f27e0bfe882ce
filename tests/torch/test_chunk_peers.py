"""Chunking by hand, as the benchmarks have it beside ours, computes the plain step; otherwise its times would mean nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = ("torch_chunked_loss", "torch_tiled_mlp")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return {name: importlib.import_module(name) for name in SCRIPTS}


def results(suite: Any, way: str) -> list[torch.Tensor]:
    """Loss and gradients, or loss and parameters after a step in float64."""
    case = suite.case(torch.float64)
    loss = suite.ways[way].prepare(case)()
    return [loss, *(p.grad if case.optimizer is None else p.detach() for p in case.model.parameters())]


@pytest.mark.parametrize("script", [pytest.param("torch_chunked_loss", marks=pytest.mark.slow), "torch_tiled_mlp"])
def test_ways_by_hand_compute_the_plain_step(script: str, scripts: dict[str, Any]) -> None:
    """In float64, where sums in another order differ by less than 1e-10 and a wrong term by far more."""
    for name, suite in scripts[script].suites(True).items():
        plain = results(suite, next(iter(suite.ways)))
        for way, how in suite.ways.items():
            if not how.compiled:  # half a minute each
                for found, expected in zip(results(suite, way), plain, strict=True):
                    torch.testing.assert_close(
                        found, expected, rtol=1e-9, atol=1e-12, msg=lambda m, w=way, n=name: f"{n}, {w}: {m}"
                    )


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_benchmarks_run(script: str) -> None:
    """At tiny sizes: one way, beside ours where chunks can be chosen."""
    path = BENCHMARKS / f"{script}.py"
    command = [sys.executable, "-W", "ignore", str(path), "--quick", "--rounds", "1", "--time-limit", "2", "--rows", "eager"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| eager |" in done.stdout
    assert "failed" not in done.stdout
