"""Refinement: what is proven of events, how a solution becomes a plan, and which events are added."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from checkmate import Graph, Limits, Problem, simulate, solve
from checkmate.solvers.backends import highs
from checkmate.solvers.backends.program import Solved
from checkmate.solvers.bounds.events import refine as refine_module
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import NoColumn, build_cuts
from checkmate.solvers.bounds.events.refine import (
    PARAMETERS,
    Refinement,
    RefinementParameters,
    code_of,
    first_bytes,
    longest_chain,
)
from tests.solvers.bounds.events.test_event_choice import chain_graph
from tests.solvers.bounds.events.test_event_cuts import some_chain, tight_problem
from tests.solvers.bounds.proof import strict_ancestors
from tests.solvers.chains import unit_chain


class FakeSearch:
    """Says what it is told to, and remembers what it was told."""

    def __init__(self, stage: dict[int, int], orders: Iterable[list[int]] = (), repaired: list[int] | None = None) -> None:
        self.stage = stage
        self.orders = iter(orders)
        self.repaired = repaired
        self.evicted: list[tuple[int, int, int]] = []
        self.started: list[object] = []

    def empty_code(self) -> Any:
        return self.evicted

    def evict(self, code: Any, value: int, start: int, stop: int) -> bool:
        assert code is self.evicted
        self.evicted.append((value, start, stop))
        return True

    def realise(self, code: Any) -> list[int]:
        assert code is self.evicted
        return next(self.orders)

    def start_from(self, code: Any) -> bool:
        self.started.append(code)
        return self.repaired is not None

    def order(self) -> list[int]:
        assert self.repaired is not None
        return self.repaired


def test_a_code_evicts_what_is_not_live_from_its_last_touch_or_event():
    """By the stages of the search; a value that is live by half or more stays, up to the stage of the next event."""
    evictions = kept_longer = 0
    for seed in range(80):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        graph = problem.graph
        model = CutModel(problem)
        cut = build_cuts(model, some_chain(rng, model))
        staged = [o for o in range(model.end) if rng.random() < 0.8]
        stage = {o: t for t, o in enumerate(staged)}
        live = np.array([rng.choice([0.0, 0.49, 0.5, 1.0]) for _ in cut.program.cost])
        search = FakeSearch(stage)
        assert code_of(cut, live, model, search) is search.evicted
        events = [(stage[event], cut.live[e]) for e, event in enumerate(cut.cuts) if event in stage]
        expected: list[tuple[int, int, int]] = []
        for e, (at, columns) in enumerate(events):
            for v in range(len(graph.values)):
                if columns[v] >= 0 and live[columns[v]] < 0.5:
                    made = stage.get(graph.producer[v], -1)
                    reads = [stage[o] for o in graph.readers[v] if stage.get(o, math.inf) < at]
                    start = max(reads, default=made) + 1
                    for (_, held), (following, _) in pairwise(events[: e + 1]):
                        if held[v] == NoColumn.ALWAYS_LIVE or (held[v] >= 0 and live[held[v]] >= 0.5):
                            kept_longer += following + 1 > start
                            start = max(start, following + 1)
                    expected.append((v, start, at + 1))
        assert search.evicted == expected, seed
        evictions += len(expected)
    assert evictions > 100
    assert kept_longer > 10


class Engine:
    """Stands for HiGHS in a refinement: bounds and endings as told; what it was asked is remembered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *bounds: float, found: bool = True, finished: bool = True) -> None:
        self.bounds = iter(bounds)
        self.found, self.finished = found, finished
        self.linear: list[float] = []
        self.integer: list[dict[str, float]] = []
        self.programs: list[Any] = []
        self.relaxed: list[Any] = []
        self.prices = False
        monkeypatch.setattr(highs, "solve_linear", self.solve_linear)
        monkeypatch.setattr(highs, "solve_integer", self.solve_integer)

    def solve_linear(self, program: Any, *, time_s: float) -> Solved:
        self.linear.append(time_s)
        self.relaxed.append(program)
        prices = np.arange(len(program.row_low)) % 3 * 0.5 if self.prices else None
        return Solved(0.125, None, math.inf, True, row_prices=prices)

    def solve_integer(self, program: Any, **limits: float) -> Solved:
        self.integer.append(limits)
        self.programs.append(program)
        solution = np.zeros(len(program.cost)) if self.found else None
        return Solved(next(self.bounds), solution, 0.0, self.finished)


