"""The accounts of memory agree, and breaking anything makes the checks fail."""

from __future__ import annotations

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from checkmate import Compute, Free, Graph, Op, Plan, PlanError, Value, WrongGraphError, simulate, validate
from tests.oracle import naive_bytes
from tests.strategies import graphs_and_orders


@given(graphs_and_orders())
def test_simulate_agrees_with_a_naive_oracle(drawn):
    """The running balance and twenty naive lines describe the same machine."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    assert simulate(graph, plan).bytes.tolist() == naive_bytes(graph, plan)


@given(graphs_and_orders(), st.randoms())
def test_simulate_agrees_with_the_oracle_on_late_frees(drawn, rng):
    """Frees may come late, and an op may be computed over a value that is still live."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    steps = [step for step in plan.steps if isinstance(step, Compute) or rng.random() < 0.6]
    late = Plan(tuple(steps))
    assert simulate(graph, late).bytes.tolist() == naive_bytes(graph, late)
    assert simulate(graph, late).peak_bytes >= simulate(graph, plan).peak_bytes


@given(graphs_and_orders(), st.booleans())
def test_validate_draws_the_line_where_simulate_does(drawn, late):
    """The two accounts share no code: at the peak the budget holds, one byte below it does not."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    if late:
        plan = Plan(tuple(step for step in plan.steps if isinstance(step, Compute)), plan.graph_digest)
    peak = simulate(graph, plan).peak_bytes
    assert validate(graph, plan, peak) == ()
    assume(peak > 0)
    assert [violation.rule for violation in validate(graph, plan, peak - 1)] == ["budget"]


@given(graphs_and_orders())
def test_a_plan_costs_at_least_each_op_once(drawn):
    """Every op is computed once or more."""
    graph, order = drawn
    assert simulate(graph, Plan.from_order(graph, order)).cost >= graph.cost


@given(graphs_and_orders())
def test_keeping_everything_ends_with_all_that_was_made(drawn):
    """Without a free, the last step holds every storage."""
    graph, _ = drawn
    plan = Plan(tuple(Compute(o) for o in range(len(graph.ops))))
    total = graph.resident_bytes + sum(value.size_bytes for value in graph.values) + graph.ops[-1].workspace_bytes
    assert simulate(graph, plan).bytes[-1] == total


@given(graphs_and_orders())
def test_stages_and_back_keep_order_cost_and_peak(drawn):
    """R and S are another way to write the same plan."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    back = Plan.from_stages(graph, *plan.stages(graph))
    assert back.order == plan.order
    assert simulate(graph, back).peak_bytes == simulate(graph, plan).peak_bytes


@given(graphs_and_orders())
def test_the_own_order_gives_triangular_stages(drawn):
    """Without recomputation stage t computes op t: the identity, as in the paper."""
    graph, _ = drawn
    R, S = Plan.from_order(graph, range(len(graph.ops))).stages(graph)
    assert R.tolist() == [[t == o for o in range(len(graph.ops))] for t in range(len(graph.ops))]
    assert not S[0].any()


@given(graphs_and_orders(), st.randoms())
def test_a_free_too_early_is_found(drawn, rng):
    """Freeing a value before its reader makes both accounts refuse the plan."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    reads = [(p, v) for p, step in enumerate(plan.steps) if isinstance(step, Compute) for v in graph.ops[step.op].inputs]
    assume(reads)
    position, value = rng.choice(reads)
    broken = Plan((*plan.steps[:position], Free(value), *plan.steps[position:]))
    assert any(violation.rule == "read" for violation in validate(graph, broken))
    with pytest.raises(PlanError, match="is not live"):
        simulate(graph, broken)


@given(graphs_and_orders(), st.randoms())
def test_a_computation_left_out_is_found(drawn, rng):
    """An op computed once and left out is missing, or its readers read nothing."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    once = [p for p, step in enumerate(plan.steps) if isinstance(step, Compute) and order.count(step.op) == 1]
    assume(once)
    position = rng.choice(once)
    assert validate(graph, Plan((*plan.steps[:position], *plan.steps[position + 1 :])))


