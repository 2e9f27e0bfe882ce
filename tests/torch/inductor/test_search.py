"""The search for a plan whose compiled step keeps the budget, with a compiler that does as it likes."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import fx

from checkmate import Graph, Op, Plan, PlanError, Value, simulate, validate
from checkmate.core.budget import keep_all_bytes
from checkmate.frontend.calibration import Proportional, Trial
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch.compilation.compilation import Compilation, Hooks
from checkmate.torch.inductor.search import CalibratedSearch, in_graph_order
from checkmate.torch.options import Options
from checkmate.torch.steps.program import StepAllotment
from tests.strategies import random_graph, random_order

Compiler = Callable[[int, tuple[int, ...]], int]


def step_graph(layers: int = 8) -> Graph:
    """Forward and backward of a chain of layers of unequal sizes."""
    sizes = [40 + 17 * (i % 5) for i in range(layers)]
    edges = [(i, i + 1) for i in range(2 * layers - 1)] + [(layers - 1 - i, layers + i) for i in range(1, layers)]
    return Graph.from_dag(
        cost=[100 + 31 * (i % 3) for i in range(2 * layers)],
        size_bytes=[1000 * s for s in (*sizes, *reversed(sizes))],
        edges=sorted(edges),
        backward=[i >= layers for i in range(2 * layers)],
        kept=(2 * layers - 1,),
    )


def memory_of(peak_bytes: int) -> StepMemory:
    return StepMemory(forward_peak_bytes=0, saved_bytes=0, backward_peak_bytes=peak_bytes, gradient_bytes=0)


def fitted(graph: Graph, budget: int, compiler: Compiler, name: str = "some compiler") -> tuple[Trial | None, int]:
    """What a budget is answered with, and after how many compilations."""
    options = Options(budget=budget, compiler="inductor", time_limit_s=1)
    search = CalibratedSearch(Compilation(fx.Graph(), (), options, Hooks()), name)
    peaks: list[int] = []

    def compiled() -> None:
        _, result = search.plan(graph)
        peaks.append(compiler(result.peak_bytes, result.plan.order))

    compiled()
    best = search.choose(None, compiled, lambda index: memory_of(peaks[index]))
    return None if best is None else search.trials[best], len(search.trials)


@pytest.mark.parametrize(("room", "chosen"), [(0, 0), (-1, None)])
def test_the_part_of_a_step_leaves_room_for_the_rest(room: int, chosen: int | None) -> None:
    """One order is compiled; where it takes more than its share, at any time, eager ops have to run it."""
    graph = step_graph()
    order = tuple(range(len(graph.ops)))
    planned = StepMemory(forward_peak_bytes=500, saved_bytes=400, backward_peak_bytes=900, gradient_bytes=100)
    compilation: Any = SimpleNamespace(
        options=Options(budget=keep_all_bytes(graph), compiler="inductor"),
        ranks=None,
        planner=SimpleNamespace(
            agreed=lambda graph, plan: (graph, plan(graph)), allotment=lambda graph: StepAllotment(order, planned)
        ),
    )
    search = CalibratedSearch(compilation, "some compiler")
    assert search.plan(graph)[1].plan.order == order
    measured = replace(planned, saved_bytes=planned.saved_bytes - room)
    assert search.choose(None, lambda: None, lambda index: measured) == chosen
    assert len(search.trials) == 1


def fickle(seed: int) -> Compiler:
    """Takes up to a fifth less or a fifth more than predicted, the same for the same plan."""
    return lambda planned, order: int(planned * random.Random(f"{seed} {order}").uniform(0.8, 1.2))


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_a_smaller_budget_never_takes_more(seed: int) -> None:
    """Whatever was asked before, and in which order: pytorch#197838 is what happens otherwise."""
    graph = step_graph()
    top = keep_all_bytes(graph)
    budgets = [int(top * share) for share in (1.1, 0.95, 0.9, 0.8, 0.7, 0.65, 0.6)]
    random.Random(seed).shuffle(budgets)
    answers: dict[int, int] = {}
    for budget in budgets:
        tried, compilations = fitted(graph, budget, fickle(seed))
        assert compilations <= Proportional().most_trials
        if tried is not None:
            answers[budget] = tried.needed_bytes
            assert tried.needed_bytes <= budget
    assert len(answers) >= 4
    peaks = [answers[budget] for budget in sorted(answers)]
    assert peaks == sorted(peaks)


def test_what_was_measured_is_remembered() -> None:
    """A process that asks again compiles once, and gets the same plan."""
    graph = step_graph()
    budget = int(0.7 * keep_all_bytes(graph))
    first, several = fitted(graph, budget, lambda planned, order: int(1.2 * planned))
    again, once = fitted(graph, budget, lambda planned, order: int(1.2 * planned))
    assert several > 1
    assert once == 1
    assert first is not None
    assert again is not None
    assert first.outcome.order == again.outcome.order


def test_a_compiler_that_always_takes_more_is_given_up() -> None:
    """The eager compiler takes over: no plan that was measured over the budget is ever handed out."""
    graph = step_graph()
    budget = int(0.6 * keep_all_bytes(graph))
    tried, compilations = fitted(graph, budget, lambda planned, order: budget + 1)
    assert tried is None
    assert compilations <= Proportional().most_trials


def test_room_that_fusion_leaves_is_used() -> None:
    """A compiler that takes a third less than predicted is given a plan that computes less again."""
    graph = step_graph()
    budget = int(0.6 * keep_all_bytes(graph))
    exact, _ = fitted(graph, budget, lambda planned, order: planned)
    saving, compilations = fitted(graph, budget - 1, lambda planned, order: planned * 2 // 3, "one that fuses")
    assert exact is not None
    assert saving is not None
    assert saving.cost < exact.cost
    assert compilations > 1


def test_what_a_compiler_adds_to_every_plan_is_learnt() -> None:
    """A plan that shrinks by a byte need not shrink the step by one: the line through two plans says how far to go.

    Without the line, each plan is smaller than the last by what the last was over, and the search gives up.
    """
    graph = step_graph()
    top = keep_all_bytes(graph)
    tried, compilations = fitted(graph, int(0.82 * top), lambda planned, order: (7 * planned + 13 * top) // 20)
    assert tried is not None
    assert compilations <= Proportional().most_trials


@pytest.mark.parametrize("seed", range(100))
def test_the_order_of_the_graph_is_a_plan_of_the_same_computations_within_the_limit(seed: int) -> None:
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
