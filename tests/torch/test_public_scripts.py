"""The benchmark of public training scripts, `benchmarks/torch_scripts.py`: what it counts, and how it classes a run."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks import torch_scripts
from benchmarks.counting_allocator import mapped_bytes
from benchmarks.torch_scripts import outcome

pytestmark = pytest.mark.filterwarnings("ignore")  # what libraries of the scripts warn of is not ours


def a_run(*peaks: int, **more: Any) -> dict[str, Any]:
    """A run with a peak for each step, in bytes."""
    kinds = more.pop("kinds", "a" * len(peaks))
    budgets = more.pop("budgets", [[80, True]])
    steps = [
        {"peak_bytes": peak, "live_bytes": 10, "budgets": budgets, "kind": kind} for peak, kind in zip(peaks, kinds, strict=True)
    ]
    return {"steps": steps, "losses": [[1, 0.5]], "warnings": [], "parameters": "digest", **more}


def classed(found: dict[str, Any], label: str = "80% of eager") -> str:
    """The class of a run beside an eager one that takes 100 bytes."""
    return outcome(found, {"eager": a_run(90, 100), "100%": a_run(90, 100), label: found})[0]


REFUSAL = {"budget_bytes": 80, "smallest_bytes": 90, "message": ""}
ANOTHER = {"budget_bytes": 90, "smallest_bytes": 95, "message": ""}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (a_run(80, 80), "holds"),
        (a_run(81, 80), "silent"),
        (a_run(80, 80, 81), "silent"),
        (a_run(90, 80, warnings=[[1, "a first step may take up to 90 B, more than its budget of 80 B"]]), "announced"),
        (a_run(95, 80, warnings=[[1, "a first step may take up to 90 B, more than its budget of 80 B"]]), "understated"),
        (a_run(90, 90, warnings=[[1, "a first step may take up to 90 B, more than its budget of 80 B"]]), "silent"),
        (a_run(80, 90, 90, warnings=[[2, "no plan keeps the budget of 80 B: it may be exceeded by 10 B"]]), "announced"),
        (
            a_run(80, 90, warnings=[[2, "tensors take 5 B more, no plan keeps the budget of 80 B: may exceed it by as much"]]),
            "understated",
        ),
        (a_run(90, 80, warnings=[[2, "a step may take up to 90 B"]]), "silent"),  # said after it
        (a_run(80, parameters="another"), "wrong bits"),
        (a_run(80, losses=[[1, 0.25]]), "wrong bits"),
        (a_run(refused=REFUSAL, retries=[a_run(90, 90, asked="90")]), "refused"),
        (a_run(refused=REFUSAL, retries=[a_run(91, 90, asked="90")]), "silent"),
        (a_run(81, refused=REFUSAL, retries=[a_run(90, 90, asked="90")]), "silent"),
        (a_run(refused=REFUSAL, retries=[a_run(refused=ANOTHER, asked="90"), a_run(95, asked="95")]), "refused"),
        (a_run(refused=REFUSAL, retries=[a_run(85, asked="70%", budgets=[[85, True]])]), "refused"),
        (a_run(refused=REFUSAL, retries=[a_run(86, asked="70%", budgets=[[85, True]])]), "silent"),
        (a_run(refused=REFUSAL, retries=[a_run(refused=REFUSAL, asked="90")]), "false refusal"),
        (
            a_run(refused={**REFUSAL, "smallest_bytes": 101}, retries=[a_run(101, asked="101")]),
            "false refusal",
        ),  # eager takes less
        (a_run(refused={**REFUSAL, "smallest_bytes": None}, retries=[]), "false refusal"),
        (a_run(80, 80, 80, refused=REFUSAL, retries=[a_run(90, asked="90")]), "late refusal"),
        (
            a_run(80, 80, 80, kinds="aba", refused=REFUSAL, retries=[a_run(90, asked="90")]),
            "refused",
        ),  # at the second batch of its sizes
        (a_run(error="KeyError: 7"), "crash"),
        (a_run(80, error="NothingPlannedError: nothing of this call is planned"), "refused"),
        (a_run(90, error="NothingPlannedError: nothing of this call is planned"), "silent"),
        (a_run(80, 80, 80, error="GraphError: it is a sparse tensor"), "crash"),  # too late
        ({"hang": 300.0}, "hang"),
    ],
)
@pytest.mark.parametrize("label", ["60%", "80% of eager"])
def test_a_run_is_classed_by_what_a_user_was_told(found: dict[str, Any], expected: str, label: str) -> None:
    """A step over its budget is silent unless a warning before it named as much; a refusal is right if what it names works."""
    assert classed(copy.deepcopy(found), label) == expected


def test_a_script_that_pytorch_does_not_compile_is_not_counted() -> None:
    """Its own backend raises the same error."""
    found = a_run(error="RuntimeError: double backward")
    row = {
        "eager": a_run(100),
        "100%": copy.copy(found),
        "aot_eager": copy.copy(found),
        "60%": found,
        "80% of eager": copy.copy(found),
    }
    torch_scripts.classify(row)
    assert found["outcome"] == "not compiled"
    assert torch_scripts.counted({"pinn": row}) == {}


def test_a_share_is_compared_with_the_budget_of_the_whole_step() -> None:
    """Until the step is planned as a whole its graphs have budgets for themselves."""
    found = a_run(70, 70)
    found["steps"][0]["budgets"] = [[40, False]]
    assert classed(found, "60%") == "holds"


def test_a_share_that_no_step_has_shown_is_one_of_what_eager_takes() -> None:
    """A refusal in the first step names the bytes of one part of it: another network may have its own."""
    own = {"budgets": [[40, False]], "refused": {**REFUSAL, "budget_bytes": 45}, "retries": [a_run(70, asked="70%")]}
    assert classed(a_run(64, **own), "60%") == "refused"  # 10 bytes exist before, and eager takes 100
    assert classed(a_run(65, **own), "60%") == "silent"


def test_every_script_has_a_source() -> None:
    """The table names the public script that each has the shape of."""
    from scripts import SCRIPTS

    assert len(SCRIPTS) >= 35
    assert all(script.source and script.features for script in SCRIPTS.values())
    assert len({script.source for script in SCRIPTS.values()}) == len(SCRIPTS)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") and shutil.which("ninja")), reason="the allocator is built with g++ and ninja")
def test_a_public_script_keeps_its_budget() -> None:
    """The peak of every step, of everything in the process, is within the budget; no bit differs."""
    command = [sys.executable, torch_scripts.__file__, "--print-only", "--time-limit", "3", "--scripts", "mingpt"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_weights_that_are_mapped_from_a_file_are_counted() -> None:
    """The allocator does not make them."""
    mapped, made = torch.zeros(100), torch.zeros(1)

    class Counter:
        owns = staticmethod(lambda address: address != mapped.data_ptr())

    assert mapped_bytes(Counter) == mapped.nbytes
    del made
