"""Options are checked where the user's call comes in, and errors say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import checkmate
from checkmate import Auto, Budget, Graph, LocalSearch, OptionError, Plan, UnitError
from checkmate.frontend.options import PlanningOptions, load_plan, parsed


def options(**given: Any) -> PlanningOptions:
    return PlanningOptions.of(**{"budget": None, "solver": None, "time_limit_s": None, "plan": None, **given})


@pytest.fixture
def graph() -> Graph:
    return Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])


@pytest.fixture
def plan(graph: Graph) -> Plan:
    return Plan.from_order(graph, [0, 1])


def test_text_is_parsed_once() -> None:
    """A budget that is a value already stays the same object, so that no later layer reads text."""
    made = options(budget=" 60% ").budget
    assert made == Budget("60%", percentage=60.0)
    assert options(budget=made).budget is made
    assert parsed(made) is made
    assert parsed(None) is None


def test_options_hold_values() -> None:
    """A solver by name becomes the solver; one that is given stays."""
    solver = LocalSearch(decodes=3)
    assert options(solver="auto").solver == Auto()
    assert options(solver=solver).solver is solver
    assert options(budget=2**30).budget == Budget("1073741824 bytes", total_bytes=2**30)


@pytest.mark.parametrize("limit", [0, -1, "5", float("nan")])
def test_a_time_limit_that_is_none_is_refused_with_a_hint(limit: object) -> None:
    """The message has the argument and its value."""
    with pytest.raises(OptionError, match="time_limit_s=") as error:
        options(time_limit_s=limit)
    assert repr(limit) in error.value.message
    assert "time_limit_s=30" in error.value.hint


@pytest.mark.parametrize("budget", ["lots", "-5GiB", "12 parsecs", "", -1])
def test_a_budget_that_cannot_be_read_is_refused_with_a_hint(budget: object) -> None:
    """At the call, not when the graph is known."""
    with pytest.raises(UnitError) as error:
        options(budget=budget)
    assert error.value.hint


def test_an_unknown_solver_is_refused_with_a_hint() -> None:
    """At the call, too."""
    with pytest.raises(OptionError, match="no-such-solver") as error:
        options(solver="no-such-solver")
    assert error.value.hint


def test_a_plan_comes_from_a_plan_a_file_of_one_or_a_file_of_a_result(graph: Graph, plan: Plan, tmp_path: Path) -> None:
    """All three run the same."""
    checkmate.write(plan, tmp_path / "plan.json")
    checkmate.write(checkmate.evaluate(graph, plan), tmp_path / "result.json")
    assert load_plan(plan) is plan
    assert load_plan(tmp_path / "plan.json") == plan
    assert options(plan=str(tmp_path / "result.json")).plan == plan


def test_a_missing_plan_file_is_named(tmp_path: Path) -> None:
    """An error of the file system alone would not say which option named the file."""
    missing = tmp_path / "missing.json"
    with pytest.raises(OptionError) as error:
        options(plan=missing)
    assert str(missing) in error.value.message
    assert "checkmate plan" in error.value.hint


def test_a_file_that_holds_no_plan_is_named(graph: Graph, tmp_path: Path) -> None:
    """The message says what it holds instead."""
    checkmate.write(graph, tmp_path / "graph.json")
    with pytest.raises(OptionError, match="holds a graph") as error:
        options(plan=tmp_path / "graph.json")
    assert str(tmp_path / "graph.json") in error.value.message
    assert error.value.hint
