"""Two gloo processes: the same plan on both, the budget held on each, and nobody left waiting."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 30.0  # far less than the two minutes that the process groups of the tests wait


def ranks(case: str, *arguments: str, count: int = 2, first: int = 0) -> list[dict[str, Any]]:
    """What each rank of a job finds, from one on: those before do not end by themselves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.torch.rank_cases", case]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(count), str(port), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(count)
    ]
    try:
        done = [process.communicate(timeout=600) for process in running[first:]]
    finally:
        for process in running:
            process.kill()
        for process in running[:first]:
            process.communicate()
    assert [process.returncode for process in running[first:]] == [0] * (count - first), "".join(err[-3000:] for _, err in done)
    return [json.loads(out.splitlines()[-1]) for out, _ in done]


def held(found: list[dict[str, Any]]) -> None:
    """Bitwise the training without a plan, in the same plan on every rank, within the budget."""
    for one in found:
        assert one["same"]
        assert one["recomputes"] > 0
        assert one["peak"] <= one["budget"] < one["kept"]
        assert one["digests"] == found[0]["digests"]
        assert one["orders"] == found[0]["orders"]


@pytest.mark.slow
def test_data_parallel_training_keeps_its_budget() -> None:
    """Buckets and all: what is resident is counted to the byte, and the planned peak is the measured one."""
    found = ranks("equal", "ddp")
    held([one["ddp"] for one in found])
    for one in found:
        assert one["ddp"]["resident"] == [one["ddp"]["held"]]
        assert 0 <= one["ddp"]["planned"][-1] - one["ddp"]["peak"] <= 2 * 5056


@pytest.mark.slow
def test_micro_batches_accumulate_on_every_rank() -> None:
    """Gradients are added to in place, also where they are views of DDP's buckets; FSDP shards them elsewhere."""
    for one in ranks("accumulating"):
        assert all(case["same"] for case in one.values())
        assert one["ddp"]["added"] > 0
        assert one["ddp-views"]["added"] > 0


@pytest.mark.slow
def test_a_rank_that_cannot_plan_stops_all() -> None:
    """An impossible budget, different budgets, different shapes, a fault before and one after planning: reasons, at once."""
    first, second = ranks("failing")
    for name, error, reason in (
        ("infeasible", "InfeasibleBudgetError", "10.00 KiB is below the smallest possible peak"),
        ("other budget", "RankError", "rank 0 asks for a budget of 2GiB and rank 1 for a budget of 1GiB"),
        ("other shape", "RankError", "rank 0 and rank 1 traced different graphs"),
        ("before", "RankError", "rank 1 stops: RuntimeError: out of order"),
        ("after", "RankError", "rank 1 stops: RuntimeError: out of order"),
    ):
        assert (first[name]["error"], reason in first[name]["message"]) == (error, True), first[name]
        assert reason.removeprefix("rank 1 stops: RuntimeError: ") in second[name]["message"], second[name]
        assert max(first[name]["seconds"], second[name]["seconds"]) < SECONDS
    assert first["then"]["error"] == second["then"]["error"] == ""


@pytest.mark.slow
def test_a_rank_0_that_is_stopped_stops_all() -> None:
    """By a debugger, or where its machine is full: with it the store is stopped that it holds, and no call of that returns."""
    (second,) = ranks("stopped", first=1)
    assert "the store at which the ranks met has not answered for 0:00:03" in second["message"]
    assert second["seconds"] < SECONDS


@pytest.mark.slow
def test_every_way_of_wrapping_data_parallel() -> None:
    """Several graphs from buckets, buckets that gradients are views of, a static graph, unused parameters, each reducer."""
    ways = ("ddp-buckets", "ddp-views", "ddp-static", "ddp-unused", "ddp-inner", "ddp-python-reducer-inner", "ddp-python-reducer")
    found = ranks("equal", *ways)
    for way in ways:
        held([one[way] for one in found])
    assert len(found[0]["ddp-buckets"]["planned"]) > 2


@pytest.mark.slow
def test_every_rank_measures_what_inductor_makes() -> None:
    """The plan that runs everywhere is one whose compiled step kept the budget on each rank."""
    found = ranks("fused")
    for one in found:
        assert one["same"]
        assert one["recomputes"] > 0
        assert one["peak"] <= one["budget"]
        assert one["orders"] == found[0]["orders"]
        assert "compiled by Inductor" in one["remarks"][-1]


@pytest.mark.slow
def test_every_way_of_sharding() -> None:
    """By layer or whole, compiled within or around, resharded after the forward or not."""
    ways = ("fsdp-whole", "fsdp-layers-inner", "fsdp-layers", "fsdp-kept")
    found = ranks("equal", *ways)
    for way in ways:
        held([one[way] for one in found])


@pytest.mark.slow
def test_a_rank_that_compiles_alone_does_not_hang() -> None:
    """One rank sees a new shape and the others do not: it stops, and with it the job."""
    first, second = ranks("lone")
    assert second["error"] == "RankError"
    assert "rank 1 has to compile a graph, and rank 0 runs on without" in second["message"]
    assert first["error"]
    assert max(first["seconds"], second["seconds"]) < 2 * SECONDS


@pytest.mark.slow
def test_ranks_may_plan_alone() -> None:
    """Different shapes on every rank, where that is asked for: each has its plan, and gradients are averaged."""
    first, second = ranks("alone")
    assert first["recomputes"] > 0
    assert second["recomputes"] > 0
    assert first["gradient"] == second["gradient"]


@pytest.mark.slow
def test_a_step_of_a_model_whose_wrapper_works_between_graphs_is_refused() -> None:
    """Without its gradients averaged, each rank would train another model."""
    assert all(one["refused"] for one in ranks("step"))