@given(graphs_and_orders(), st.randoms())
def test_an_edge_more_is_found(drawn, rng):
    """A plan for a graph without an edge is refused by the graph with it, where the value is gone by then."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    freed: set[int] = set()
    gone: list[tuple[int, int]] = []
    for step in plan.steps:
        if isinstance(step, Compute):
            freed -= set(graph.ops[step.op].outputs)
            gone += [(step.op, v) for v in sorted(freed) if graph.producer[v] < step.op]
        else:
            freed.add(step.value)
    assume(gone)
    o, v = rng.choice(gone)
    op = graph.ops[o]
    wider = Op(
        op.name,
        (*op.inputs, v),
        op.outputs,
        op.cost,
        op.workspace_bytes,
        op.replay_bytes,
        op.recomputable,
        op.clobbered_by,
        op.phase,
    )
    other = Graph((*graph.ops[:o], wider, *graph.ops[o + 1 :]), graph.values, graph.order, graph.resident_bytes)
    assert any(violation.rule == "read" for violation in validate(other, Plan(plan.steps)))
    with pytest.raises(WrongGraphError):
        simulate(other, plan)


@given(graphs_and_orders(), st.randoms())
def test_a_byte_more_at_the_peak_is_found(drawn, rng):
    """One more byte in a storage that is live at the peak breaks a budget that just held."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    timeline = simulate(graph, plan)
    live = timeline.live(timeline.peak_step)
    assume(live)
    grown = rng.choice(live).value
    values = tuple(Value(x.name, x.size_bytes + (v == grown), x.base, x.kept) for v, x in enumerate(graph.values))
    other = Graph(graph.ops, values, graph.order, graph.resident_bytes)
    assert [x.rule for x in validate(other, Plan(plan.steps), timeline.peak_bytes)] == ["budget"]
    assert validate(other, plan)[0].rule == "graph"


@given(graphs_and_orders())
def test_live_adds_up_to_the_bytes_of_the_step(drawn):
    """What is said to be live explains the figure."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    timeline = simulate(graph, plan)
    step = timeline.peak_step
    what = plan.steps[step]
    workspace = graph.ops[what.op].workspace_bytes if isinstance(what, Compute) else 0
    explained = graph.resident_bytes + workspace + sum(storage.size_bytes for storage in timeline.live(step))
    replays = sum(op.replay_bytes for op in graph.ops)
    assert explained <= timeline.peak_bytes <= explained + replays


def test_rules_of_an_op_are_checked():
    """Once, clobbered, ordered, kept: each rule has its violation."""
    graph = Graph(
        ops=(
            Op("a", (), (0,), 1, recomputable=False),
            Op("b", (), (1,), 1, clobbered_by=(3,)),
            Op("c", (), (2,), 1),
            Op("d", (0,), (3,), 1, phase="backward"),
        ),
        values=tuple(Value(f"v{v}", 1, kept=v == 3) for v in range(4)),
        order=((1, 2),),
    )

    def rules(order: list[int], **options: object) -> list[str]:
        return sorted({violation.rule for violation in validate(graph, Plan.from_order(graph, order), **options)})

    assert rules([0, 1, 2, 3]) == []
    assert rules([0, 0, 1, 2, 3]) == ["once"]
    assert rules([0, 1, 2, 3, 1]) == ["clobber"]
    assert rules([0, 2, 1, 3]) == ["order"]
    assert rules([0, 1, 2]) == ["kept", "missing"]
    assert rules([1, 0, 2, 3], reorder=False) == ["reorder"]
    assert rules([0, 1, 2, 3, 3], recompute="forward") == ["phase"]


def test_wrong_indices_are_violations_not_crashes():
    """A foreign plan is refused in words."""
    graph = Graph((Op("a", (), (0,), 1),), (Value("v", 1),))
    assert {v.rule for v in validate(graph, Plan((Compute(7), Free(9))))} == {"index", "free", "missing"}
    with pytest.raises(PlanError):
        simulate(graph, Plan((Compute(7),)))


def test_random_plans_are_reproducible():
    """The strategies depend on their seed alone."""
    from tests.strategies import random_graph

    assert random_graph(random.Random(3)) == random_graph(random.Random(3))
