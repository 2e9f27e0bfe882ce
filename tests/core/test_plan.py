"""Plans: frees at their earliest places, and the matrices of Jain et al. as another way to write them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from checkmate import Compute, Free, Graph, Op, Plan, PlanError, Value, simulate, validate
from tests.strategies import graphs_and_orders


def diamond() -> Graph:
    """One op read by two, which a third reads: small enough to write plans by hand."""
    return Graph.from_dag(
        cost=[1, 1, 1, 1], size_bytes=[4, 2, 3, 1], edges=[(0, 1), (0, 2), (1, 3), (2, 3)], kept=[3], names=list("abcd")
    )


@given(graphs_and_orders())
def test_a_plan_computes_its_order(drawn):
    """Frees go between the computations and change none of them."""
    graph, order = drawn
    plan = Plan.from_order(graph, iter(order))
    assert plan.order == tuple(order)
    assert plan.graph_digest == graph.digest
    assert validate(graph, plan, simulate(graph, plan).peak_bytes) == ()


@given(graphs_and_orders())
def test_every_free_is_at_its_earliest_place(drawn):
    """Right before it stands, among other frees, the last read of the instance or its own computation; no value is freed
    that is kept, and no instance stays that is neither kept nor computed over."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    current, live = -1, set()
    for position, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            current = step.op
            assert live >= set(graph.ops[current].inputs)
            live |= set(graph.ops[current].outputs)
        else:
            op = graph.ops[current]
            assert step.value in {*op.inputs, *op.outputs}
            before = plan.steps[position - 1]
            assert isinstance(before, Compute) or before.value < step.value
            live.remove(step.value)
    assert live == {v for v, value in enumerate(graph.values) if value.kept}


@given(graphs_and_orders(), st.randoms())
def test_no_free_can_come_earlier(drawn, rng):
    """A free one computation earlier makes the plan invalid, or frees what is not yet there."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    frees = [p for p, step in enumerate(plan.steps) if isinstance(step, Free)]
    assume(frees)
    position = rng.choice(frees)
    start = max(p for p in range(position) if isinstance(plan.steps[p], Compute))
    steps = list(plan.steps)
    steps.insert(start, steps.pop(position))
    assert validate(graph, Plan(tuple(steps)))


def test_a_kept_value_that_is_computed_again_stays_in_its_last_instance():
    """Only the newest instance is there at the end, so an older one goes after its last read."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[0, 1])
    assert Plan.from_order(graph, [0, 1, 0]).steps == (Compute(0), Compute(1), Free(0), Compute(0))


def test_a_value_that_nobody_reads_goes_at_once():
    """Its earliest place is right after the op that makes it."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[])
    assert Plan.from_order(graph, [0, 1]).steps == (Compute(0), Free(0), Compute(1), Free(1))


def test_an_order_that_cannot_run_is_refused_in_words():
    """The position, the op and the value are named."""
    with pytest.raises(PlanError) as caught:
        Plan.from_order(diamond(), [0, 3])
    assert str(caught.value) == "position 1 computes op 3 ('d'), which reads value 1 ('b') before any op has made it"
    for wrong in (4, -1):
        with pytest.raises(PlanError) as caught:
            Plan.from_order(diamond(), [0, wrong])
        assert str(caught.value) == f"the order computes op {wrong} of 4"


def test_a_plan_is_for_every_graph_of_the_structure_after_its_plus():
    """Workspace and resident bytes differ from process to process, and each captures its graph anew."""
    graph = diamond()
    ops = tuple(msgspec.structs.replace(op, workspace_bytes=7) for op in graph.ops)
    again = msgspec.structs.replace(graph, ops=ops, resident_bytes=9)
    plan = Plan.from_order(graph, range(4))
    named = msgspec.structs.replace(plan, graph_digest=f"{graph.digest}+{graph.structure}")
    assert [named.is_for(graph), named.is_for(again)] == [True, False]
    assert validate(graph, named) == ()
    assert again.structure == graph.structure == graph.digest
    assert [named.is_for_structure_of(graph), named.is_for_structure_of(again)] == [True, True]
    other = Graph.from_dag(cost=[1] * 4, size_bytes=[4, 2, 3, 1], edges=[(0, 1)])
    assert [named.is_for_structure_of(other), plan.is_for_structure_of(graph)] == [False, False]


def test_steps_and_orders_may_be_any_iterable():
    """Arrays come from solvers; a plan can be hashed whatever it was made of."""
    plan = Plan([Compute(0), Free(0)])
    assert plan.steps == (Compute(0), Free(0))
    assert hash(plan) == hash(Plan((Compute(0), Free(0))))
    assert plan.graph_digest == ""
    made = Plan.from_order(diamond(), np.array([0, 1, 2, 3]))
    assert all(type(step.op) is int for step in made.steps if isinstance(step, Compute))


@given(graphs_and_orders())
def test_stages_alone_determine_the_order(drawn):
    """R is another way to write it: ops ascend within a stage."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    assert tuple(np.nonzero(plan.stages(graph).R)[1].tolist()) == plan.order


