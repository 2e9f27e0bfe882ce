"""Graphs and plans of strange shapes are read, replayed and explained in time that grows with their size, not its square."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from checkmate import Compute, Graph, Op, Plan, PlanError, Value, explain, simulate, validate
from checkmate.report import perfetto_trace
from checkmate.studies.lifetimes import by_category
from tests.growth import MOST, growth

Made = tuple[tuple[Op, ...], tuple[Value, ...], Sequence[int]]


def views_of_the_last(n: int) -> Made:
    """One op whose outputs are views of its last one."""
    return (Op("m", (), tuple(range(n)), 1),), (*(Value("v", 0, n - 1) for _ in range(n - 1)), Value("x", 8)), (0,)


def views_of_the_next(n: int) -> Made:
    """One op whose outputs are each a view of the next one."""
    return (Op("m", (), tuple(range(n)), 1),), (*(Value("v", 0, v + 1) for v in range(n - 1)), Value("x", 8)), (0,)


def a_chain_of_views(n: int) -> Made:
    """Views of views, each of an op by itself."""
    ops = (Op("m", (), (0,), 1), *(Op("v", (v,), (v + 1,), 0) for v in range(n)))
    return ops, (Value("x", 8), *(Value("v", 0, v) for v in range(n))), range(n + 1)


def views_beside_reads(n: int) -> Made:
    """One op that reads as many values as it makes views."""
    ops = (Op("m", (), tuple(range(n)), 1), Op("v", tuple(range(n)), tuple(range(n, 2 * n)), 0))
    return ops, (*(Value("x", 8) for _ in range(n)), *(Value("v", 0, v) for v in range(n))), (0, 1)


def all_live(n: int) -> Made:
    """Values that all stay live until the last op reads them."""
    ops = (*(Op("m", (), (v,), 1) for v in range(n)), Op("end", tuple(range(n)), (n,), 1))
    return ops, tuple(Value("x", 8) for _ in range(n + 1)), range(n + 1)


def overwritten(n: int) -> Made:
    """An op that is computed often, and that as many ops overwrite."""
    ops = (Op("m", (), (0,), 1, clobbered_by=tuple(range(1, n))), *(Op("w", (0,), (v,), 1) for v in range(1, n)))
    return ops, tuple(Value("x", 8) for _ in range(n)), (*[0] * n, *range(1, n))


SHAPES = [views_of_the_last, views_of_the_next, a_chain_of_views, views_beside_reads, all_live, overwritten]


def replayed(made: Made) -> None:
    ops, values, order = made
    graph = Graph(ops, values)
    plan = Plan(tuple(Compute(o) for o in order))
    timeline = simulate(graph, plan)
    assert validate(graph, plan, timeline.peak_bytes, cost=timeline.cost) == ()


def reported(made: Made) -> None:
    ops, values, order = made
    graph = Graph(ops, values)
    plan = Plan(tuple(Compute(o) for o in order))
    assert str(explain(graph, plan))
    assert by_category(graph, plan).sum(axis=0).tolist() == simulate(graph, plan).bytes.tolist()
    assert perfetto_trace(graph, plan)["traceEvents"]


@pytest.mark.parametrize("shape", SHAPES)
def test_replaying_takes_time_in_proportion_to_the_file(shape):
    """A file of a megabyte has 10,000 ops: their square is minutes, and SECURITY.md calls that a weakness."""
    assert growth(shape, replayed, 1000) < MOST


@pytest.mark.parametrize("shape", SHAPES)
def test_reports_take_time_in_proportion_to_the_file(shape):
    """What is read in time is also explained and exported in time."""
    assert growth(shape, reported, 700) < MOST


@pytest.mark.parametrize("shape", [a_chain_of_views, views_of_the_next])
def test_views_may_be_of_views_at_any_depth(shape):
    """Python's stack ends at a thousand calls, the files do not."""
    ops, values, order = shape(20_000)
    graph = Graph(ops, values)
    assert set(graph.root) == {len(values) - 1 if shape is views_of_the_next else 0}
    replayed((ops, values, order))


def test_a_plan_of_ops_with_many_values_is_refused_if_it_repeats_them_often():
    """A thousand computations of an op with ten thousand outputs fit in half a megabyte, and would be replayed for minutes."""
    graph = Graph((Op("m", (), tuple(range(10_000)), 1),), tuple(Value("x", 0) for _ in range(10_000)))
    assert simulate(graph, Plan((Compute(0),) * 60)).cost == 60
    often = Plan((Compute(0),) * 1000)
    with pytest.raises(PlanError) as caught:
        simulate(graph, often)
    assert caught.value.message == "the 1000 steps of the plan read and write 10000000 values: more than is replayed"
    assert caught.value.hint == "make a plan that computes the ops with the most inputs and outputs less often"
    assert validate(graph, often) == (("size", 0, caught.value.message),)


@pytest.mark.parametrize(("outputs", "times", "replayed"), [(3317, 96, True), (5021, 85, False)])
def test_a_plan_is_replayed_up_to_a_number_of_reads_and_writes(outputs, times, replayed):
    """The first plan has 318,432 of them, which is its limit to the last; the second has one more than its limit."""
    graph = Graph((Op("m", (), tuple(range(outputs)), 1),), tuple(Value("x", 0) for _ in range(outputs)))
    assert (Plan((Compute(0),) * times).excess(graph) == "") is replayed


def test_plans_of_chains_repeat_ops_as_often_as_they_like():
    """The smallest peak of a chain computes each op hundreds of times: it has few values, and many steps."""
    ops = (Op("m", (), (0,), 1), *(Op("m", (v,), (v + 1,), 1) for v in range(300)))
    graph = Graph(ops, tuple(Value("x", 1) for _ in range(301)))
    order = [o for last in range(301) for o in range(last + 1)]
    assert simulate(graph, Plan.from_order(graph, order)).cost == len(order)


@pytest.mark.parametrize("field", ["name", "kind", "source"])
def test_a_long_name_is_shortened_where_it_comes_in(field):
    """A trace has the name of an op as often as it is computed: 815 MB were written for a file of 640 kB."""
    text = f"begin{'x' * 100_000}end"
    graph = Graph((Op(**{"name": "a", "inputs": (), "outputs": (0,), "cost": 1, field: text}),), (Value(text, 8),), name=text)
    plan = Plan((Compute(0),) * 100)
    for kept in (getattr(graph.ops[0], field), graph.values[0].name, graph.name):
        assert len(kept) <= 256
        assert (kept[:5], kept[-3:]) == ("begin", "end")
    assert len(repr(perfetto_trace(graph, plan))) < 10**6
    assert len(repr(validate(graph, Plan((Compute(0), Compute(0))), 4))) < 10_000
