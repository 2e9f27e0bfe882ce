"""The order of a plan that is given to Inductor: that of the graph wherever it keeps the budget."""

from __future__ import annotations

import contextlib
import random
from collections import Counter

import pytest

from checkmate import Graph, Op, Plan, PlanError, Value, simulate, validate
from checkmate.torch.inductor.search import in_graph_order
from tests.strategies import random_graph, random_order


@pytest.mark.parametrize("seed", range(300))
def test_it_is_a_plan_of_the_same_computations_within_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, max_ops=12)
    order = shuffled(rng, graph, random_order(rng, graph))
    taken = simulate(graph, Plan.from_order(graph, order)).peak_bytes
    found = in_graph_order(graph, order, taken)
    plan = Plan.from_order(graph, found)
    assert not validate(graph, plan)
    assert Counter(found) == Counter(order)
    assert simulate(graph, plan).peak_bytes <= taken


def shuffled(rng: random.Random, graph: Graph, order: list[int]) -> list[int]:
    """The order after random swaps of neighbours that leave it a plan."""
    for _ in range(3 * len(order)):
        at = rng.randrange(len(order))
        swapped = [*order[:at], *reversed(order[at : at + 2]), *order[at + 2 :]]
        with contextlib.suppress(PlanError):
            if not validate(graph, Plan.from_order(graph, swapped)):
                order = swapped
    return order


def test_with_room_it_is_the_order_of_the_graph() -> None:
    """Two equal layers, the ops of which a search ordered in two ways."""
    ops, values = [], []
    for layer in range(2):
        at = 3 * layer
        ops += [
            Op("large", (at - 1,) if layer else (), (at,), 1),
            Op("small", (at - 1,) if layer else (), (at + 1,), 1),
            Op("both", (at, at + 1), (at + 2,), 1),
        ]
        values += [Value("large", 100), Value("small", 1), Value("both", 1, kept=layer == 1)]
    graph = Graph(tuple(ops), tuple(values))
    assert in_graph_order(graph, (1, 0, 2, 3, 4, 5), 1000) == (0, 1, 2, 3, 4, 5)


def test_a_computation_is_repeated_just_before_its_reader() -> None:
    ops = (Op("a", (), (0,), 1), Op("b", (0,), (1,), 1), Op("c", (1,), (2,), 1), Op("d", (0, 2), (3,), 1))
    values = (Value("a", 5), Value("b", 4), Value("c", 1), Value("d", 1, kept=True))
    assert in_graph_order(Graph(ops, values), (0, 1, 0, 2, 3), 11) == (0, 1, 2, 0, 3)
