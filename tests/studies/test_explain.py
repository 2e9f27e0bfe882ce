"""Explanations add up: the bytes to the peak, the recomputations to the overhead, the differences to the difference."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

from checkmate import (
    BruteForce,
    Compute,
    Free,
    Graph,
    Limits,
    Op,
    Plan,
    Problem,
    Value,
    WrongGraphError,
    compare,
    explain,
    pareto,
    simulate,
    solve,
)
from checkmate.studies.explain import held_at
from tests.solvers.generators import transformer
from tests.strategies import graphs_and_orders, random_graph, random_order


@given(drawn=graphs_and_orders())
def test_what_is_held_sums_to_the_bytes_of_every_step(drawn):
    """Explained and simulated bytes are the same account, at the peak and everywhere else."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    hoarding = Plan(tuple(step for step in plan.steps if isinstance(step, Compute)))
    for tried in (plan, hoarding):
        held = simulate(graph, tried).bytes.tolist()
        for step in range(len(tried.steps)):
            assert sum(h.size_bytes for h in held_at(graph, tried, step)) == held[step]
    explained = explain(graph, plan)
    assert sum(h.size_bytes for h in explained.held) == explained.peak_bytes == max(simulate(graph, plan).bytes)


@given(drawn=graphs_and_orders())
def test_what_is_computed_again_sums_to_the_overhead(drawn):
    """Nothing else makes a plan cost more."""
    graph, order = drawn
    explained = explain(graph, Plan.from_order(graph, order))
    assert sum(r.cost for r in explained.remats) == explained.cost - graph.cost
    assert sum(r.times for r in explained.remats) == len(order) - len(graph.ops)


def test_every_reason_is_a_fact():
    """A value that is next read by an op is read by it, and before that by nobody; what is kept is kept."""
    names = [f"f{i}" for i in range(6)]
    graph = Graph.from_dag(
        cost=[1] * 6,
        size_bytes=[8, 4, 4, 2, 2, 1],
        edges=[(0, 1), (1, 2), (2, 3), (0, 4), (3, 4), (4, 5)],
        kept=[3, 5],
        names=names,
    )
    plan = Plan.from_order(graph, range(6))
    why = {h.name: h.why for h in held_at(graph, plan, plan.steps.index(Compute(2)))}
    assert why == {
        "f0": "next read by `f4`",
        "f1": "read by `f2`, which is running",
        "f2": "made by `f2`, which is running",
    }
    last = {h.name: h.why for h in held_at(graph, plan, plan.steps.index(Compute(5)))}
    assert last["f3"] == "kept to the end of the step"


def test_a_view_explains_the_storage_that_it_shares():
    """Storage is there for whoever reads it, by whatever name."""
    graph = transformer(1)
    plan = Plan.from_order(graph, range(len(graph.ops)))
    attention = next(o for o, op in enumerate(graph.ops) if op.name == "block0.attention")
    why = {h.name: h.why for h in held_at(graph, plan, plan.steps.index(Compute(attention)))}
    assert why["block0.qkv.0"] == "read by `block0.attention`, which is running"
    assert why["block0.norm.0"] == "next read by `block0.qkv.wgrad`"


def test_replay_state_and_workspace_are_named():
    """Bytes that are no value are there for a reason too."""
    graph = transformer(1)
    drop = next(o for o, op in enumerate(graph.ops) if op.replay_bytes)
    plan = Plan.from_order(graph, [*range(drop + 1), *range(drop, len(graph.ops))])
    kinds = {h.kind for step in range(len(plan.steps)) for h in held_at(graph, plan, step)}
    assert kinds == {"resident", "value", "workspace", "replay"}


def test_a_mib_is_worth_what_the_neighbours_say():
    """Less memory costs, more saves, and without a curve nothing is claimed."""
    graph = transformer(2)
    curve = pareto(graph, points=5, limits=Limits(time_s=1.0))
    point = curve.points[2]
    explained = explain(graph, point.plan, curve=curve)
    below, above = curve.points[1], curve.points[3]
    assert explained.dearer_per_mib == pytest.approx((below.cost - point.cost) * 2**20 / (point.peak_bytes - below.peak_bytes))
    assert explained.cheaper_per_mib == pytest.approx((point.cost - above.cost) * 2**20 / (above.peak_bytes - point.peak_bytes))
    assert "one MiB less costs" in str(explained)
    assert explain(graph, curve.points[0].plan, curve=curve).dearer_per_mib is None
    assert "no plan of the curve peaks lower" in str(explain(graph, curve.points[0].plan, curve=curve))
    alone = explain(graph, point.plan)
    assert alone.dearer_per_mib is None
    assert "give a curve" in str(alone)
    other = transformer(1)
    keep_all = Plan.from_order(other, range(len(other.ops)))
    with pytest.raises(WrongGraphError, match="the curve was made for another graph"):
        explain(other, keep_all, curve=curve)


