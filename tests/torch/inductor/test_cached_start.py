"""Code that an earlier process compiled under a plan runs again without tracing, planning or measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from checkmate.torch import measure_peak
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.networks import input_of, mlp
from tests.torch.steps import Observed, Planned, compiled, observe

pytestmark = pytest.mark.usefixtures("nothing_else")

ROWS = 512


@pytest.fixture(autouse=True)
def _own_code(tmp_path: Path, environ: dict[str, str]) -> Iterator[None]:
    """An empty cache of compiled code, and no known steps: as in the first process of a machine."""
    environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "inductor")
    coordinator().forget_steps()
    yield
    coordinator().forget_steps()


class Starts:
    """Starts of the same program, one after the other, each as in a new process."""

    def __init__(self, *, depth: int = 2, dropout: float = 0.2, rows: int = ROWS) -> None:
        self.model, self.x = mlp(depth=depth, dropout=dropout), input_of("dropout", rows)

    @property
    def cached(self) -> bool:
        """Whether the newest one was answered by the cache, before anything was traced."""
        return counters["aot_autograd"]["autograd_cache_hit"] == 1

    def start(self, budget: int | str | None, **options: Any) -> tuple[Callable[[], Any], Planned]:
        """The compiled loss, and its plans."""
        torch._dynamo.reset()
        coordinator().forget_steps()
        counters.clear()
        options = {"compiler": "inductor", "time_limit_s": 3, **options}
        return compiled(lambda: self.model(self.x).square().mean(), budget=budget, **options)

    def observed(self, budget: int | str | None, **options: Any) -> tuple[Observed, Planned, int]:
        """What some steps compute, their plans, and the peak of one more step."""
        run, planned = self.start(budget, **options)
        found = observe(self.model, run)
        self.model.zero_grad(set_to_none=True)
        peak = measure_peak(lambda: run().backward())
        self.model.zero_grad(set_to_none=True)
        return found, planned, peak


@pytest.mark.parametrize("budget", [pytest.param(None, marks=pytest.mark.slow), "80%"])
def test_a_second_start_neither_traces_nor_plans(budget: str | None) -> None:
    """With the bits, the plan and the peak of the first: tracing and planning took half of a cached start."""
    starts = Starts()
    first, planned, peak = starts.observed(budget)
    assert not starts.cached
    again, planned_again, peak_again = starts.observed(budget)
    assert starts.cached
    assert first.differs(again) == []
    assert peak_again == peak
    (interface, result), (interface_again, result_again) = planned[-1], planned_again[-1]
    assert interface_again.graph == interface.graph
    assert result_again.plan == result.plan
    assert result_again.remarks == result.remarks


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{"budget": "75%"}, {"reserve": "1MiB"}, {"outputs": "released"}])
def test_another_problem_is_planned(changed: dict[str, Any]) -> None:
    """The code of one budget is no answer to another, nor to another amount of resident memory."""
    starts = Starts()
    starts.start("80%")[0]()
    starts.start(**{"budget": "80%", **changed})[0]()
    assert not starts.cached


def test_code_that_is_gone_is_generated_again(tmp_path: Path) -> None:
    """AOTAutograd's entry refers to Inductor's, which may have been deleted."""
    starts = Starts()
    first, *_ = starts.observed("80%")
    for entry in (tmp_path / "inductor" / "fxgraph").rglob("*"):
        if entry.is_file():
            entry.unlink()
    again, *_ = starts.observed("80%")
    assert not starts.cached
    assert first.differs(again) == []


@pytest.mark.slow
def test_cached_code_that_leaves_too_little_room_is_compiled_again() -> None:
    """The step keeps the budget, not the code: a loop that keeps its predictions has less room than it was compiled for."""
    starts = Starts(depth=6, dropout=0.0, rows=2048)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        prediction = starts.model(starts.x)
        return prediction.square().mean(), prediction.detach()

    def started(budget: int | None) -> tuple[Callable[[], Any], Planned]:
        starts.start(budget)
        return compiled(forward, budget=budget, compiler="inductor", time_limit_s=3)

    run, planned = started(None)
    run()
    resident = planned[-1][0].graph.resident_bytes
    budget = resident + int(0.75 * measure_peak(lambda: run()[0].backward()))
    started(budget)[0]()
    run, planned = started(budget)
    held: list[torch.Tensor] = []

    def step() -> None:
        loss, prediction = run()
        loss.backward()
        starts.model.zero_grad(set_to_none=True)
        held[:] = [prediction]

    step()
    assert starts.cached and len(planned) == 1
    for _ in range(3):
        step()
    assert len(planned) > 1
    assert measure_peak(step) <= budget - resident - held[0].nbytes
