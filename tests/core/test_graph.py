"""Graphs and amounts: what is no graph is refused where it enters, in words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import Graph, GraphError, Op, Problem, UnitError, Value, format_bytes, parse_bytes
from checkmate.core.budget import Budget
from checkmate.core.units import format_at_least


@pytest.mark.parametrize(
    ("ops", "values", "options", "says"),
    [
        ([("a", (0,), (1,)), ("b", (), (0,))], [("v", 1), ("w", 1)], {}, "which no earlier op makes"),
        ([("a", (7,), (0,))], [("v", 1)], {}, "which does not exist"),
        ([("a", (), (0, 0))], [("v", 1)], {}, "is written by op 0 and op 0"),
        ([("a", (), (3,))], [("v", 1)], {}, "writes value 3 of 1"),
        ([("a", (), (0,))], [("v", 1), ("w", 1)], {}, "is written by no op"),
        ([("a", (), (0,)), ("b", (), (1,))], [("v", 1), ("w", 0, 0)], {}, "whose storage its op 'b' does not read"),
        ([("a", (), (0,))], [("v", 0, 0)], {}, "which is no other value"),
        ([("a", (), (0,)), ("b", (), (1,))], [("v", 1), ("w", 1)], {"order": [(1, 0)]}, "must come before"),
        ([("a", (), (0,))], [("v", 1)], {"resident_bytes": -1}, "must be zero or more"),
        ([("a", (), (0,))], [("v", 2**60)], {"resident_bytes": 1}, "more than the"),
    ],
)
def test_what_is_no_graph_is_refused(ops, values, options, says):
    """A cyclic, dangling or contradictory graph never gets to a solver."""
    with pytest.raises(GraphError, match=says):
        Graph(tuple(Op(*op, 1) for op in ops), tuple(Value(*value) for value in values), **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Value("v", -1), "must be zero or more"),
        (lambda: Value("v", 1.5), "is not an integer"),
        (lambda: Value("v", 8, base=0), "claims 8 bytes of its own"),
        (lambda: Op("a", (), (), -2), "must be zero or more"),
        (lambda: Op("a", (), (), 1, workspace_bytes=0.5), "is not an integer"),
        (lambda: Op("a", "xy", (), 1), "are not indices"),
        (lambda: Op("a", (), (), 1, phase="sideways"), "is not one of"),
        (lambda: Graph.from_dag(cost=[1], size_bytes=[1, 2], edges=[]), "describe 1, 2"),
        (lambda: Graph.from_dag(cost=[1, 1], size_bytes=[1, 1], edges=[(1, 0)]), "does not go from a lower"),
        (lambda: Graph.from_dag(cost=[1, 1], size_bytes=[1, 1], edges=[(0, 1), (1, 1)]), "does not go from a lower"),
    ],
    ids=range(10),
)
def test_wrong_amounts_and_indices_are_refused(make, says):
    """Sizes are exact bytes; a rounding belongs to the caller."""
    with pytest.raises(GraphError, match=says):
        make()


def test_numbers_of_numpy_are_numbers():
    """Arrays of costs and sizes come from profilers."""
    graph = Graph.from_dag(cost=np.array([1, 2]), size_bytes=np.array([3, 4]), edges=np.array([[0, 1]]))
    assert graph == Graph.from_dag(cost=[1, 2], size_bytes=[3, 4], edges=[(0, 1)])


def test_a_double_edge_is_one_edge():
    """Reading a value twice reads one storage."""
    assert Graph.from_dag(cost=[1, 1], size_bytes=[1, 1], edges=[(0, 1), (0, 1)]).ops[1].inputs == (0,)


def test_a_view_of_a_view_belongs_to_the_owner():
    """The base names the storage's owner, and the op may read another view of it."""
    graph = Graph(
        (Op("a", (), (0,), 1), Op("view", (0,), (1,), 0), Op("again", (1,), (2,), 0)),
        (Value("x", 8), Value("y", 0, 0), Value("z", 0, 0)),
    )
    assert graph.root == (0, 0, 0)
    assert graph.view_ops == {1, 2}


@pytest.mark.parametrize(
    ("amount", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("12e9", 12 * 10**9),
        (12e9, 12 * 10**9),
        (5, 5),
        ("7B", 7),
        ("0", 0),
        (np.int64(3), 3),
    ],
    ids=repr,
)
def test_amounts_as_people_write_them(amount, size):
    """Binary and decimal units, spaces, any case, numbers."""
    assert parse_bytes(amount) == size


@pytest.mark.parametrize(
    "amount", ["", "lots", "8 GiBs", "-1", -1, 1.5, "GiB", "70%", None, True, "1 000", float("nan")], ids=repr
)
def test_amounts_that_cannot_be_read_are_refused_with_a_hint(amount):
    """The message has the text, the hint an example."""
    with pytest.raises(UnitError, match="hint: write an amount such as '8GiB'"):
        parse_bytes(amount)


def test_a_share_counts_above_what_is_resident():
    """'50%' halves what a plan can change, not what is there anyway."""
    assert Budget.parse("50%").within(resident_bytes=100, keep_all_bytes=300) == 200
    assert Budget.parse(" 70 % ").within(resident_bytes=0, keep_all_bytes=10) == 7
    chain = Graph.from_dag(cost=[1, 1], size_bytes=[4, 4], edges=[(0, 1)], resident_bytes=10)
    assert Problem(chain, "50%").budget_bytes == 14
    with pytest.raises(UnitError):
        Problem(chain, "x%")


@given(st.integers(0, 2**50))
def test_a_hinted_budget_is_never_too_small(size):
    """What an error suggests must work when typed back."""
    assert parse_bytes(format_at_least(size)) >= size
    assert format_bytes(size)