def refine(
    search: FakeSearch, problem: Problem, first: list[int], *, best: float = 1.0, left: Callable[[], float] = lambda: 100.0,
    targets: tuple[int, ...] | None = None, floating: bool = True, peaks: Sequence[int] = (),
    prices: Mapping[int, float] | None = None, known: float = -math.inf,
) -> tuple[list[int], list[tuple[float, bool]], list[list[int]]]:  # fmt: skip
    """Events of the last program, what was proven and what was offered."""
    proven: list[tuple[float, bool]] = []
    offered: list[list[int]] = []
    refinement = Refinement(
        CutModel(problem, targets), search, lambda *proof: proven.append(proof), offered.append, gap=0.01, threads=3
    )
    cuts = refinement.run(first, lambda: best, left, floating=floating, peaks=peaks, prices=prices, known=known)
    return cuts, proven, offered


def test_without_time_nothing_is_proven():
    """The events are those that were given, in the order of the chain."""
    left = PARAMETERS.least_time_s
    assert refine(FakeSearch({}), Problem(unit_chain(3), 4), [5, 3, 4, 3], left=lambda: left) == ([3, 4, 5], [], [])


def test_events_come_in_the_order_of_their_targets():
    """Which need not be that of the indices; an op that is no target stands where its index says."""
    diamond = Graph.from_dag(cost=[1] * 4, size_bytes=[1] * 4, edges=[(0, 1), (0, 2), (1, 3), (2, 3)], kept=[3])
    problem = Problem(diamond, 9)
    assert refine(FakeSearch({}), problem, [1, 2], targets=(0, 2, 1, 3), left=lambda: 0.0)[0] == [2, 1]
    assert refine(FakeSearch({}), problem, [1, 0], targets=(0, 3), left=lambda: 0.0)[0] == [0, 1]


def test_the_solution_of_a_program_becomes_the_code_that_is_realised(monkeypatch):
    """What it does not hold is evicted, in the stages of the search."""
    problem = Problem(unit_chain(6), 5)
    stage = {o: o for o in range(13)}
    engine = Engine(monkeypatch, 0.0)
    search, fresh = FakeSearch(stage, [[]]), FakeSearch(stage)
    refine(search, problem, [6, 8])
    model = CutModel(problem)
    code_of(build_cuts(model, [6, 8]), np.zeros(len(engine.programs[0].cost)), model, fresh)
    assert search.evicted == fresh.evicted
    assert len(search.evicted) > 4


def test_without_targets_events_are_added_on_the_longest_chain(monkeypatch):
    """An event on a shorter branch would bar later ones; targets in a given order are one chain."""
    graph = Graph.from_dag(cost=[1] * 4, size_bytes=[1, 5, 5, 1], edges=[(0, 1), (0, 2), (1, 3)])
    problem, order = Problem(graph, 10), [0, 1, 2, 3]
    assert [o for o, held in first_bytes(graph, order).items() if held > 10] == [2]
    Engine(monkeypatch, 0.0, 0.0, 0.0)
    assert refine(FakeSearch({}, [order] * 2), problem, [0])[0] == [0]
    assert refine(FakeSearch({}, [order] * 2), problem, [0], targets=(0, 1, 2, 3))[0] == [0, 2]


def test_an_impossible_event_proves_that_there_is_no_plan():
    """Then no engine is asked."""
    problem = Problem(chain_graph([1, 5, 5, 1]), 9)
    assert refine(FakeSearch({}), problem, [1, 2]) == ([1, 2], [(math.inf, True)], [])


@pytest.mark.parametrize(
    ("first", "left", "linear"),
    [
        ([3], 20.0, []),
        ([3, 4], 20.0, [PARAMETERS.chain_linear_share * 20.0]),
        ([3, 4], 99.0, [PARAMETERS.chain_linear_time_s]),
    ],
)
def test_a_round_proves_the_relaxation_and_then_the_integers(monkeypatch, first, left, linear):
    """One event alone was relaxed before. The engine gets the time that is left, the gap, the threads and the best cost."""
    engine = Engine(monkeypatch, 0.5)
    order = list(range(7))
    cuts, proven, offered = refine(FakeSearch({}, [order]), Problem(unit_chain(3), 7), first, best=0.75, left=lambda: left)
    assert cuts == first
    assert proven == [(0.125, True)] * len(linear) + [(0.5, True)]
    assert offered == [order]
    assert engine.linear == linear
    assert all(relaxed is program for relaxed, program in zip(engine.relaxed, engine.programs, strict=False))
    assert engine.integer == [{"time_s": PARAMETERS.integer_share * left, "absolute_gap": 0.01, "threads": 3, "cutoff": 0.75}]


