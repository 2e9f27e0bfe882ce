"""A budget of memory as an allocator counts it is kept by that account."""

from __future__ import annotations

import pytest

from checkmate import Graph, InfeasibleBudgetError, PlanNotFoundError, Problem, simulate, solve
from checkmate.core.budget import Budget, keep_all_bytes
from checkmate.frontend.counted_memory import cheapest_counted, resolved_budget
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import planner_for
from checkmate.studies.reserved import allocator_peaks

MIB = 2**20


def training(layers: int = 12) -> Graph:
    """Forward and backward of a chain of values of 11 to 31 MiB."""
    sizes = [(11 + 7 * i % 20) * MIB + i * 100_000 for i in range(layers)]
    edges = [(i, i + 1) for i in range(2 * layers - 1)] + [(layers - 1 - i, layers + i) for i in range(1, layers)]
    return Graph.from_dag(cost=[1] * 2 * layers, size_bytes=[*sizes, *reversed(sizes)], edges=edges, kept=(2 * layers - 1,))


def counted(graph: Graph, plan) -> int:
    return allocator_peaks(graph, plan).reserved_bytes


@pytest.mark.parametrize("share", [0.9, 0.75, 0.6])
def test_what_counts_keeps_the_budget(share: float) -> None:
    """A plan for live bytes would hold more than the budget; the plan for what counts does not, and its bound still holds."""
    graph = training()
    budget = int(share * keep_all_bytes(graph))
    live = solve(Problem(graph, budget))
    options = PlanningOptions(budget=Budget.parse(budget), counted=counted, time_limit_s=2.0)
    result = planner_for(options)(graph)
    assert counted(graph, result.plan) <= budget
    assert result.budget_bytes == budget
    assert result.bound <= live.cost <= result.cost  # every plan that keeps the larger account keeps the smaller one
    assert result.peak_bytes == simulate(graph, result.plan).peak_bytes
    assert result.gap == pytest.approx(1 - result.bound / result.cost)


def test_the_plan_for_live_bytes_counts_for_more() -> None:
    """Otherwise the test above would test nothing."""
    graph = training()
    budget = int(0.75 * keep_all_bytes(graph))
    assert counted(graph, solve(Problem(graph, budget)).plan) > budget


def test_a_budget_that_only_live_bytes_keep_is_refused_with_one_that_is_kept() -> None:
    """The hint can be followed."""
    graph = training()
    with pytest.raises(InfeasibleBudgetError) as proven:
        solve(Problem(graph, 1))
    smallest = proven.value.smallest_bytes
    assert smallest is not None
    with pytest.raises(PlanNotFoundError, match="with what the allocator adds") as refused:
        cheapest_counted(Problem(graph, smallest), counted, lambda problem, spent_s: solve(problem))
    least = int(float(refused.value.hint.split("at least ")[1].split("MiB")[0]) * MIB)
    result = cheapest_counted(Problem(graph, least), counted, lambda problem, spent_s: solve(problem))
    assert counted(graph, result.plan) <= least


def test_no_plan_by_live_bytes_is_a_proof() -> None:
    """What counts is no less than the live bytes."""
    with pytest.raises(InfeasibleBudgetError):
        cheapest_counted(Problem(training(), 20 * MIB), counted, lambda problem, spent_s: solve(problem))


def test_a_share_is_of_what_keeping_everything_takes_by_the_same_account() -> None:
    """With 100 % everything is kept, whatever the allocator adds."""
    graph = training()
    budget = Budget.parse("100%")
    assert resolved_budget(budget, graph, None) == keep_all_bytes(graph)
    assert resolved_budget(budget, graph, counted) > keep_all_bytes(graph)
    result = planner_for(PlanningOptions(budget=budget, counted=counted))(graph)
    assert result.overhead == 1
    assert resolved_budget(Budget.parse("1GiB"), graph, counted) == 2**30
