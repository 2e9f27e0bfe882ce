"""The same computations in another order."""

from __future__ import annotations

import random

from checkmate import Graph, Plan, simulate, validate
from checkmate.solvers.evict.instance import first_computations
from checkmate.solvers.evict.reorder import reorder
from tests.strategies import random_graph


def test_every_order_can_run_and_keeps_the_rules():
    """Views tied to a place, several outputs, `order`, `clobbered_by`: whatever could run still can."""
    moved = 0
    for seed in range(400):
        rng = random.Random(seed)
        graph = random_graph(rng, max_ops=9)
        order = list(range(len(graph.ops)))
        again = [o for o in order if graph.ops[o].recomputable and rng.random() < 0.3]
        sequence = order + again
        if validate(graph, Plan.from_order(graph, sequence)):
            sequence = order
        other = reorder(graph, sequence, 0.5 * simulate(graph, Plan.from_order(graph, sequence)).peak_bytes, seed)
        moved += other != sequence
        assert sorted(other) == sorted(sequence), seed
        assert validate(graph, Plan.from_order(graph, other)) == (), seed
        assert validate(graph, Plan.from_order(graph, first_computations(other))) == (), seed
    assert moved > 100


def test_it_finds_the_order_that_holds_one_branch_at_a_time():
    """Eight branches of a large value and a small one: in turn they need one large value, side by side eight."""
    edges = [(i, 8 + i) for i in range(8)] + [(8 + i, 16) for i in range(8)]
    graph = Graph.from_dag(cost=[1] * 17, size_bytes=[10] * 8 + [1] * 8 + [1], edges=edges)
    own = simulate(graph, Plan.from_order(graph, range(17))).peak_bytes
    order = reorder(graph, range(17), 20.0, 0)
    assert own == 81
    assert simulate(graph, Plan.from_order(graph, order)).peak_bytes == 18
