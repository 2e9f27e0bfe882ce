"""Every solver on random tiny problems against the exact optimum."""

from __future__ import annotations

import sys

import pytest

from checkmate import BruteForce, Limits, Milp, Plan, Problem, Reason, simulate, solve
from checkmate.solvers.milp import Milp as MilpSolver
from tests.solvers.instances import HEURISTICS, LIMITS, METHODS, check, draw, stage_optimum

FAST, ALL = 120, 10_000


@pytest.mark.parametrize("solver", HEURISTICS, ids=repr)
def test_no_plan_beats_brute_force_and_no_bound_exceeds_it(solver):
    """Brute force is exact: what is cheaper is no plan, and what is above it is no bound."""
    for seed in range(FAST):
        check(draw(seed), solver)


@pytest.mark.slow
def test_ten_thousand_instances():
    """The same on 10,000 instances, all solvers; a failure names its seed."""
    sys.stdout.write(f"seeds 0 to {ALL - 1}\n")
    for seed in range(ALL):
        instance = draw(seed)
        for solver in (*HEURISTICS, *METHODS):
            check(instance, solver)


def test_heuristics_find_nearly_every_plan():
    """A search that finds nothing would pass the other laws."""
    feasible = [instance for instance in map(draw, range(FAST)) if instance.optimum is not None]
    for solver, share in zip(HEURISTICS, (0.7, 0.95, 0.97, 0.6), strict=True):
        found = sum(check(instance, solver).plan is not None for instance in feasible)
        assert found >= share * len(feasible), (solver, found, len(feasible))


def test_milp_is_exact_in_its_class():
    """Of all R matrices of the graph's own order, the program's is the cheapest."""
    compared = 0
    for seed in range(60):
        problem = draw(seed).problem
        if len(problem.graph.ops) > 4 or problem.graph.view_ops:
            continue
        if any(value.base is not None for value in problem.graph.values):
            continue
        result = solve(problem, MilpSolver(), limits=LIMITS, raise_on_failure=False)
        optimum = stage_optimum(problem)
        assert (result.plan is None) == (optimum is None), seed
        if optimum is not None:
            compared += 1
            assert result.cost <= optimum, seed  # the start may leave the class, and may be cheaper
    assert compared > 4


def test_every_exact_answer_of_a_relabelled_graph_is_the_same():
    """Names and the numbering of independent ops mean nothing."""
    from checkmate import Graph

    one = Graph.from_dag(cost=[1, 2, 3, 4], size_bytes=[3, 3, 2, 2], edges=[(0, 2), (1, 3), (2, 3)], kept=[3])
    two = Graph.from_dag(cost=[2, 1, 3, 4], size_bytes=[3, 3, 2, 2], edges=[(1, 2), (0, 3), (2, 3)], kept=[3])
    for budget in range(5, 11):
        first, second = (solve(Problem(graph, budget), BruteForce(), raise_on_failure=False) for graph in (one, two))
        assert first.cost == second.cost


def test_the_optimum_does_not_rise_with_the_budget():
    """A plan for a smaller budget is a plan for every larger one."""
    for seed in range(60):
        instance = draw(seed)
        if instance.optimum is None:
            continue
        wider = instance.problem.replace_budget(instance.problem.budget_bytes + 2)
        assert solve(wider, BruteForce(), limits=LIMITS).cost <= instance.optimum


def test_brute_force_refuses_what_it_cannot_finish():
    """Eight ops are over its limit, and it says so instead of guessing."""
    from checkmate import Graph

    chain = Graph.from_dag(cost=[1] * 8, size_bytes=[1] * 8, edges=[(i, i + 1) for i in range(7)])
    result = solve(Problem(chain, 8), BruteForce(), raise_on_failure=False)
    assert result.termination.reason is Reason.NOT_FOUND
    assert "brute force stops at 7" in result.termination.detail


def test_milp_closes_the_papers_chain():
    """linear8 at 4 units costs 26, as the original's own program found on an open solver."""
    count, forward = 17, 8
    edges = [(i, i + 1) for i in range(count - 1)] + [(i, 2 * forward - i) for i in range(forward)]
    edges += [(i - 1, 2 * forward - i) for i in range(1, forward)]
    from checkmate import Graph

    graph = Graph.from_dag(
        cost=[1] * count, size_bytes=[1] * count, edges=sorted(set(edges)), backward=[i > forward for i in range(count)]
    )
    result = solve(Problem(graph, 4), Milp(), limits=Limits(time_s=60, gap=0.0))
    assert simulate(graph, result.plan).peak_bytes <= 4
    assert result.cost == solve(Problem(graph, 4, reorder=False), Milp(), limits=Limits(time_s=60, gap=0.0)).cost
    assert any(remark.startswith("given-order bound") for remark in result.remarks)
    own = simulate(graph, Plan.from_order(graph, range(count))).peak_bytes
    assert own > 4
