"""Chains of events: segments add up, the longest path is the best of them, and nothing exceeds the cost of a plan."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from msgspec import structs

from checkmate import BruteForce, Graph, Plan, Problem, Result, simulate, solve
from checkmate.solvers.alarm import no_alarm
from checkmate.solvers.backends import highs
from checkmate.solvers.backends.highs import solve_linear
from checkmate.solvers.backends.program import Solved
from checkmate.solvers.bounds.events import chains
from checkmate.solvers.bounds.events.chains import ChainParameters, EventChains
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import CutProgram, build_cuts
from checkmate.solvers.bounds.events.min_cut import segment, single_event
from checkmate.solvers.bounds.floor import floor
from tests.solvers.bounds.events.test_event_cuts import some_chain, tight_problem
from tests.solvers.chains import uneven_chain


def tight_chain(rng: random.Random) -> Problem:
    """A training chain, some of whose ops run once, at a budget of little more than the smallest."""
    graph = uneven_chain(rng, rng.randint(4, 6))
    ops = [structs.replace(op, recomputable=op.phase == "forward" and rng.random() < 0.95) for op in graph.ops]
    graph = structs.replace(graph, ops=tuple(ops))
    own = simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
    low = min(floor(graph).peak_bytes, own)
    return Problem(graph, rng.randint(low, (2 * low + own) // 3), recompute=rng.choice(["all", "forward"]))


@cache
def solved() -> list[tuple[int, Problem, Result]]:
    """Problems and their optima: small graphs of any kind, with replay states, and longer chains without."""
    found: list[tuple[int, Problem, Result]] = []
    for seed in range(500):
        rng, small = random.Random(seed), seed % 5 < 3
        problem = tight_problem(rng, training=0.9, most_ops=(6, 7)) if small else tight_chain(rng)
        result = solve(problem, BruteForce(max_ops=13), raise_on_failure=False)
        if isinstance(result, Result) and result.gap == 0:
            found.append((seed, problem, result))
    return found


def sum_of_segments(model: CutModel, events: list[int]) -> float:
    return sum(segment(model, a, b, no_alarm()) for a, b in pairwise([*events, model.end]))


def test_segments_of_a_chain_add_up_to_no_more_than_an_optimal_plan():
    """Of any chain; and a segment to the end is the bound of its event."""
    several = above_one_event = 0
    for seed, problem, result in solved():
        model = CutModel(problem)
        optimum = (result.cost - problem.graph.cost) / max(1, problem.graph.cost)
        for k in range(3):
            events = some_chain(random.Random(f"{seed} {k}"), model)
            bound = sum_of_segments(model, events)
            assert bound <= optimum + 1e-9, (seed, events)
            alone = [single_event(model, o, no_alarm()) for o in events]
            assert segment(model, events[-1], model.end, no_alarm()) == alone[-1]
            several += len(events) > 2
            above_one_event += bound > max(alone) + 1e-6
    assert several > 100
    assert above_one_event > 10


def test_what_is_needed_after_the_second_event_does_not_count():
    """A segment ends when its second event begins: of a chain whose values all have to be made again only those up to it."""
    for seed in range(60):
        problem = tight_chain(random.Random(seed))
        model = CutModel(problem)
        for a, b in combinations(some_chain(random.Random(seed), model), 2):
            assert segment(model, a, b, no_alarm()) <= single_event(model, a, no_alarm()) + 1e-9


def test_the_longest_chain_is_the_best_of_all_chains_of_candidates():
    for seed in range(150):
        problem = tight_chain(random.Random(seed))
        model = CutModel(problem)
        found = EventChains(model, no_alarm())
        bound, events = found.longest(lambda: False)
        assert events == [o for o in found.candidates if o in events]
        best = max(
            (sum_of_segments(model, list(some)) for n in range(1, 4) for some in combinations(found.candidates, n)), default=0.0
        )
        assert bound >= best - 1e-9
        if events:
            assert bound == pytest.approx(sum_of_segments(model, events))
        else:
            assert bound == best == 0.0


def test_without_time_there_is_no_chain():
    model = CutModel(tight_chain(random.Random(3)))
    found = EventChains(model, no_alarm())
    assert found.candidates
    highest = max(single_event(model, o, no_alarm()) for o in found.candidates)
    assert found.longest(lambda: True) == (highest, [])
    proven: list[float] = []
    events = found.candidates[:1]
    assert found.sharpen(events, proven.append, lambda: 1.0, lambda: 0.0) == chains.Chain(events, found.candidates)
    assert not proven


def test_candidates_stand_out_from_their_neighbours():
    """On the longest chain, in its order; those beside it, in the order of the graph, only where one of them proves more."""
    beside = 0
    for seed in range(400):
        model = CutModel(tight_problem(random.Random(seed), most_ops=(12,)))
        chain = chains.longest_chain(model)
        others = [o for o in range(model.end) if o not in chain]
        alone = {o: single_event(model, o, no_alarm()) for o in range(model.end)}
        found = EventChains(model, no_alarm())
        for o in found.candidates:
            line = chain if o in chain else others
            k = line.index(o)
            near = [alone[line[n]] for n in (k - 1, k + 1) if 0 <= n < len(line)]
            assert alone[o] >= max(near, default=0.0)
            assert alone[o] > 0
        more = max((alone[o] for o in others), default=0.0) > max(alone[o] for o in chain)
        assert more == any(o in others for o in found.candidates)
        beside += more
        bound, events = found.longest(lambda: False)
        assert all(model.comparable(a, b) for a, b in combinations(events, 2))
        assert bound >= max(alone[o] for o in (*chain, *(others if more else ()))) - 1e-12
    assert beside > 5


def test_programs_of_more_events_prove_more_and_no_more_than_a_plan_costs(monkeypatch):
    """Each is of the chain before and the most prominent candidates after its first event."""
    monkeypatch.setattr(chains, "PARAMETERS", ChainParameters(added=1))
    fewer = grown = 0
    for seed, problem, result in solved():
        model = CutModel(problem)
        found = EventChains(model, no_alarm())
        _, events = found.longest(lambda: False)
        if not events:
            continue
        proven: list[float] = []
        first, peaks, _ = found.sharpen(events, proven.append, lambda: math.inf, lambda: math.inf)
        optimum = (result.cost - problem.graph.cost) / max(1, problem.graph.cost)
        assert max(proven) <= optimum + 1e-6, seed
        after = found.candidates[found.candidates.index(events[0]) :]
        assert len(proven) == 1 + len(set(after) - set(events))
        assert first == [o for o in after if o in first]
        assert peaks == found.candidates
        enough = solve_linear(build_cuts(model, first, segments="all").program).bound
        assert enough >= 0.99 * max(proven) - 1e-9, seed
        fewer += len(first) < len(after)
        grown += len(first) > 1
    assert fewer > 5
    assert grown > 10


def test_the_dearest_events_come_first(monkeypatch):
    """By the prices of their memory in the program that proved most, and no more of them than prove nearly as much."""
    graph = uneven_chain(random.Random(0), 20)
    model = CutModel(Problem(graph, floor(graph).peak_bytes + 3))
    found = EventChains(model, no_alarm())
    start, prices = found.candidates[0], {found.candidates[k]: price for k, price in enumerate((5.0, 0.0, 7.0))}
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        chains, "build_cuts", lambda model, cuts, **named: asked.append(tuple(cuts)) or build_cuts(model, cuts, **named)
    )

    def solve(program, *, time_s):
        """The bound is the sum of the prices, in thousandths."""
        known = {o: prices.get(o, 0.0) for o in asked[-1]}
        rows = np.zeros(len(program.row_low))
        rows[build_cuts(model, asked[-1], segments="all").memory_rows] = [-price for price in known.values()]
        return Solved(sum(known.values()) / 1000, None, 0.0, True, row_prices=rows)

    monkeypatch.setattr(highs, "solve_linear", solve)
    assert found.sharpen([start], lambda _: None, lambda: math.inf, lambda: math.inf).first == [
        found.candidates[0],
        found.candidates[2],
    ]
    monkeypatch.setattr(chains, "PARAMETERS", ChainParameters(enough=0.5))
    assert found.sharpen([start], lambda _: None, lambda: math.inf, lambda: math.inf).first == [found.candidates[2]]


def priced_programs(monkeypatch, prices: dict[int, float], bound: Callable[[tuple[int, ...]], float]) -> list[tuple[int, ...]]:
    """Relaxations with given prices of events and bounds of chains; returns the chains that are asked for."""
    asked: list[tuple[int, ...]] = []

    def relaxed(cut: CutProgram, **_: float) -> Solved:
        asked.append(cut.cuts)
        rows = np.zeros(len(cut.program.row_low))
        rows[cut.memory_rows] = [-prices.get(o, 0.0) for o in cut.cuts]
        return Solved(bound(cut.cuts), None, math.inf, True, row_prices=rows)

    monkeypatch.setattr(chains, "relax", relaxed)
    return asked


def long_chain() -> tuple[EventChains, list[int]]:
    """Candidates of an uneven chain, and those after the first by how they stand out."""
    graph = uneven_chain(random.Random(0), 20)
    found = EventChains(CutModel(Problem(graph, floor(graph).peak_bytes + 3)), no_alarm())
    return found, sorted(found.candidates[1:], key=lambda o: (-found._prominence[o], o))


def test_events_that_do_not_bind_are_left_out_and_not_tried_again(monkeypatch):
    """The next program has those with a price and the next three."""
    found, others = long_chain()
    start = found.candidates[0]
    prices = dict.fromkeys(found.candidates, 1.0) | {others[1]: 0.0, others[2]: 0.002}
    asked = priced_programs(monkeypatch, prices, lambda cuts: 0.1 * len(cuts))
    found.sharpen([start], lambda _: None, lambda: math.inf, lambda: math.inf)
    assert asked[0] == (start,)
    assert set(asked[1]) == {start, *others[:3]}
    assert set(asked[2]) == {start, others[0], *others[3:6]}
    assert all(not {others[1], others[2]} & set(cuts) for cuts in asked[2:])


@pytest.mark.parametrize(("gain", "programs"), [(0.019, 2), (0.021, 3)])
def test_more_events_are_added_while_they_gain(monkeypatch, gain, programs):
    """A share of the distance to the best plan, here 1."""
    found, _ = long_chain()
    proven = iter([0.5, 0.5 + 0.5 * gain, 0.5 + 0.5 * gain])
    asked = priced_programs(monkeypatch, dict.fromkeys(found.candidates, 1.0), lambda _: next(proven, 0.5))
    monkeypatch.setattr(EventChains, "_fewest", lambda *_: chains.Chain([]))
    found.sharpen([found.candidates[0]], lambda _: None, lambda: 1.0, lambda: math.inf)
    assert len(asked) == programs


@pytest.mark.parametrize(("known", "programs"), [(0.5, 2), (0.54, 2), (0.56, 1)])
def test_no_more_events_are_added_far_below_what_is_known(monkeypatch, known, programs):
    """Such as by branches: a tenth of the distance from there to the best plan, here 0.05, is not made up for."""
    found, _ = long_chain()
    asked = priced_programs(monkeypatch, dict.fromkeys(found.candidates, 1.0), lambda _: 0.5)
    monkeypatch.setattr(EventChains, "_fewest", lambda *_: chains.Chain([]))
    found.sharpen([found.candidates[0]], lambda _: None, lambda: 1.0, lambda: math.inf, lambda: known)
    assert len(asked) == programs


@pytest.mark.parametrize(("best", "programs"), [(0.5, 1), (0.51, 2)])
def test_no_events_are_added_where_the_best_plan_is_met(monkeypatch, best, programs):
    found, _ = long_chain()
    asked = priced_programs(monkeypatch, dict.fromkeys(found.candidates, 1.0), lambda _: 0.5)
    monkeypatch.setattr(EventChains, "_fewest", lambda *_: chains.Chain([]))
    found.sharpen([found.candidates[0]], lambda _: None, lambda: best, lambda: math.inf)
    assert len(asked) == programs


def test_cheap_events_are_not_in_the_first_integer_program(monkeypatch):
    found, _ = long_chain()
    a, b, c, d = found.candidates[:4]
    prices = {a: 90.0, b: 6.0, c: 2.5, d: 0.9}
    priced_programs(monkeypatch, prices, lambda cuts: 0.1 * len(cuts))
    assert found._fewest(prices, 0.4, lambda: math.inf) == chains.Chain([a, b], found.candidates, prices)
    assert found._fewest(prices, 0.2, lambda: math.inf).first == [a, b]
    assert found._fewest(prices, 0.1, lambda: math.inf).first == [a]


def test_no_program_is_begun_in_less_time_than_the_last_one_took(monkeypatch):
    """One of more events takes longer."""
    found, _ = long_chain()
    monkeypatch.setattr(EventChains, "_fewest", lambda *_: chains.Chain([]))
    for left, programs in ((5.1, 2), (4.9, 1)):
        clock = iter([0.0, 5.0, 5.0, 15.0, 15.0, 15.0])
        monkeypatch.setattr(chains.time, "monotonic", lambda clock=clock: next(clock))
        asked = priced_programs(monkeypatch, dict.fromkeys(found.candidates, 1.0), lambda cuts: 0.1 * len(cuts))
        left_s = left / chains.PARAMETERS.linear_share
        found.sharpen([found.candidates[0]], lambda _: None, lambda: 1.0, lambda left_s=left_s: left_s)
        assert len(asked) == programs


def two_peaks() -> Problem:
    """A training chain whose early values are large."""
    layers, early = 16, 6
    size = [4] * early + [1] * (layers - early)
    count = 2 * layers + 1
    edges = {(i, i + 1) for i in range(count - 1)} | {(i, count - 1 - i) for i in range(layers)}
    return Problem(Graph.from_dag(cost=[1] * count, size_bytes=[*size, 1, *size[::-1]], edges=sorted(edges)), 13)


def test_two_events_bind_where_early_values_are_large():
    """After the loss all layers are computed again; the early ones once more, since too few of their values fit later."""
    layers, problem = 16, two_peaks()
    model = CutModel(problem)
    found = EventChains(model, no_alarm())
    bound, events = found.longest(lambda: False)
    alone = max(single_event(model, o, no_alarm()) for o in found.candidates)
    proven: list[float] = []
    some = found.sharpen(events, proven.append, lambda: math.inf, lambda: math.inf)
    assert (events, found.candidates) == (some.first, some.peaks)
    assert events == [layers + 1, 27]
    assert bound == pytest.approx(0.2121, abs=1e-4)
    assert alone == pytest.approx(0.1742, abs=1e-4)
    assert proven == [pytest.approx(0.2242, abs=1e-4)]
