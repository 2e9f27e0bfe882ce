"""The measured peak keeps the budget, and the step requests no more than the plan has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.tf2.budgets import BUDGETS
from tests.tf2.points import estimated_digest
from tests.tf2.steps import child


def check(point: dict[str, Any]) -> None:
    assert point["untouched"]
    for peak in (*point["measured_bytes"], point["calibrated_bytes"]):
        assert peak <= point["budget_bytes"], json.dumps(point)  # all of it: seen once in hundreds of runs, and not again
    # Ops that write into a dying input request nothing.
    assert point["asked_bytes"] - point["resident_bytes"] <= 1.02 * (point["planned_bytes"] - point["resident_bytes"])
    assert point["executed_remats"] == point["planned_remats"]
    assert not any(point["differs"].values())


def dropout_point(budget: str, hash_seed: str = "1") -> dict[str, Any]:
    """A small network with dropout, beside its plain step."""
    options = {"budget": budget, "threads": 1, "references": ["plain"], "time_limit_s": 1.0}
    return child(hash_seed=hash_seed, name="dropout", **options)


@pytest.fixture(scope="module")
def point() -> dict[str, Any]:
    return dropout_point("55%")


def test_a_measured_peak_keeps_the_budget_in_a_fresh_process(point: dict[str, Any]) -> None:
    """The promise, on a small network with dropout: budget, bytes, bits and what really ran."""
    check(point)
    assert set(point["differs"]) == {"plain"}


def test_measuring_adds_nothing_to_what_tensorflow_logs(point: dict[str, Any]) -> None:
    """Each session of its profiler would log a dozen lines to stderr, for each op of a model."""
    assert "cpu_feature_guard" in point["stderr"]
    assert "profile" not in point["stderr"]


def test_the_graph_does_not_depend_on_the_hash_seed(point: dict[str, Any]) -> None:
    """Plans are files: the same program must give the same graph in every process.

    This process has another hash seed, unless it was given the same one, and has run other tests before.
    """
    assert point["estimated_digest"] == estimated_digest("dropout")


@pytest.mark.slow
def test_a_looser_budget_is_kept_under_another_hash_seed(point: dict[str, Any]) -> None:
    """The same at 80 %, with the same graph."""
    looser = dropout_point("80%", hash_seed="2")
    check(looser)
    assert looser["estimated_digest"] == point["estimated_digest"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "place"), [(name, i) for name in BUDGETS for i in range(3)])
def test_networks_keep_three_budgets_each(name: str, place: int) -> None:
    """Every network at three budgets: bitwise the chained step on one and two threads, and the plain one on one."""
    references = (["chained", "plain"], ["chained"], [])[place]
    check(child(name=name, budget=BUDGETS[name][place], threads=2 if place == 1 else 1, references=references, time_limit_s=15.0))
