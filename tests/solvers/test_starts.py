"""Starts of searches: kept values that are made one after another at the end."""

from __future__ import annotations

import random
from pathlib import Path

import checkmate
from checkmate import Graph, Plan, Problem, simulate, validate
from checkmate.solvers.evict.search import Search
from checkmate.solvers.evict.starts import ops_of_kept, starts
from checkmate.solvers.reductions.fold_views import FoldViews
from tests.solvers.bounds.test_last_run import gradients
from tests.strategies import random_graph, with_more_kept

GRAPHS = Path(__file__).parents[2] / "benchmarks" / "graphs"


def in_order(problem: Problem) -> list[int]:
    """The graph's order, and the ops of kept values once more."""
    return [*range(len(problem.graph.ops)), *ops_of_kept(problem)]


def test_a_stage_for_each_kept_value_reaches_peaks_that_one_for_all_does_not():
    """The gradient that needs most beside it is made first, the least last; in one stage the graph's order decides."""
    graph = gradients(6, 4)
    problem = Problem(graph, 32)
    assert ops_of_kept(problem) == (11, 9, 7, 5, 3, 1)
    with_stages = Search(problem, frozenset(), 0, in_order(problem))
    assert with_stages.first()
    order = with_stages.order()
    assert set(order) == set(range(len(graph.ops)))
    assert simulate(graph, Plan.from_order(graph, order)).peak_bytes <= 32
    assert with_stages.targets == list(range(12))
    assert not Search(problem, frozenset(), 0).first()


def test_a_plan_found_elsewhere_is_taken_as_it_is():
    """Computations at its end belong to the stages there, so that nothing is computed twice for them."""
    graph = gradients(4)
    problem = Problem(graph, 23)
    found = Search(problem, frozenset(), 0, in_order(problem))
    found.first()
    again = Search(problem, frozenset(), 0, in_order(problem))
    assert again.start_from_order(found.order())
    assert again.best_cost <= found.best_cost


def test_they_start_only_where_kept_values_take_much_of_the_budget():
    """Elsewhere another search would take its time for nothing."""
    graph = gradients(4)
    assert [start.order[8:] for start in starts(Problem(graph, 23), 0)][1:2] == [(7, 5, 3, 1)]
    assert not any(start.order[8:] for start in starts(Problem(graph, 80), 0))


def test_their_plans_hold_on_any_graph():
    """Views, rules and several outputs: what is found fits, and runs."""
    found = 0
    for seed in range(200):
        rng = random.Random(seed)
        graph = with_more_kept(rng, random_graph(rng, max_ops=8), 0.4)
        own = simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
        problem = Problem(graph, rng.randint(own // 2, own))
        fold = FoldViews.of(graph)
        folded = fold.apply(problem)
        search = Search(folded, frozenset(), seed, in_order(folded))
        if not search.first():
            continue
        found += 1
        search.improve(40, 1e-2, lambda: False)
        order = search.order()
        assert simulate(folded.graph, Plan.from_order(folded.graph, order)).cost == search.best_cost, seed
        assert validate(graph, Plan.from_order(graph, fold.invert(order)), problem.budget_bytes) == (), seed
    assert found > 30


def test_a_plan_whose_kept_values_are_made_at_the_end_is_put_in_other_orders():
    """An op that it left to the end stays on demand: with a stage of its own all kept values would wait for it."""
    graph = checkmate.read(GRAPHS / "resnet50.graph.json")
    assert isinstance(graph, Graph)
    problem = FoldViews.of(graph, priced=True).apply(Problem(graph, 207_920_828))
    start = next(start for start in starts(problem, 0) if len(start.order) > len(problem.graph.ops))
    search = start.search(problem, 0)
    assert search.first(stop_at_first=True)
    order = search.order()
    (late,) = start.on_demand
    assert order.index(late) > max(order.index(o) for o in search.targets)
    other = search.in_order_of(order, 1)
    assert other.best_cost <= search.best_cost
    assert other.targets == [o for o in dict.fromkeys(order) if o != late]
    again = start.order[len(problem.graph.ops) :]
    assert not Search(problem, frozenset(), 1, [*dict.fromkeys(order), *again]).start_from_order(order)
