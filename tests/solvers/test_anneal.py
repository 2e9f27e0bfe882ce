"""Annealed sequences: every one is a plan, the best is within the budget, and both orders and recomputations are found."""

from __future__ import annotations

import random

import numpy as np

from checkmate import BruteForce, Graph, Limits, Plan, Problem, simulate, solve, validate
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.clocks import no_alarm
from checkmate.solvers.evict.anneal import anneal_order, anneal_sequence
from checkmate.solvers.reductions.fold_views import FoldViews
from tests.solvers.chains import uneven_chain
from tests.strategies import random_graph


def tight(seed: int) -> Problem:
    """A random problem with its views folded, at half the room of its given order."""
    graph = random_graph(random.Random(seed), max_ops=9)
    own = simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
    problem = Problem(graph, (floor(graph).peak_bytes + own) // 2)
    return FoldViews.of(graph).apply(problem)


def test_every_sequence_is_a_plan_and_the_best_keeps_the_budget():
    """Views tied to a place, several outputs, `order`, `clobbered_by`, replay states, ops that may run once."""
    within = changed = 0
    for seed in range(150):
        problem = tight(seed)
        graph = problem.graph
        found = anneal_sequence(problem, range(len(graph.ops)), seed)
        assert validate(graph, Plan.from_order(graph, found.last)) == (), seed
        changed += found.last != list(range(len(graph.ops)))
        if found.best:
            within += 1
            assert validate(graph, Plan.from_order(graph, found.best), problem.budget_bytes) == (), seed
    assert within > 50
    assert changed > 26


def test_it_finds_optima_of_small_problems():
    """From the order that keeps everything; the optimum is from trying all schedules."""
    optimal = compared = 0
    for seed in range(75):
        problem = tight(seed)
        graph = problem.graph
        best = solve(problem, BruteForce(), limits=Limits(time_s=20), raise_on_failure=False)
        found = anneal_sequence(problem, range(len(graph.ops)), seed)
        if best.plan is None or best.cost == graph.cost:
            continue
        compared += 1
        assert not found.best or sum(graph.ops[o].cost for o in found.best) >= best.cost, seed
        optimal += bool(found.best) and sum(graph.ops[o].cost for o in found.best) == best.cost
    assert compared > 2
    assert optimal > compared // 2


def test_it_recomputes_where_no_order_is_enough():
    """A chain within half of its room: every order of it is the same one, so that values have to be made again."""
    graph = uneven_chain(random.Random(3), 10)
    own = simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
    problem = Problem(graph, (floor(graph).peak_bytes + own) // 2)
    found = anneal_sequence(problem, range(len(graph.ops)), 0)
    assert len(found.best) > len(graph.ops)


def test_it_leaves_out_what_is_computed_again_for_nothing():
    graph = Graph.from_dag(cost=[1] * 4, size_bytes=[1] * 4, edges=[(0, 1), (1, 2), (2, 3)])
    found = anneal_sequence(Problem(graph, 4), [0, 0, 1, 0, 1, 2, 3], 0)
    assert sorted(found.best) == [0, 1, 2, 3]


def test_equal_seeds_give_equal_sequences_and_an_alarm_ends_it():
    problem = tight(5)
    order = range(len(problem.graph.ops))
    assert anneal_sequence(problem, order, 1) == anneal_sequence(problem, order, 1)
    raised = no_alarm()
    raised[0] = 1
    assert anneal_sequence(problem, order, 1, raised).last == list(order)
    assert np.array_equal(raised, [1])


def test_every_order_can_run_and_keeps_the_rules():
    """Views tied to a place, several outputs, `order`, `clobbered_by`: whatever could run still can."""
    moved = 0
    for seed in range(200):
        rng = random.Random(seed)
        graph = random_graph(rng, max_ops=9)
        order = list(range(len(graph.ops)))
        again = [o for o in order if graph.ops[o].recomputable and rng.random() < 0.3]
        sequence = order + again
        if validate(graph, Plan.from_order(graph, sequence)):
            sequence = order
        other = anneal_order(
            Problem(graph, 0), sequence, 0.5 * simulate(graph, Plan.from_order(graph, sequence)).peak_bytes, seed
        )
        moved += other != sequence
        assert sorted(other) == sorted(sequence), seed
        assert validate(graph, Plan.from_order(graph, other)) == (), seed
        assert validate(graph, Plan.from_order(graph, dict.fromkeys(other))) == (), seed
    assert moved > 33


def test_it_finds_the_order_that_holds_one_branch_at_a_time():
    """Eight branches of a large value and a small one: in turn they need one large value, side by side eight."""
    edges = [(i, 8 + i) for i in range(8)] + [(8 + i, 16) for i in range(8)]
    graph = Graph.from_dag(cost=[1] * 17, size_bytes=[10] * 8 + [1] * 8 + [1], edges=edges)
    own = simulate(graph, Plan.from_order(graph, range(17))).peak_bytes
    order = anneal_order(Problem(graph, 0), range(17), 20.0, 0)
    assert own == 81
    assert simulate(graph, Plan.from_order(graph, order)).peak_bytes == 18