@given(graphs_and_orders())
def test_the_own_order_gives_triangular_stages(drawn):
    """Without recomputation stage t computes op t: the identity, as in the paper."""
    graph, _ = drawn
    R, S = Plan.from_order(graph, range(len(graph.ops))).stages(graph)
    assert R.tolist() == [[t == o for o in range(len(graph.ops))] for t in range(len(graph.ops))]
    assert not S[0].any()


@given(graphs_and_orders())
def test_a_stage_ascends_and_ends_with_the_first_computation_of_an_op(drawn):
    """Read row by row, R is the order; a row ends where an op is new, or where the next op would not ascend."""
    graph, order = drawn
    R, S = Plan.from_order(graph, order).stages(graph)
    assert R.dtype == S.dtype == np.bool_
    assert R.shape == S.shape
    rows = [np.flatnonzero(row).tolist() for row in R]
    assert [o for row in rows for o in row] == order
    known: set[int] = set()
    for row, following in zip(rows, [*rows[1:], []], strict=True):
        new = [o for o in row if o not in known]
        assert new in ([], row[-1:])
        assert not following or new or following[0] <= row[-1]
        known |= set(row)


@given(graphs_and_orders())
def test_a_stage_is_handed_what_is_live_when_it_begins(drawn):
    """S says which ops have an output that is made before the stage and freed in it or after it."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    R, S = plan.stages(graph)
    starts = np.cumsum([0, *R.sum(axis=1)])[:-1].tolist()
    computed, live = 0, set()
    for step in plan.steps:
        if isinstance(step, Free):
            live.remove(step.value)
            continue
        if computed in starts:
            held = {graph.producer[v] for v in live}
            assert np.flatnonzero(S[starts.index(computed)]).tolist() == sorted(held)
        computed += 1
        live |= set(graph.ops[step.op].outputs)


def test_stages_with_a_recomputation_are_the_papers_matrices():
    """Stage 2 of a chain computes op 0 again, which S does not hold, for op 2 to read."""
    graph = Graph.from_dag(cost=[1, 1, 1], size_bytes=[4, 2, 1], edges=[(0, 1), (0, 2), (1, 2)], kept=[2])
    plan = Plan.from_order(graph, [0, 1, 0, 2])
    R, S = plan.stages(graph)
    assert R.tolist() == [[True, False, False], [False, True, False], [True, False, True]]
    assert S.tolist() == [[False, False, False], [True, False, False], [False, True, False]]


def test_an_op_that_runs_several_times_in_a_row_takes_a_stage_each_time():
    """A row of R says once that an op is computed, so the same op cannot be in it twice."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
    for order in ([0, 0, 0, 1], [0, 1, 0, 0, 1], [0, 1, 0, 1, 1, 1]):
        plan = Plan.from_order(graph, order)
        assert np.nonzero(plan.stages(graph).R)[1].tolist() == order


def test_several_outputs_are_freed_one_by_one():
    """S carries an op as a whole, so what it says of an op with several outputs holds for those read again only."""
    graph = Graph(
        (Op("two", (), (0, 1), 1), Op("one", (0,), (2,), 1), Op("late", (1,), (3,), 1)),
        (Value("a", 1), Value("b", 1), Value("c", 1), Value("d", 1, kept=True)),
    )
    plan = Plan.from_order(graph, [0, 1, 2])
    assert Free(0) in plan.steps[: plan.steps.index(Compute(2))]


def test_a_plan_with_a_wrong_op_has_no_stages():
    """An index that the graph does not have is refused before it is looked up."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)])
    for wrong in (2, -1):
        with pytest.raises(PlanError) as caught:
            Plan((Compute(0), Compute(wrong))).stages(graph)
        assert str(caught.value) == f"the plan computes op {wrong} of 2"


def test_a_plan_by_hand_may_free_what_is_not_live():
    """Stages describe what is held; whether the plan holds is for `validate` to say."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[])
    R, S = Plan((Free(1), Compute(0), Free(0), Free(0), Compute(1))).stages(graph)
    assert R.tolist() == [[True, False], [False, True]]
    assert not S.any()
