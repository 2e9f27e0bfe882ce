"""The independent check: it agrees with `simulate`, and breaking any rule of a plan is found."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from checkmate import Compute, Free, Graph, Op, Plan, PlanError, Value, Violation, WrongGraphError, simulate, validate
from checkmate.studies.lifetimes import by_category, storage_lifetimes
from tests.oracle import naive_bytes
from tests.strategies import graphs, graphs_and_orders, random_order, with_views_of_views


@given(graphs_and_orders(), st.sampled_from(["never", "earliest", "some"]), st.randoms())
def test_validate_draws_the_line_where_simulate_does(drawn, frees, rng):
    """The two accounts share no code: at the peak the budget holds, one byte below it does not."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    share = {"never": 0.0, "some": 0.6, "earliest": 1.0}[frees]
    steps = tuple(step for step in plan.steps if isinstance(step, Compute) or rng.random() < share)
    plan = Plan(steps, plan.graph_digest)
    timeline = simulate(graph, plan)
    peak = timeline.peak_bytes
    assert validate(graph, plan, peak) == ()
    assume(peak > 0)
    violations = validate(graph, plan, peak - 1)
    assert [(violation.rule, violation.step) for violation in violations] == [("budget", timeline.peak_step)]


@given(graphs(), st.randoms(use_true_random=False), st.randoms())
def test_all_accounts_agree_on_views_that_are_listed_before_their_bases(graph, rng, frees):
    """An op lists its outputs in any order: a view may come before the view of the same op that it is of."""
    graph = with_views_of_views(rng, graph)
    plan = Plan.from_order(graph, random_order(rng, graph))
    plan = Plan(tuple(step for step in plan.steps if isinstance(step, Compute) or frees.random() < 0.7))
    timeline = simulate(graph, plan)
    assert timeline.bytes.tolist() == naive_bytes(graph, plan) == by_category(graph, plan).sum(axis=0).tolist()
    assert validate(graph, plan, timeline.peak_bytes, cost=timeline.cost) == ()
    assert not timeline.peak_bytes or validate(graph, plan, timeline.peak_bytes - 1)


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
    left_out = plan.steps[position].op
    violations = validate(graph, Plan((*plan.steps[:position], *plan.steps[position + 1 :])))
    end = len(plan.steps) - 1
    assert Violation("missing", end, f"op {left_out} ({graph.ops[left_out].name!r}) is never computed") in violations


