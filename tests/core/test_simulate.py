"""The running balance of memory agrees with a naive oracle, and refuses what cannot run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from checkmate import Compute, Free, Graph, Op, Plan, PlanError, Value, WrongGraphError, simulate
from tests.oracle import naive_bytes
from tests.strategies import graphs_and_orders


@given(graphs_and_orders())
def test_simulate_agrees_with_a_naive_oracle(drawn):
    """The running balance and twenty naive lines describe the same machine."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    held = simulate(graph, plan).bytes
    assert held.tolist() == naive_bytes(graph, plan)
    assert held.dtype == np.int64  # exact: bytes are never rounded


@given(graphs_and_orders(), st.randoms())
def test_simulate_agrees_with_the_oracle_on_late_frees(drawn, rng):
    """Frees may come late, and an op may be computed over a value that is still live."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    steps = [step for step in plan.steps if isinstance(step, Compute) or rng.random() < 0.6]
    late = Plan(tuple(steps))
    assert simulate(graph, late).bytes.tolist() == naive_bytes(graph, late)
    assert simulate(graph, late).peak_bytes >= simulate(graph, plan).peak_bytes


@given(graphs_and_orders())
def test_a_plan_costs_what_its_computations_cost(drawn):
    """Every op is computed once or more, and each time in full."""
    graph, order = drawn
    timeline = simulate(graph, Plan.from_order(graph, order))
    assert timeline.cost == sum(graph.ops[o].cost for o in order)
    assert timeline.cost >= graph.cost
    assert type(timeline.cost) is int


@given(graphs_and_orders())
def test_the_peak_is_the_first_largest_step(drawn):
    """A figure that points at a step points at the first that is as full."""
    graph, order = drawn
    timeline = simulate(graph, Plan.from_order(graph, order))
    held = timeline.bytes.tolist()
    assert timeline.peak_bytes == max(held)
    assert timeline.peak_step == held.index(max(held))
    assert type(timeline.peak_bytes) is type(timeline.peak_step) is int


def test_a_plan_without_steps_holds_what_is_resident():
    """Parameters are there before the first step and after the last."""
    graph = Graph((), (), resident_bytes=7)
    timeline = simulate(graph, Plan(()))
    assert (timeline.peak_bytes, timeline.peak_step, timeline.cost, timeline.bytes.tolist()) == (7, 0, 0, [])
    assert (timeline.host_peak_bytes, timeline.copies) == (0, ())


@given(graphs_and_orders())
def test_keeping_everything_ends_with_all_that_was_made(drawn):
    """Without a free, the last step holds every storage."""
    graph, _ = drawn
    plan = Plan(tuple(Compute(o) for o in range(len(graph.ops))))
    total = graph.resident_bytes + sum(value.size_bytes for value in graph.values) + graph.ops[-1].workspace_bytes
    assert simulate(graph, plan).bytes[-1] == total


def test_a_view_keeps_its_storage_and_what_a_step_replaces_goes_after_it():
    """By hand: `x` and `y` are replaced in step 4, and `w` holds the storage of `z` to the end."""
    graph = Graph(
        (Op("a", (), (0, 1), 1), Op("b", (0,), (2,), 1), Op("view", (2,), (3,), 0)),
        (Value("x", 4), Value("y", 6), Value("z", 4), Value("w", 0, base=2)),
    )
    timeline = simulate(graph, Plan((Compute(0), Compute(1), Compute(2), Free(2), Compute(0), Free(3))))
    assert timeline.bytes.tolist() == [10, 14, 14, 14, 24, 10]


def test_a_replay_state_is_held_from_the_first_to_the_last_computation():
    """It is made when the op runs first and needed until it runs last; an op that runs once has none."""
    graph = Graph(
        (Op("random", (), (0,), 1, replay_bytes=8), Op("once", (), (1,), 1, replay_bytes=16), Op("use", (0,), (2,), 1)),
        (Value("x", 1), Value("y", 1), Value("z", 1)),
    )
    steps = (Compute(1), Free(1), Compute(0), Free(0), Compute(0), Free(0), Compute(0), Free(0))
    assert simulate(graph, Plan(steps)).bytes.tolist() == [1, 0, 9, 8, 9, 8, 9, 0]


def test_an_output_that_is_live_is_there_beside_the_new_one():
    """An op cannot write over what a reader may still hold: both instances are there while it runs."""
    graph = Graph((Op("a", (), (0,), 1, workspace_bytes=2),), (Value("x", 5),))
    assert simulate(graph, Plan((Compute(0), Compute(0), Compute(0)))).bytes.tolist() == [7, 12, 12]


@given(graphs_and_orders(), st.randoms())
def test_a_read_of_what_is_not_live_is_refused(drawn, rng):
    """Freeing a value before its reader leaves nothing to read."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    reads = [(p, v) for p, step in enumerate(plan.steps) if isinstance(step, Compute) for v in graph.ops[step.op].inputs]
    assume(reads)
    position, v = rng.choice(reads)
    broken = Plan((*plan.steps[:position], Free(v), *plan.steps[position:]))
    o = plan.steps[position].op
    with pytest.raises(PlanError) as caught:
        simulate(graph, broken)
    assert str(caught.value) == (
        f"step {position + 1} computes op {o} ({graph.ops[o].name!r}), which reads value {v} "
        f"({graph.values[v].name!r}), and it is not live"
    )


def test_wrong_steps_are_refused_in_words():
    """The step is named, and what it wants."""
    graph = Graph((Op("a", (), (0,), 1, replay_bytes=1),), (Value("v", 1),))
    for steps, says in (
        ((Compute(0), Compute(1)), "step 1 computes op 1 of 1"),
        ((Compute(-1),), "step 0 computes op -1 of 1"),
        ((Compute(0), Free(0), Free(0)), "step 2 frees value 0, and it is not live"),
        ((Free(7),), "step 0 frees value 7, and it is not live"),
    ):
        with pytest.raises(PlanError) as caught:
            simulate(graph, Plan(steps))
        assert str(caught.value) == says


def test_a_plan_of_another_graph_is_refused():
    """Its indices would mean other ops; a plan written by hand names no graph."""
    one = Graph.from_dag(cost=[1], size_bytes=[1], edges=[])
    other = Graph.from_dag(cost=[1], size_bytes=[2], edges=[])
    with pytest.raises(WrongGraphError) as caught:
        simulate(other, Plan.from_order(one, [0]))
    assert str(caught.value) == (
        f"the plan was made for another graph ({one.digest[:15]}, not {other.digest[:15]})"
        "\n\nhint: plan this graph again, or pass the graph that the plan was made for"
    )
    assert simulate(other, Plan((Compute(0),))).peak_bytes == 2
