"""What no order needs is left out, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import Graph, Plan, Problem, simulate, solve, validate
from checkmate.solvers.reductions.unread import without_unread
from tests.solvers.test_solve import Claims
from tests.strategies import graphs_and_orders


@given(graphs_and_orders(max_ops=9), st.booleans())
def test_an_order_without_what_nobody_reads_still_holds(drawn, reorder):
    """It keeps the rules, costs and holds no more, and has nothing left to leave out."""
    graph, order = drawn
    problem = Problem(graph, "100%", reorder=reorder)
    shorter = without_unread(problem, order)
    before, after = Plan.from_order(graph, order), Plan.from_order(graph, shorter)
    assert validate(graph, after, simulate(graph, before).peak_bytes, reorder=reorder) == ()
    assert simulate(graph, after).cost <= simulate(graph, before).cost
    assert without_unread(problem, shorter) == shorter


@pytest.mark.parametrize(
    ("order", "needed"),
    [
        ((0, 1, 0, 2, 1), (0, 2, 1)),  # the first run of 1 is not the one that is kept, and then nobody reads the first of 0
        ((0, 0, 1, 2), (0, 1, 2)),
        ((0, 1, 2, 0), (0, 1, 2)),
        ((0, 1, 0, 2), (0, 1, 0, 2)),
    ],
)
def test_only_what_is_read_or_kept_is_computed(order, needed):
    """Op 0 is read by 1 and by 2, which are kept."""
    graph = Graph.from_dag(cost=[1, 1, 1], size_bytes=[4, 1, 1], edges=[(0, 1), (0, 2)], kept=[1, 2])
    assert without_unread(Problem(graph, 100), order) == list(needed)
    assert solve(Problem(graph, 100), Claims(order)).plan.order == needed


def test_a_first_computation_that_has_its_place_stays():
    """Without reordering, and where the graph orders two ops, the first computation says when."""
    dag = Graph.from_dag(cost=[1, 1, 1], size_bytes=[1, 1, 1], edges=[(0, 2)], kept=[1, 2])
    tied = Graph(dag.ops, dag.values, order=((0, 1),))
    order = [0, 1, 0, 2]
    assert without_unread(Problem(dag, 100), order) == [1, 0, 2]
    assert without_unread(Problem(dag, 100, reorder=False), order) == order
    assert without_unread(Problem(tied, 100), order) == order