@given(graphs_and_orders(), st.randoms())
def test_a_free_left_out_breaks_nothing_but_the_budget(drawn, rng):
    """What stays longer than needed can only take room."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    steps = tuple(step for step in plan.steps if isinstance(step, Compute) or rng.random() < 0.5)
    assert {violation.rule for violation in validate(graph, Plan(steps), 0)} <= {"budget"}


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
    live = [s.value for s in storage_lifetimes(graph, plan) if s.made_at <= timeline.peak_step < s.gone_at]
    assume(live)
    grown = rng.choice(live)
    values = tuple(Value(x.name, x.size_bytes + (v == grown), x.base, x.kept) for v, x in enumerate(graph.values))
    other = Graph(graph.ops, values, graph.order, graph.resident_bytes)
    assert [x.rule for x in validate(other, Plan(plan.steps), timeline.peak_bytes)] == ["budget"]
    assert validate(other, plan) == (Violation("graph", 0, "the plan was made for another graph"),)


@given(graphs_and_orders(), st.randoms())
def test_violations_come_in_the_order_of_their_steps(drawn, rng):
    """A reader looks for the first thing that went wrong."""
    graph, order = drawn
    steps = list(Plan.from_order(graph, order).steps)
    rng.shuffle(steps)
    at = [violation.step for violation in validate(graph, Plan(tuple(steps)), 0)]
    assert at == sorted(at)


def rules_graph() -> Graph:
    """One op for each rule."""
    return Graph(
        ops=(
            Op("a", (), (0,), 1, recomputable=False),
            Op("b", (), (1,), 1, clobbered_by=(3,)),
            Op("c", (), (2,), 1),
            Op("d", (0,), (3,), 1, phase="backward"),
        ),
        values=tuple(Value(f"v{v}", 1, kept=v == 3) for v in range(4)),
        order=((1, 2),),
    )


@pytest.mark.parametrize(
    ("order", "options", "found"),
    [
        ([0, 1, 2, 3], {}, []),
        ([0, 1, 2, 3, 3], {}, []),
        ([0, 1, 2, 1, 2, 3], {}, []),
        ([0, 1, 2, 1, 2, 3], {"recompute": "forward", "reorder": False}, []),
        ([0, 0, 1, 2, 3], {}, [("once", 1, "op 0 ('a') may run only once")]),
        ([0, 0, 1, 2, 3, 0], {"recompute": "forward"}, [("once", 1, "op 0 ('a') may run only once")]),
        ([0, 1, 2, 3, 1], {}, [("clobber", 4, "op 1 ('b') is computed after op 3 overwrote what it reads")]),
        ([0, 1, 2, 3, 3, 1], {}, [("clobber", 5, "op 1 ('b') is computed after op 3 overwrote what it reads")]),
        ([0, 3, 1, 2, 1], {}, [("clobber", 2, "op 1 ('b') is computed after op 3 overwrote what it reads")]),
        ([0, 2, 1, 3], {}, [("order", 1, "op 2 is first computed before op 1")]),
        ([0, 2, 2, 1, 2, 3], {}, [("order", 1, "op 2 is first computed before op 1")]),
        (
            [0, 1, 2],
            {},
            [("kept", 3, "value 3 ('v3') must be live at the end and is not"), ("missing", 3, "op 3 ('d') is never computed")],
        ),
        ([0, 1, 3], {}, [("missing", 3, "op 2 ('c') is never computed")]),
        ([1, 0, 2, 3], {}, []),
        ([1, 0, 2, 3], {"reorder": False}, [("reorder", 0, "op 1 is first computed before op 0")]),
        ([0, 1, 2, 3, 3], {"recompute": "forward"}, [("phase", 4, "op 3 ('d') is not a forward op and is computed again")]),
    ],
)  # fmt: skip
def test_rules_of_an_op_are_checked(order, options, found):
    """Once, clobbered, ordered, kept, phase: each rule has its violation, at the first computation that breaks it."""
    graph = rules_graph()
    plan = Plan.from_order(graph, order)
    compute_steps = [p for p, step in enumerate(plan.steps) if isinstance(step, Compute)] + [len(plan.steps)]
    expected = [(rule, compute_steps[position], message) for rule, position, message in found]
    assert [tuple(violation) for violation in validate(graph, plan, **options)] == expected


def test_two_rules_of_one_step_are_both_found():
    """Order beside reorder: the pairs of the graph are named as its own, the listing's as the option's."""
    graph = Graph.from_dag(cost=[1, 1, 1], size_bytes=[1, 1, 1], edges=[])
    graph = Graph(graph.ops, graph.values, order=((0, 2),))
    rules = [
        (violation.rule, violation.message) for violation in validate(graph, Plan.from_order(graph, [2, 0, 1]), reorder=False)
    ]
    assert rules == [("order", "op 2 is first computed before op 0"), ("reorder", "op 2 is first computed before op 1")]


def views_graph() -> Graph:
    """A view of each kind: free of rules, and beside its base as an output of one op."""
    return Graph(
        ops=(
            Op("x", (), (0, 1), 1),
            Op("view", (0,), (2,), 1, phase="backward"),
            Op("again", (2,), (3,), 1, phase="backward"),
            Op("end", (1, 3), (4,), 1, phase="backward"),
        ),
        values=(
            Value("x", 4),
            Value("beside", 0, base=0),
            Value("y", 0, base=0),
            Value("z", 0, base=0),
            Value("end", 1, kept=True),
        ),
    )


def test_views_may_move_and_run_again_whatever_the_options():
    """They compute nothing, so an order and a phase are none of theirs."""
    graph = views_graph()
    plan = Plan.from_order(graph, [0, 1, 2, 1, 2, 3])
    assert validate(graph, plan, recompute="forward", reorder=False) == ()
    moved = Graph(
        (graph.ops[0], Op("z", (), (5,), 1), *graph.ops[1:]),
        (*graph.values, Value("z", 1)),
    )
    assert moved.view_ops == {2, 3}
    early = Plan.from_order(moved, [0, 2, 3, 1, 4])
    assert validate(moved, early, reorder=False) == ()


def test_a_view_holds_the_storage_it_was_made_from():
    """Its base may be freed or computed again: the storage goes with the last that shares it."""
    graph = views_graph()
    steps = (
        Compute(0),  # 4
        Compute(1),
        Free(0),
        Free(1),
        Compute(0),  # a second storage: 8
        Compute(2),  # of the first, through the view
        Free(2),
        Free(0),
        Compute(3),  # reads both
        Free(3),
        Free(1),
    )
    plan = Plan(steps)
    assert simulate(graph, plan).bytes.tolist() == [4, 4, 4, 4, 8, 8, 8, 8, 9, 5, 1]
    assert validate(graph, plan, 9) == ()
    assert validate(graph, plan, 8) == (Violation("budget", 8, "9 B are held, 1 bytes over the budget of 8 B"),)


def test_a_view_shares_the_storage_of_its_owner_whatever_else_its_op_reads():
    """By hand: `z` and `w` hold the storage of `y` through other views of it; that of `x` goes with its last view."""
    graph = Graph(
        ops=(
            Op("a", (), (0, 1), 1),
            Op("views", (0, 1), (2, 3), 0),
            Op("view of one", (2, 3), (4,), 0),
            Op("view of a view", (4,), (5,), 0),
            Op("end", (5,), (6,), 1),
        ),
        values=(
            Value("x", 4), Value("y", 6), Value("of x", 0, base=0), Value("of y", 0, base=1), Value("z", 0, base=1),
            Value("w", 0, base=3), Value("end", 20),
        ),
    )  # fmt: skip
    steps = (Compute(0), Compute(1), Compute(2), *(Free(v) for v in range(4)), Compute(3), Free(4), Compute(4))
    plan = Plan(steps)
    assert simulate(graph, plan).bytes.tolist() == naive_bytes(graph, plan) == [10, 10, 10, 10, 10, 6, 6, 6, 6, 26]
    assert validate(graph, plan, 26) == ()
    assert validate(graph, plan, 25) == (Violation("budget", 9, "26 B are held, 1 bytes over the budget of 25 B"),)


def test_wrong_indices_are_violations_not_crashes():
    """A foreign plan is refused in words."""
    graph = Graph((Op("a", (), (0,), 1, workspace_bytes=3),), (Value("v", 1),))
    for wrong in (1, 7, -1):
        assert validate(graph, Plan((Compute(wrong), Free(9), Compute(0), Free(0))), 4) == (
            Violation("index", 0, f"there is no op {wrong}"),
            Violation("free", 1, "value 9 is freed and is not live"),
        )
    assert {v.rule for v in validate(graph, Plan((Compute(7), Free(9))))} == {"index", "free", "missing"}


def test_a_read_of_what_is_not_live_names_op_and_value():
    """The message is what a user of another planner sees first."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], names=["conv", "relu"])
    assert validate(graph, Plan((Compute(1), Compute(0)))) == (
        Violation("read", 0, "op 1 ('relu') reads value 0 ('conv'), which is not live"),
    )


@given(graphs())
def test_a_view_of_what_was_never_made_crashes_nothing(graph):
    """In a plan that reads dead values a view has no storage to share; the check goes on."""
    plan = Plan(tuple(Compute(o) for o in reversed(range(len(graph.ops)))))
    assert {violation.rule for violation in validate(graph, plan)} <= {"read", "order", "clobber", "kept"}


def test_what_is_resident_counts_in_the_budget():
    """Parameters take room beside what the plan holds; the last step and its free are counted too."""
    graph = Graph.from_dag(cost=[1], size_bytes=[4], edges=[], resident_bytes=2**10)
    plan = Plan.from_order(graph, [0])
    assert validate(graph, plan, 2**10 + 4) == ()
    assert validate(graph, plan, 0) == (Violation("budget", 0, "1.00 KiB are held, 1028 bytes over the budget of 0 B"),)
    assert validate(graph, plan) == ()
