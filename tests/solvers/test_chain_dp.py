"""The dynamic program over training chains."""

from __future__ import annotations

import itertools
import random

import pytest

from checkmate import BruteForce, ChainDP, Graph, Limits, OptionError, Plan, Problem, Reason, simulate, solve
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.reductions.training_chain import TrainingChain
from tests.solvers.chains import uneven_chain, unit_chain
from tests.solvers.generators import transformer
from tests.solvers.instances import check, draw


def persistent_orders(graph: Graph, layers: int) -> list[list[int]]:
    """Every persistent plan of a chain: for each layer, the step from which its value is held if it is there."""
    steps = range(layers, len(graph.ops))
    readers = [[k for k in steps if i in graph.ops[k].inputs] for i in range(layers)]
    first = [min(read, default=len(graph.ops)) for read in readers]
    orders: list[list[int]] = []
    for held_from in itertools.product(*(range(layers, last + 1) for last in first)):
        live: set[int] = set()
        order: list[int] = []
        for k in steps:
            wanted = sorted(i for i in graph.ops[k].inputs if i < layers)
            for i in wanted:
                low = i
                while low >= 0 and low not in live:
                    low -= 1
                order += range(low + 1, i + 1)
                live.update(range(low + 1, i + 1))
            order.append(k)
            live = {i for i in live if held_from[i] <= k or i in wanted}
        orders.append(order)
    return orders


def test_it_is_exact_among_persistent_plans():
    """Against every choice of the step from which each layer is held, on chains of unequal layers."""
    rng = random.Random(0)
    compared = 0
    for _ in range(60):
        graph = uneven_chain(rng, rng.randint(2, 5))
        chain = TrainingChain.of(Problem(graph, 0))
        assert isinstance(chain, TrainingChain)
        layers = len(chain.layers) - 1
        plans = [simulate(graph, Plan.from_order(graph, order)) for order in persistent_orders(graph, layers)]
        for budget in sorted({plan.peak_bytes for plan in plans}):
            best = min(plan.cost for plan in plans if plan.peak_bytes <= budget)
            assert solve(Problem(graph, budget), ChainDP()).cost == best
            compared += 1
        lowest = min(plan.peak_bytes for plan in plans)
        result = solve(Problem(graph, lowest - 1), ChainDP(), raise_on_failure=False)
        assert result.plan is None
        if lowest - 1 >= floor(graph).peak_bytes:  # else no plan of any kind keeps it, and no solver runs
            assert result.termination.reason is Reason.NOT_FOUND
            assert result.termination.detail == "no persistent plan keeps the budget"
    assert compared > 150


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_unit_chains_are_optimal(layers):
    """Where all layers are alike, no plan of any kind is cheaper."""
    graph = unit_chain(layers)
    for budget in range(3, keep_all_bytes(graph) + 1):
        assert solve(Problem(graph, budget), ChainDP()).cost == solve(Problem(graph, budget), BruteForce()).cost


def test_uneven_chains_are_nearly_always_optimal_and_never_below():
    """Dropping what was already held may pay where sizes differ, but seldom; gradients are computed once here."""
    rng = random.Random(2)
    same = total = 0
    for _ in range(60):
        graph = uneven_chain(rng, 3)
        problem = Problem(graph, rng.randint(keep_all_bytes(graph) // 2, keep_all_bytes(graph)), recompute="forward")
        best = solve(problem, BruteForce(), raise_on_failure=False).cost
        found = solve(problem, ChainDP(), raise_on_failure=False).cost
        if best is not None:
            total += 1
            same += found == best
            assert found is None or found >= best
    assert same >= 0.95 * total > 15


@pytest.mark.parametrize(
    ("layers", "budget", "cost"), [(8, 4, 26), (8, 6, 21), (8, 8, 19), (16, 4, 67), (16, 6, 47), (16, 8, 43), (32, 6, 111)]
)
def test_the_papers_chains_cost_what_is_known(layers, budget, cost):
    """Optimal by the original's program where it closed, and better where it did not."""
    assert solve(Problem(unit_chain(layers), budget), ChainDP()).cost == cost


def test_the_cost_does_not_rise_with_the_budget():
    """A plan for a smaller budget is a plan for every larger one."""
    graph = uneven_chain(random.Random(7), 12)
    budgets = range(keep_all_bytes(graph) // 3, keep_all_bytes(graph))
    costs = [solve(Problem(graph, budget), ChainDP(), raise_on_failure=False).cost for budget in budgets]
    found = [cost for cost in costs if cost is not None]
    assert len(found) > 10
    assert found == sorted(found, reverse=True)
    assert costs[: len(costs) - len(found)] == [None] * (len(costs) - len(found))


def test_other_graphs_are_refused_in_words():
    """A method for chains does not guess what the chain of another graph might be."""
    skip = Graph.from_dag(
        cost=[1] * 7,
        size_bytes=[1] * 7,
        edges=[(0, 1), (1, 2), (0, 2), (2, 3), (3, 4), (2, 4), (4, 5), (1, 5), (5, 6), (0, 6)],
        backward=[False] * 4 + [True] * 3,
    )
    result = solve(Problem(skip, 4), ChainDP(), raise_on_failure=False)
    assert result.termination.reason is Reason.NOT_FOUND
    assert result.termination.detail == "not a training chain: forward op 2 ('2') reads layer 1 of 2"
    assert "no layer" in solve(Problem(transformer(2), "60%"), ChainDP(), raise_on_failure=False).termination.detail


def test_random_graphs_beat_no_brute_force():
    """Most are refused; what is planned keeps the laws."""
    assert sum(check(draw(seed), ChainDP()).plan is not None for seed in range(300)) > 5


def test_thinned_frontiers_still_give_plans_and_say_so():
    """Fewer points cost optimality, never validity."""
    graph = uneven_chain(random.Random(3), 14)
    budget = keep_all_bytes(graph) * 2 // 3
    exact = solve(Problem(graph, budget), ChainDP())
    thinned = solve(Problem(graph, budget), ChainDP(max_points=8))
    assert exact.cost <= thinned.cost
    assert "thinned" in thinned.remarks[0]
    with pytest.raises(OptionError, match="max_points=0"):
        ChainDP(max_points=0)


def test_time_ends_it():
    """A long chain within a moment: no plan, and the limit is named."""
    result = solve(Problem(unit_chain(120), 20), ChainDP(), limits=Limits(time_s=0.05), raise_on_failure=False)
    assert (result.termination.reason, result.termination.limit) == (Reason.NOT_FOUND, "time")
