"""Costs are measured once, kept, and shared by processes."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import checkmate
from checkmate.cost import CostStore, OpCost, cache_folder
from checkmate.torch import measure_peak
from checkmate.torch._compat.profiler import memory_trace
from tests.torch.networks import input_of, mlp
from tests.torch.steps import compiled

_ADD = """
import sys
from checkmate.cost import CostStore, OpCost
store, worker = CostStore(sys.argv[1]), int(sys.argv[2])
for k in range(40):
    store.add({f"op{k}": OpCost(worker, k), f"own{worker}.{k}": OpCost(worker, 0)})
"""


def test_processes_that_write_at_once_agree(tmp_path: Path) -> None:
    """The first measure of an op stays, and none is lost."""
    path = tmp_path / "costs.sqlite"
    workers = [subprocess.Popen([sys.executable, "-c", _ADD, str(path), str(w)]) for w in range(3)]
    assert [worker.wait() for worker in workers] == [0, 0, 0]
    keys = [f"op{k}" for k in range(40)] + [f"own{w}.{k}" for w in range(3) for k in range(40)]
    found = CostStore(path).get(keys)
    assert set(found) == set(keys)
    assert all(found[f"op{k}"].workspace_bytes == k for k in range(40))


def test_more_keys_than_a_statement_takes(tmp_path: Path) -> None:
    """Large models ask for thousands."""
    store = CostStore(tmp_path / "costs.sqlite")
    store.add({str(k): OpCost(k, 0) for k in range(2500)})
    assert len(store.get(str(k) for k in range(5000))) == 2500


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By our own variable before the platform's."""
    monkeypatch.setenv("CHECKMATE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("CHECKMATE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder().parts[-1].lower() == "checkmate" or "checkmate" in str(cache_folder()).lower()


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
    with memory_trace(), pytest.raises(checkmate.CheckmateError, match="a torch profiler is on already"):
        run()
    run().backward()
    torch._dynamo.reset()
    with memory_trace():
        run().backward()


def test_a_peak_counts_what_is_freed_before_the_end() -> None:
    """The most that was there at once, not what is left."""

    def work() -> torch.Tensor:
        big = torch.ones(1000)
        return big.sum()

    assert 4000 <= measure_peak(work) < 4100
    with memory_trace(), pytest.raises(checkmate.CheckmateError, match="cannot be measured"):
        measure_peak(work)


@pytest.mark.gpu
def test_planned_is_measured_on_cuda() -> None:
    """The caching allocator rounds to 512 bytes, and so does the graph."""
    model, x = mlp(4, 256).cuda(), torch.randn(4096, 256, device="cuda")
    run, planned = compiled(lambda: model(x).square().mean(), budget="70%", time_limit_s=5)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run().backward()
    model.zero_grad(set_to_none=True)
    measured = measure_peak(lambda: run().backward(), device="cuda")
    capture, result = planned[-1]
    assert result.peak_bytes is not None
    assert abs(measured - (result.peak_bytes - capture.graph.resident_bytes)) <= 0.01 * measured