def test_bounds_of_a_given_order_say_so(monkeypatch):
    """Where the DAG leaves an order open, what is proven of one holds for that one."""
    Engine(monkeypatch, 0.5)
    graph = Graph.from_dag(cost=[1] * 4, size_bytes=[1] * 4, edges=[(0, 1), (0, 2), (1, 3), (2, 3)], kept=[3])
    proven = refine(FakeSearch({}, [[]]), Problem(graph, 9), [1, 2], targets=(0, 1, 2, 3))[1]
    assert proven == [(0.125, False), (0.5, False)]
    assert refine(FakeSearch({}), Problem(graph, 1), [1], targets=(0, 1, 2, 3))[1] == [(math.inf, False)]


def test_floating_ops_are_modelled_as_told(monkeypatch):
    """Without them the program has fewer columns."""
    problem = Problem(Graph.from_dag(cost=[1] * 4, size_bytes=[1] * 4, edges=[(0, 1), (0, 2), (1, 3)], kept=[2, 3]), 3)
    engine = Engine(monkeypatch, 0.0, 0.0)
    for floating in (False, True):
        refine(FakeSearch({}, [[]]), problem, [3], floating=floating)
    assert len(engine.programs[0].cost) < len(engine.programs[1].cost)


def test_time_that_runs_out_after_the_relaxation_ends_the_round(monkeypatch):
    """What is proven stays proven."""
    engine = Engine(monkeypatch)
    times = iter([1.0, 1.0, 0.0])
    problem = Problem(unit_chain(3), 7)
    assert refine(FakeSearch({}), problem, [3, 4], left=lambda: next(times)) == ([3, 4], [(0.125, True)], [])
    assert engine.integer == []


@pytest.mark.parametrize(
    ("bound", "found", "goes_on"),
    [(0.5, True, True), (0.74, True, False), (0.75, True, False), (0.739, True, True), (0.5, False, False)],
)
def test_a_bound_at_the_best_plan_or_no_solution_ends_the_refinement(monkeypatch, bound, found, goes_on):
    """Within the gap there is nothing to gain; without a solution there is nothing to realise."""
    Engine(monkeypatch, bound, found=found)
    order = list(range(7))
    cuts, proven, offered = refine(FakeSearch({}, [order]), Problem(unit_chain(3), 7), [3], best=0.75)
    assert cuts == [3]
    assert proven == [(bound, True)]
    assert offered == ([order] if goes_on else [])


def test_a_solution_is_offered_as_it_is_and_repaired(monkeypatch):
    """The first may break the budget; where it cannot be realised, an op would have to run twice that may not."""
    Engine(monkeypatch, 0.0, 0.0, 0.0)
    problem, order, other = Problem(unit_chain(3), 7), list(range(7)), [0, *range(7)]
    search = FakeSearch({}, [order], repaired=other)
    assert refine(search, problem, [3])[2] == [order, other]
    assert search.started == [search.evicted]
    unrepaired = FakeSearch({}, [order])
    assert refine(unrepaired, problem, [3])[2] == [order]
    assert len(unrepaired.started) == 1
    impossible = FakeSearch({}, [[]], repaired=other)
    assert refine(impossible, problem, [3]) == ([3], [(0.0, True)], [])
    assert impossible.started == []


@pytest.fixture
def two_at_a_time(monkeypatch):
    """Two events are added in a round, whatever time there is."""
    monkeypatch.setattr(refine_module, "PARAMETERS", RefinementParameters(added_events=(2, 2)))


@pytest.mark.usefixtures("two_at_a_time")
def test_events_are_added_where_the_realised_plan_breaks_the_budget(monkeypatch):
    """The fullest first, here two at a time, apart from each other and first from those before, until all that break it are."""
    problem, order = Problem(unit_chain(6), 5), list(range(13))
    assert list(first_bytes(problem.graph, order).values()) == [1, 2, 3, 4, 5, 6, 7, 8, 7, 6, 5, 4, 3]
    for rounds, events in enumerate(([3], [3, 5, 7], [3, 5, 7, 9], [3, 5, 6, 7, 8, 9], [3, 5, 6, 7, 8, 9])):
        engine = Engine(monkeypatch, *[0.0] * 4)
        search = FakeSearch({}, [*[order] * rounds, []])
        assert refine(search, problem, [3])[0] == events
        assert len(engine.linear) == min(rounds, 3)
    Engine(monkeypatch, 0.0)
    late = iter([1.0] * 5 + [0.0])
    assert refine(FakeSearch({}, [order]), problem, [3], left=lambda: next(late, 0.0))[0] == [3, 5, 7]


