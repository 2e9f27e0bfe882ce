"""The search for a plan whose compiled step keeps the budget, with a compiler that does as it likes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import fx

from checkmate import Graph
from checkmate.core.budget import keep_all_bytes
from checkmate.frontend.calibration import Proportional, Trial
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch.compilation.compilation import Compilation
from checkmate.torch.compilation.hooks import Hooks
from checkmate.torch.inductor.search import CalibratedSearch
from checkmate.torch.options import Options
from checkmate.torch.steps.program import StepAllotment

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


def fitted(graph: Graph, budget: int, compiler: Compiler) -> tuple[Trial | None, int]:
    """What a budget is answered with, and after how many compilations."""
    options = Options(budget=budget, compiler="inductor", time_limit_s=1)
    search = CalibratedSearch(Compilation(fx.Graph(), (), options, Hooks()), "some compiler")
    while True:
        _, result = search.plan(graph)
        peak = compiler(result.peak_bytes, result.plan.order)
        memory = StepMemory(forward_peak_bytes=0, saved_bytes=0, backward_peak_bytes=peak, gradient_bytes=0)
        search.record(memory, measured=True)
        if not search.next_candidate():
            break
    best = search.best()
    return None if best is None else search.trials[best], len(search.trials)


@pytest.mark.parametrize(("room", "chosen"), [(0, 0), (-1, None)])
def test_the_part_of_a_step_leaves_room_for_the_rest(room: int, chosen: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One order is compiled; where it takes more than its share, at any time, eager ops have to run it."""
    graph = step_graph()
    compilation = Compilation(fx.Graph(), (), Options(budget=keep_all_bytes(graph), compiler="inductor"), Hooks())
    order = tuple(range(len(graph.ops)))
    planned = StepMemory(forward_peak_bytes=500, saved_bytes=400, backward_peak_bytes=900, gradient_bytes=100)
    share = StepAllotment(order, planned)
    monkeypatch.setattr(type(compilation.planner), "allotment", lambda self, graph: share)
    search = CalibratedSearch(compilation, "some compiler")
    assert search.plan(graph)[1].plan.order == order
    search.record(replace(planned, saved_bytes=planned.saved_bytes - room), measured=True)
    assert not search.next_candidate()
    assert search.best() == chosen


def fickle(seed: int) -> Compiler:
    """Takes up to a fifth less or a fifth more than predicted, the same for the same plan."""
    return lambda planned, order: int(planned * random.Random(f"{seed} {order}").uniform(0.8, 1.2))


@pytest.mark.parametrize("seed", range(3))
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
    saving, compilations = fitted(graph, budget - 1, lambda planned, order: planned * 2 // 3)
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
