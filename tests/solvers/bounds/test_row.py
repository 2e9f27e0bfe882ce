"""The bound of a row of layers: the recursion of its source, exact on unit chains, below every plan elsewhere."""

from __future__ import annotations

import math
import random
from functools import cache

import msgspec
import pytest

from benchmarks.generate import chain, skipping
from checkmate import AStar, BruteForce, Graph, Limits, Op, Problem, Reason, Value, solve
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.bounds.row import computations, row_bound
from checkmate.solvers.reductions.fold_views import FoldViews
from tests.strategies import random_graph


@cache
def recursion(steps: int, checkpoints: int) -> int:
    """Advance to a step, hold it, reverse what is above, then what is below, over every step to hold."""
    if checkpoints == 0 or steps == 0:
        return steps * (steps + 1) // 2
    held = range(1, steps + 1)
    return min(j + recursion(steps - j, checkpoints - 1) + recursion(j - 1, checkpoints) for j in held)


def test_the_number_of_computations_is_that_of_the_recursion():
    """In closed form, so that rows of thousands take no time."""
    assert all(computations(m, c) == recursion(m, c) for m in range(40) for c in range(8))
    assert computations(10_000, 9_999) == 10_000


def test_it_is_exact_on_unit_chains():
    """The search over states is the oracle; it assumes nothing about orders or checkpoints."""
    positive = 0
    for layers in range(2, 10):
        for budget in range(2, layers + 3):
            problem = Problem(chain(layers), budget)
            optimum = solve(problem, AStar(), limits=Limits(gap=0.0), raise_on_failure=False).cost
            bound = problem.graph.cost + row_bound(problem)
            assert bound == (math.inf if optimum is None else optimum), (layers, budget)
            positive += row_bound(problem) > 0
    assert positive > 10


def row_graph(rng: random.Random) -> Graph:
    """Layers and gradients of random sizes and costs, some of which read or make more than a chain does."""
    layers = rng.randint(2, 4)
    values: list[Value] = []
    ops: list[Op] = []

    def add(inputs: list[int], least: int, kept: bool = False) -> int:
        values.append(Value(f"v{len(values)}", rng.randint(least, 3), kept=kept))
        workspace = rng.choice([0, 0, 0, 1])
        ops.append(Op(f"f{len(ops)}", tuple(inputs), (len(values) - 1,), rng.randint(1, 4), workspace_bytes=workspace))
        return len(values) - 1

    made = [add([], 1)]
    for _ in range(layers - 1):
        made.append(add([made[-1], *rng.sample(made[:-1], min(len(made) - 1, rng.random() < 0.2))], 1))
    gradient = add([made[-1]], 0)
    for j in reversed(range(layers)):
        more = rng.sample(made, rng.random() < 0.2)
        gradient = add(list(dict.fromkeys([gradient, made[j], *more])), 0, rng.random() < 0.2)
    return Graph(tuple(ops), tuple(values))


def test_no_plan_costs_less_where_bytes_and_costs_differ():
    """Brute force or the search over states is exact; a bound that is infinite means that there is no plan."""
    positive = infinite = 0
    for seed in range(125):
        rng = random.Random(seed)
        graph = row_graph(rng)
        low = floor(graph).peak_bytes
        problem = Problem(graph, rng.randint(low - 1, max(low, keep_all_bytes(graph) - 1)))
        bound = row_bound(problem)
        if bound <= 0:
            continue
        optimum = solve(problem, AStar(), limits=Limits(gap=0.0), raise_on_failure=False).cost
        assert graph.cost + bound <= (math.inf if optimum is None else optimum), seed
        positive += math.isfinite(bound)
        infinite += math.isinf(bound)
    assert positive > 5
    assert infinite > 1


def test_no_plan_of_any_graph_costs_less():
    """Views, rules, several outputs: rows are found where they happen to be."""
    positive = 0
    for seed in range(300):
        graph = random_graph(random.Random(seed), max_ops=7, training=True)
        low = floor(graph).peak_bytes
        problem = Problem(graph, low)
        bound = row_bound(FoldViews.of(graph, priced=True).apply(problem))
        if bound <= 0 or len(graph.ops) > 6:
            continue
        optimum = solve(problem, BruteForce(), raise_on_failure=False).cost
        assert graph.cost + bound <= (math.inf if optimum is None else optimum), seed
        positive += 1
    assert positive > 1


@pytest.mark.parametrize("ops", [999, 9999])
def test_long_rows_take_no_time(ops):
    """A chain with skip connections: the row is its chain, and skips only raise what its plans cost."""
    graph = skipping(ops)
    problem = Problem(graph, floor(graph).peak_bytes)
    assert 0 <= row_bound(problem) < math.inf


def changed(layers: int, *, steps: int = 0, readers: int = 0, both: bool = False, sizes: int = 1) -> Graph:
    """A chain whose ops need more.

    Args:
        layers: Its layers.
        steps: Workspace of the layers after the first.
        readers: Workspace of the gradients.
        both: Whether a gradient also reads the layer above its own; the first step and the first gradient have workspace then.
        sizes: Bytes of every second gradient.
    """
    unit = chain(layers)
    ops = list(unit.ops)
    for o in range(1, layers):
        ops[o] = msgspec.structs.replace(ops[o], workspace_bytes=steps)
    for o in range(layers + 1, len(ops)):
        above = (2 * layers - o + 1,) if both and o > layers + 1 else ()
        ops[o] = msgspec.structs.replace(ops[o], workspace_bytes=readers, inputs=(*ops[o].inputs, *above))
    for o in (0, layers + 1) if both else ():
        ops[o] = msgspec.structs.replace(ops[o], workspace_bytes=3)
    size = [sizes if v > layers and v % 2 else x.size_bytes for v, x in enumerate(unit.values)]
    values = [msgspec.structs.replace(x, size_bytes=b) for x, b in zip(unit.values, size, strict=True)]
    return msgspec.structs.replace(unit, ops=tuple(ops), values=tuple(values))


@pytest.mark.parametrize(
    ("graph", "budget", "checkpoints"),
    [
        (changed(6), 5, 2),
        # The first step reads nothing of the row: one more fits beside it, which says nothing about the others.
        (changed(6, steps=2, readers=2), 5, 2),
        # A gradient, or a step, alone decides where the others need more.
        (changed(6, steps=2), 5, 2),
        (changed(6, readers=2), 6, 3),
        (changed(6, readers=2, both=True), 6, 3),
        # What a gradient reads of the row beside its own value is one of the checkpoints.
        (changed(6, steps=3, both=True), 6, 3),
        # Of the gradients that are carried from one to the next the smallest is sure.
        (changed(6, readers=4, sizes=2), 6, 3),
    ],
)
def test_room_for_checkpoints_is_what_the_ops_leave(graph, budget, checkpoints):
    """The op with most room decides, and the optimum is never below."""
    problem = Problem(graph, budget)
    assert row_bound(problem) == computations(6, checkpoints) - 6
    optimum = solve(problem, AStar(), limits=Limits(gap=0.0), raise_on_failure=False).cost
    assert optimum is None or graph.cost + row_bound(problem) <= optimum


def test_a_chain_is_solved_to_the_proof():
    """The search finds the plan of the recursion for chains, and the bound of its row proves it."""
    result = solve(Problem(chain(24), 5), limits=Limits(time_s=30, gap=0.0))
    assert result.termination.reason is Reason.OPTIMAL
    assert result.cost == 90