@pytest.mark.usefixtures("two_at_a_time")
def test_of_events_that_are_violated_those_that_prove_more_than_their_neighbours_come_first(monkeypatch):
    """In the order of their bytes; others where there are none, or none apart from the events so far."""
    problem, order = Problem(unit_chain(6), 5), list(range(13))
    for peaks, events in (([5, 8, 11], [3, 5, 8]), ([8], [3, 6, 8]), ([11], [3, 5, 7])):
        Engine(monkeypatch, 0.0, 0.0)
        assert refine(FakeSearch({}, [order, []]), problem, [3], peaks=peaks)[0] == events
    Engine(monkeypatch, 0.0, 0.0)
    assert refine(FakeSearch({}, [order, []]), problem, [6], peaks=[7])[0] == [6, 8]


@pytest.mark.usefixtures("two_at_a_time")
def test_of_peaks_that_are_violated_those_come_first_that_would_gain_most(monkeypatch):
    """By price and bytes: 5, 7 and 9 are over the budget by 1, 3 and 1. The mean of the others counts where no price is known."""
    problem, order = Problem(unit_chain(6), 5), list(range(13))
    for prices, events in (
        ({}, [3, 5, 7]),
        ({5: 2.0, 7: 0.1, 9: 0.5}, [3, 5, 9]),
        ({5: 2.0, 7: 0.2, 9: 0.5}, [3, 5, 7]),
        ({5: 0.1, 7: 0.5}, [3, 7, 9]),
        ({5: 1.0, 7: 0.5}, [3, 5, 7]),
        ({3: 9.0, 5: 1.0, 7: 0.5}, [3, 5, 7]),
    ):
        Engine(monkeypatch, 0.0, 0.0)
        assert refine(FakeSearch({}, [order, []]), problem, [3], peaks=[5, 7, 9, 11], prices=prices)[0] == events


@pytest.mark.usefixtures("two_at_a_time")
def test_a_peak_with_a_price_may_be_near_the_events_so_far(monkeypatch):
    problem, order = Problem(unit_chain(6), 5), list(range(13))
    for price, events in ((0.0, [6, 8]), (1.0, [6, 7])):
        Engine(monkeypatch, 0.0, 0.0)
        assert refine(FakeSearch({}, [order, []]), problem, [6], peaks=[7, 8], prices={7: price})[0][:2] == events


def test_the_program_for_integers_leaves_out_what_the_relaxation_can_do_without(monkeypatch):
    """Where its prices are known; of a single event no relaxation is solved, and no row is implied."""
    problem = Problem(unit_chain(6), 5)
    for events, prices in (([3], True), ([3, 9, 11], False), ([3, 9, 11], True)):
        engine = Engine(monkeypatch, 1.0)
        engine.prices = prices
        refine(FakeSearch({}, []), problem, events)
        cut = build_cuts(CutModel(problem), events, segments="all")
        rows = len(cut.program.row_low)
        left_out = int(cut.implied[::3].sum()) if prices else 0
        assert [len(program.row_low) for program in engine.programs] == [rows - left_out]
        assert (left_out > 0) == (prices and len(events) > 1)


@pytest.mark.parametrize("finished", [True, False])
def test_the_longest_program_says_how_long_the_next_takes(monkeypatch, finished):
    """No program is begun after one that time cut short."""
    engine = Engine(monkeypatch, 0.0, 0.0, 0.0, finished=finished)
    clock = iter([50.0, 50.0, 50.0, 46.0])
    search = FakeSearch({}, [list(range(13)), list(range(13)), []])
    refinement = Refinement(CutModel(Problem(unit_chain(6), 5)), search, lambda *_: None, lambda _: True, gap=0.01, threads=1)
    refinement.run([3], lambda: 1.0, lambda: next(clock, 40.0), floating=True)
    assert len(engine.programs) == (3 if finished else 1)
    assert refinement.next_s == PARAMETERS.growth * 4.0