def two_layers(stack="net."):
    """The graph of two equal layers: a product and an activation each, and their backward."""
    kinds = [("mm", 64_000_000), ("gelu", 640_000)]
    ops = [
        Op(
            f"{kind}{n}",
            (2 * n + k - 1,) if n or k else (),
            (2 * n + k,),
            cost,
            kind=f"aten.{kind}.default",
            source=f"{stack}{n}.{kind}, m.py:3",
        )
        for n in range(2)
        for k, (kind, cost) in enumerate(kinds)
    ]
    ops += [Op(f"grad{k}", (k, 4 + (3 - k) - 1) if k < 3 else (k,), (7 - k,), 100, phase="backward") for k in range(3, -1, -1)]
    return Graph(tuple(ops), tuple(Value(f"v{i}", 64 * 2**20) for i in range(8)))


def test_lessons_name_what_is_kept_and_where_layers_differ():
    """A person who checkpoints by hand needs kinds of ops, layers and a price, not a list of tensors."""
    graph = two_layers()
    activation = 1
    once = Plan.from_order(graph, range(8))
    again = Plan.from_order(graph, [0, 1, 2, 3, 4, 5, activation, 6, 7])
    assert explain(graph, once).lessons == (
        "keep matrix products (128.00 MiB), gelu (128.00 MiB)",
        "layers of `net`: 0 to 1 keep everything",
        "one MiB less costs about 10.0 µs (recompute `gelu0` in net.0.gelu)",
    )
    assert explain(two_layers(""), again).lessons[1] == "layers: 0 recompute gelu; 1 keep everything"
    assert explain(graph, again).lessons == (
        "keep matrix products (128.00 MiB); recompute a part of gelu (50% of 128.00 MiB)",
        "layers of `net`: 0 recompute gelu; 1 keep everything",
        "one MiB less costs about 10.0 µs (recompute `gelu1` in net.1.gelu)",
        "one MiB more saves about 10.0 µs (keep `gelu0` in net.0.gelu)",
    )


@given(drawn=graphs_and_orders())
def test_lessons_are_of_bytes_that_the_plan_has(drawn):
    """No kind of op has more bytes than its values, for any graph and plan."""
    graph, order = drawn
    told = explain(graph, Plan.from_order(graph, order)).lessons
    assert len(told) <= 3  # no modules have numbers
    assert bool(told) >= any(
        order.count(o) > 1 and graph.values[v].size_bytes for o, op in enumerate(graph.ops) for v in op.outputs
    )


def test_the_text_is_short():
    """Ten lines a list, and the rest in one."""
    graph = transformer(4)
    plan = solve(Problem(graph, "50%")).plan
    text = str(explain(graph, plan))
    assert len(text.splitlines()) <= 29
    assert "more" in text
    assert str(compare(graph, plan, Plan.from_order(graph, range(len(graph.ops)))))


def test_differences_add_up():
    """What one peak has and the other lacks is the difference of the peaks; the same for computations."""
    for seed in range(150):
        rng = random.Random(seed)
        graph = random_graph(rng)
        a, b = (Plan.from_order(graph, random_order(rng, graph)) for _ in range(2))
        found = compare(graph, a, b)
        bytes_a, bytes_b = (sum(h.size_bytes for h in held) for held in (found.held_in_a, found.held_in_b))
        assert found.peak_bytes[0] - found.peak_bytes[1] == bytes_a - bytes_b
        cost_a, cost_b = (sum(r.cost for r in ops) for ops in (found.more_in_a, found.more_in_b))
        assert found.cost[0] - found.cost[1] == cost_a - cost_b
        back = compare(graph, b, a)
        assert (back.more_in_a, back.held_in_b) == (found.more_in_b, found.held_in_a)


def test_a_plan_does_not_differ_from_itself():
    """Nothing is computed more often, and nothing is held by one alone."""
    graph = Graph.from_dag(cost=[1] * 4, size_bytes=[4] * 4, edges=[(0, 1), (1, 2), (0, 3), (2, 3)])
    plan = solve(Problem(graph, 12), BruteForce()).plan
    same = compare(graph, plan, plan)
    assert (same.more_in_a, same.more_in_b, same.held_in_a, same.held_in_b) == ((), (), (), ())
    assert len(str(same).splitlines()) == 3


def test_a_plan_of_another_graph_is_refused():
    """Its steps would name other ops."""
    one, two = transformer(1), transformer(2)
    plan = Plan.from_order(one, range(len(one.ops)))
    with pytest.raises(WrongGraphError):
        explain(two, plan)
    with pytest.raises(WrongGraphError):
        compare(one, plan, Plan.from_order(two, range(len(two.ops))))


def test_an_empty_plan_holds_what_is_resident():
    """No step, no op, no words about one."""
    explained = explain(Graph((), (), resident_bytes=7), Plan(()))
    assert [(h.kind, h.size_bytes) for h in explained.held] == [("resident", 7)]
    assert explained.peak_op is None
    assert Free(0) not in Plan(()).steps
