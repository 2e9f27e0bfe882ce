"""The floor is below the peak of every plan, is what its op needs, and says so."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import BruteForce, Graph, InfeasibleBudgetError, Op, Plan, Problem, Value, simulate, solve
from checkmate.solvers.bounds.floor import floor
from tests.solvers.bounds.proof import strict_ancestors
from tests.strategies import graphs, random_graph


def naive_needs(graph: Graph) -> list[int]:
    """Bytes that each op needs while it first runs, and what is kept at the end."""
    above = strict_ancestors(Problem(graph, 0))
    needs = []
    for o, op in enumerate(graph.ops):
        storages = {graph.root[v] for v in op.inputs} | {v for v in op.outputs if graph.values[v].base is None}
        for v, value in enumerate(graph.values):
            later = any(o in above[reader] for reader in graph.readers[v])
            if graph.producer[v] in above[o] and not graph.ops[graph.producer[v]].recomputable and (value.kept or later):
                storages.add(v)
        needs.append(op.workspace_bytes + sum(graph.values[v].size_bytes for v in storages))
    return [
        *needs,
        sum(graph.values[v].size_bytes for v in {graph.root[v] for v, value in enumerate(graph.values) if value.kept}),
    ]


@given(graphs(max_ops=9))
def test_the_floor_is_the_largest_of_what_must_be_there_at_once(graph):
    """A naive account with sets: of ops that need the same the first is named, and an op only if it needs more than the end."""
    needs = naive_needs(graph)
    lowest = floor(graph)
    assert lowest.peak_bytes == graph.resident_bytes + max(needs)
    assert lowest.op == (None if max(needs) == needs[-1] else needs.index(max(needs)))


def test_the_floor_is_below_every_plan():
    """It is a bound on the peak: brute force has no plan of a byte less."""
    for seed in range(100):
        graph = random_graph(random.Random(seed))
        own = simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
        lowest = floor(graph)
        assert lowest.peak_bytes <= own
        if lowest.peak_bytes > graph.resident_bytes:
            below = solve(Problem(graph, lowest.peak_bytes - 1), BruteForce(), raise_on_failure=False)
            assert below.plan is None, seed


@given(st.integers(1, 12), st.randoms())
def test_a_chain_reaches_its_floor(count, rng):
    """Where each op reads the one before, its own order holds two values at a time."""
    sizes = [rng.randint(0, 9) for _ in range(count)]
    graph = Graph.from_dag(cost=[1] * count, size_bytes=sizes, edges=[(i, i + 1) for i in range(count - 1)])
    assert floor(graph).peak_bytes == simulate(graph, Plan.from_order(graph, range(count))).peak_bytes


def test_the_floor_counts_what_cannot_be_made_again():
    """A random mask that a later op reads is there at every op between."""
    graph = Graph(
        ops=(
            Op("mask", (), (0,), 1, recomputable=False),
            Op("wide", (0,), (1,), 1),
            Op("narrow", (1,), (2,), 1),
            Op("use", (0, 2), (3,), 1),
        ),
        values=(Value("mask", 5), Value("wide", 20), Value("narrow", 20), Value("out", 1, kept=True)),
    )
    lowest = floor(graph)
    assert lowest.peak_bytes == 45
    assert lowest.why == "`narrow` alone needs its input (20 B), its output (20 B) and 5 B that cannot be made again at once"
    with pytest.raises(InfeasibleBudgetError, match="`narrow` alone needs"):
        solve(Problem(graph, 44))


def test_what_may_not_be_there_yet_is_not_counted():
    """An op beside the mask may run before it; one after two masks has both."""
    masks = (Op("mask", (), (0,), 1, recomputable=False), Op("other", (), (1,), 1, recomputable=False))
    values = (Value("mask", 5), Value("other", 7), Value("wide", 20), Value("out", 1))
    beside = Graph((*masks, Op("wide", (), (2,), 1), Op("use", (0, 1, 2), (3,), 1)), values)
    assert floor(beside) == (33, 3, "`use` alone needs its 3 inputs (32 B) and its output (1 B) at once")
    after = Graph(
        (
            *masks,
            Op("gate", (), (4,), 1),
            Op("wide", (4,), (2,), 1),
            Op("use", (0, 1), (3,), 1),
        ),
        (*values, Value("gate", 0)),
        order=((0, 3), (1, 3), (3, 4)),
    )
    assert floor(after)[:2] == (32, 3)
    alone = Graph(
        (*masks[:1], Op("wide", (), (1,), 1), Op("use", (0, 1), (2,), 1)), (values[0], Value("wide", 20, kept=True), values[3])
    )
    assert floor(alone)[:2] == (26, 2)
    apart = Graph(
        (*masks[:1], Op("wide", (), (1,), 1), Op("narrow", (1,), (2,), 1), Op("use", (0, 2), (3,), 1)),
        (values[0], Value("wide", 20), Value("narrow", 20), values[3]),
    )
    assert floor(apart)[:2] == (40, 2)


def test_a_storage_counts_once_however_it_is_read():
    """A view allocates nothing, and an input that is kept or cannot be made again is there already."""
    graph = Graph(
        (
            Op("a", (), (0,), 1, recomputable=False),
            Op("view", (0,), (1,), 0),
            Op("use", (0, 1), (2, 3, 4), 1, workspace_bytes=1, source="model.py:3"),
            Op("again", (0,), (5,), 1),
        ),
        (Value("x", 8, kept=True), Value("y", 0, 0), Value("z", 2), Value("w", 3), Value("u", 0, 0), Value("v", 1)),
        resident_bytes=100,
    )
    assert floor(graph) == (
        114,
        2,
        "`use` (model.py:3) alone needs its input (8 B), its 2 outputs (5 B) and 1 B of workspace at once, "
        "beside 100 B that no plan can change",
    )


@pytest.mark.parametrize(
    ("op", "why"),
    [
        (
            Op("sum", (0, 1), (2,), 1),
            "`sum` alone needs its 2 inputs (6 B) and its output (2.00 KiB) at once",
        ),
        (
            Op("sum", (0,), (2, 3), 1, workspace_bytes=2**20),
            "`sum` alone needs its input (2 B), its 2 outputs (2.00 KiB) and 1.00 MiB of workspace at once",
        ),
        (
            Op("sum", (), (2,), 1, source="net.layer1"),
            "`sum` (net.layer1) alone needs its 0 inputs (0 B) and its output (2.00 KiB) at once",
        ),
    ],
)
def test_the_reason_counts_and_sizes_what_an_op_needs(op, why):
    """An error message has it: one is singular, and only what is there is named."""
    rest = [Op("rest", (), tuple({3} - set(op.outputs)), 1)]
    values = (Value("x", 2), Value("y", 4), Value("z", 2048), Value("w", 0))
    graph = Graph((Op("x", (), (0,), 1), Op("y", (), (1,), 1), op, *rest), values)
    assert floor(graph).why == why


def test_kept_values_may_be_the_floor():
    """Gradients are all there at the end of a step, each storage once."""
    graph = Graph(
        (Op("a", (), (0,), 1), Op("view", (0,), (1,), 0), Op("b", (), (2,), 1)),
        (Value("x", 8, kept=True), Value("y", 0, 0, kept=True), Value("z", 8, kept=True)),
        resident_bytes=3,
    )
    assert floor(graph) == (19, None, "16 B of kept values must be there at the end")


def test_the_reason_names_no_output_that_takes_the_place_of_an_input():
    """Optimizers update in place: such an output needs no bytes, and "its 0 outputs (0 B)" told users nothing."""
    graph = Graph(
        (Op("gradient", (), (0,), 1), Op("sgd/Sub_1", (0,), (1,), 1)),
        (Value("gradient", 8), Value("weight", 0, base=0, kept=True)),
    )
    lowest = floor(graph)
    assert "0 outputs" not in lowest.why
    in_place = Graph(
        (Op("a", (), (0,), 1), Op("b", (), (1,), 1), Op("sub", (0, 1), (2,), 1), Op("use", (2,), (3,), 1)),
        (Value("a", 8), Value("b", 8), Value("c", 0, base=0), Value("d", 1, kept=True)),
    )
    assert floor(in_place).why == "`sub` alone needs its 2 inputs (16 B) at once"
