"""Segment checkpointing."""

from __future__ import annotations

import random
from functools import cache

import pytest

from checkmate import BruteForce, ChenGreedy, ChenSqrtN, Graph, Griewank, LocalSearch, OptionError, Problem, Reason, solve
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.baselines.forward_pass import articulation_points
from tests.solvers.chains import uneven_chain, unit_chain
from tests.solvers.generators import transformer
from tests.solvers.instances import check, draw

SOLVERS = [kind(points=points) for kind in (ChenSqrtN, ChenGreedy, Griewank) for points in ("articulation", "linearized")]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_segments_beat_no_brute_force_and_keep_the_budget(solver):
    """On graphs with views, random, pinned and overwritten ops, too."""
    found = sum(check(draw(seed), solver).plan is not None for seed in range(60))
    assert found > 4


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_segments_of_uneven_chains_beat_no_brute_force(solver):
    """Chains are what they were made for."""
    rng = random.Random(1)
    found = 0
    for _ in range(20):
        graph = uneven_chain(rng, 3)
        problem = Problem(graph, rng.randint(keep_all_bytes(graph) // 2, keep_all_bytes(graph)))
        best = solve(problem, BruteForce(), raise_on_failure=False)
        result = solve(problem, solver, raise_on_failure=False)
        if result.plan is not None:
            found += 1
            assert best.cost <= result.cost
            assert result.peak_bytes <= problem.budget_bytes
    assert found > 2


@pytest.mark.parametrize("solver", [ChenSqrtN(), ChenGreedy(), ChenSqrtN("linearized"), ChenGreedy("linearized")], ids=repr)
@pytest.mark.parametrize("layers", [16, 36, 64])
def test_a_chain_fits_in_twice_its_square_root_at_less_than_one_more_forward(layers, solver):
    """The sublinear memory of Chen et al. (2016): 2 sqrt(n) units and the working set of a gradient."""
    result = solve(Problem(unit_chain(layers), 2 * round(layers**0.5) + 3), solver)
    assert 2 * layers + 1 < result.cost <= 3 * layers + 1


@cache
def searched() -> tuple[Problem, int]:
    """A problem, and the cost of the plan that local search finds."""
    problem = Problem(transformer(2), "70%")
    return problem, solve(problem, LocalSearch(decodes=300)).cost


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_a_captured_step_is_planned_like_any_other(solver):
    """Views, random ops, norms with several outputs: the same plan law as everywhere, no better than local search."""
    problem, cost = searched()
    result = solve(problem, solver, raise_on_failure=False)
    if result.plan is not None:
        assert result.cost >= cost


def test_the_cheapest_setting_wins():
    """Nothing is recomputed where nothing has to be."""
    graph = unit_chain(8)
    for solver in SOLVERS:
        assert solve(Problem(graph, keep_all_bytes(graph)), solver).overhead == 1.0


def test_a_graph_without_a_backward_pass_has_no_segments():
    """It says so instead of guessing what is forward."""
    graph = Graph.from_dag(cost=[1] * 3, size_bytes=[1] * 3, edges=[(0, 1), (1, 2)])
    result = solve(Problem(graph, 2), ChenSqrtN(), raise_on_failure=False)
    assert result.termination.reason is Reason.NOT_FOUND
    assert "no backward ops" in result.termination.detail


def test_an_unreachable_budget_is_answered_with_the_lowest_peak():
    """Not found is no proof, and what would have been enough is said."""
    result = solve(Problem(unit_chain(8), 4), ChenSqrtN(), raise_on_failure=False)
    assert result.termination.reason is Reason.NOT_FOUND
    assert result.termination.detail == "no setting peaks below 6 B"


def test_articulation_points_are_those_whose_removal_disconnects():
    """Against the definition, on random graphs."""
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 8)
        edges = {(a, b) for b in range(1, count) for a in range(b) if rng.random() < 0.3}
        graph = Graph.from_dag(cost=[1] * count, size_bytes=[1] * count, edges=sorted(edges))
        every = range(count)
        expected = [o for o in every if parts(set(every) - {o}, edges) > parts(set(every), edges)]
        assert articulation_points(graph, every) == expected


def parts(inside: set[int], edges: set[tuple[int, int]]) -> int:
    """Connected parts of the undirected graph on some nodes."""
    count, left = 0, set(inside)
    while left:
        count += 1
        reached = {left.pop()}
        while reached:
            o = reached.pop()
            beside = {a + b - o for a, b in edges if o in (a, b)} & left
            left -= beside
            reached |= beside
    return count


@pytest.mark.parametrize("kind", [ChenSqrtN, ChenGreedy, Griewank])
def test_unknown_points_are_refused(kind):
    """A misspelt option is an error at once."""
    with pytest.raises(OptionError, match="points='cut' is neither"):
        kind(points="cut")