@pytest.mark.parametrize(
    ("took", "left", "added"), [(1.0, 0.9, 0), (1.0, 1.1, 2), (1.0, 10.6, 2), (1.0, 10.7, 3), (2.0, 999.0, 4)]
)
def test_as_many_events_are_added_as_there_is_time_for(monkeypatch, took, left, added):
    """Each makes a program take 2.2 times as long; two at least where the last one's time is left."""
    order = list(range(25))
    built: list[list[int]] = []
    monkeypatch.setattr(
        refine_module, "build_cuts", lambda model, cuts, **named: built.append(list(cuts)) or build_cuts(model, cuts, **named)
    )
    Engine(monkeypatch, 0.0, 0.0)
    # Asked before the round, after its relaxation, at the begin of the program, at its end, and then for what is left.
    clock = iter([left + took] * 3 + [left] * 2)
    refine(FakeSearch({}, [order, []]), Problem(unit_chain(12), 7), [3], left=lambda: next(clock, left))
    assert [len(cuts) for cuts in built] == [1, 1 + added][: 2 if added else 1]


def test_a_solution_that_time_cut_short_adds_no_events(monkeypatch):
    """It may break the budget where the optimum does not."""
    Engine(monkeypatch, 0.0, finished=False)
    order = list(range(13))
    assert refine(FakeSearch({}, [order]), Problem(unit_chain(6), 5), [3]) == ([3], [(0.0, True)], [order])


@pytest.mark.parametrize(("known", "programs"), [(0.5, 2), (0.51, 1)])
def test_a_program_that_proves_less_than_is_known_is_the_last(monkeypatch, known, programs):
    """Relaxations of more events prove more than integers of few; its plan is offered all the same."""
    engine = Engine(monkeypatch, 0.5, 0.5)
    order = list(range(13))
    offered = refine(FakeSearch({}, [order, []]), Problem(unit_chain(6), 5), [3], known=known)[2]
    assert len(engine.programs) == programs
    assert offered == [order]


@pytest.mark.usefixtures("two_at_a_time")
def test_on_a_long_chain_added_events_lie_further_apart(monkeypatch):
    """Neighbours of a peak prove what the peak does."""
    problem, order = Problem(unit_chain(70), 60), list(range(141))
    held = first_bytes(problem.graph, order)
    peak = max(order, key=lambda o: (held[o], -o))
    left = iter([1.0] * 5)
    Engine(monkeypatch, 0.0)
    cuts, _, _ = refine(FakeSearch({}, [order]), problem, [0], left=lambda: next(left, 0.0))
    assert len(order) // PARAMETERS.added_spacing == 2
    assert cuts == [0, peak - 3, peak]


def test_all_events_are_one_chain_and_every_op_of_it_that_breaks_the_budget_is_among_them(monkeypatch):
    """The longest chain, or any targets in their order, as far as they are comparable with the first events."""
    added = 0
    for seed in range(120):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        graph = problem.graph
        order = random_first_computations(rng, problem)
        targets = tuple(order) if rng.random() < 0.5 else None
        model = CutModel(problem, targets)
        first = some_chain(rng, model)[:2]
        Engine(monkeypatch, *[0.0] * 20)
        cuts, proven, _ = refine(FakeSearch({}, [order] * 20), problem, first, targets=targets)
        assert set(first) <= set(cuts)
        assert all(model.sides(b)[0][a] for a, b in pairwise(cuts)), (seed, cuts)
        if math.inf in [bound for bound, _ in proven]:
            continue
        held = first_bytes(graph, order)
        broken = {o for o in (targets or longest_chain(model)) if held[o] > problem.budget_bytes}
        assert set(cuts) - set(first) <= broken
        assert not [o for o in broken - set(cuts) if all(model.comparable(o, c) for c in cuts)], seed
        added += len(cuts) - len(set(first))
    assert added > 50


def random_first_computations(rng: random.Random, problem: Problem) -> list[int]:
    """Every op once, in some order that the DAG allows."""
    above = strict_ancestors(problem)
    order: list[int] = []
    while ready := [o for o in range(len(problem.graph.ops)) if o not in order and above[o] <= set(order)]:
        order.append(rng.choice(ready))
    return order


def test_a_tight_chain_stays_within_five_per_cent():
    """Unit chains are what single cuts are bad at; integer programs over several events do better."""
    count = 17
    edges = [(i, i + 1) for i in range(count - 1)] + [(i, count - 1 - i) for i in range(count // 2)]
    graph = Graph.from_dag(cost=[1] * count, size_bytes=[1] * count, edges=edges, backward=[i > 8 for i in range(count)])
    result = solve(Problem(graph, 6), limits=Limits(time_s=30, gap=0.0))
    assert result.gap <= 0.05
    assert simulate(graph, result.plan).peak_bytes <= 6
