"""Best-first search over states: exact, or an honest bound."""

from __future__ import annotations

import pytest

from checkmate import AStar, Graph, Limits, OptionError, Problem, Reason, solve
from tests.solvers.chains import unit_chain
from tests.solvers.instances import LIMITS, check, draw

SMALL = 400
"""Seeds of the fast test; the slow one of all solvers takes 10,000."""


def test_it_finds_what_exhaustive_search_finds():
    """Two searches that share no code: Dijkstra over every move, and A* over least moves with an estimate."""
    solved = 0
    for seed in range(SMALL):
        instance = draw(seed)
        result = check(instance, AStar())
        if result.termination.reason is Reason.OPTIMAL:
            solved += 1
            assert result.cost == instance.optimum, seed
        elif result.termination.reason is Reason.NOT_FOUND:
            graph = instance.problem.graph
            tied = any(value.base is not None for value in graph.values) or any(op.replay_bytes for op in graph.ops)
            assert tied or instance.optimum is None, (seed, result.termination)
    assert solved > 80


@pytest.mark.parametrize(("layers", "budget", "optimum"), [(8, 4, 26), (16, 4, 67), (16, 6, 47)])
def test_unit_chains_with_little_room_are_solved(layers, budget, optimum):
    """Few values fit, so few states are within reach, however long the chain."""
    result = solve(Problem(unit_chain(layers), budget), AStar(), limits=Limits(time_s=60, gap=0.0))
    assert result.termination.reason is Reason.OPTIMAL
    assert result.cost == optimum == result.bound


def test_a_search_cut_short_keeps_its_bound():
    """What is not expanded costs at least as much as what is expanded next."""
    problem = Problem(unit_chain(16), 6)
    result = solve(problem, AStar(max_states=3000), limits=LIMITS, raise_on_failure=False)
    assert result.plan is None
    assert "the store is full" in result.termination.detail
    assert problem.graph.cost < result.bound <= 47


def test_a_budget_below_every_plan_is_proven_too_small():
    """Nothing left to expand, and no goal: no plan."""
    result = solve(Problem(unit_chain(4), 3), AStar(), limits=LIMITS, raise_on_failure=False)
    smaller = solve(Problem(unit_chain(4), 2), AStar(), limits=LIMITS, raise_on_failure=False)
    assert result.plan is not None
    assert smaller.termination.reason is Reason.INFEASIBLE


def test_what_does_not_fit_its_states_is_said():
    """A graph of 200 values is no search for two words of bits."""
    chain = Graph.from_dag(cost=[1] * 200, size_bytes=[1] * 200, edges=[(i, i + 1) for i in range(199)])
    result = solve(Problem(chain, 2), AStar(), raise_on_failure=False)
    assert result.termination.reason is not Reason.INFEASIBLE
    if result.plan is None:
        assert "201 bits of state are over 128" in result.termination.detail


def test_no_room_for_states_is_refused():
    """A search needs at least its first state."""
    with pytest.raises(OptionError, match="max_states=0"):
        AStar(max_states=0)
