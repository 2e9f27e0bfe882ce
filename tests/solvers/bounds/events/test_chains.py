"""Chains of events: segments add up, the longest path is the best of them, and nothing exceeds the cost of a plan."""

from __future__ import annotations

import math
import random
from functools import cache
from itertools import combinations, pairwise

import numpy as np
import pytest
from msgspec import structs
from scipy.signal import find_peaks

from checkmate import BruteForce, Graph, Plan, Problem, Result, simulate, solve
from checkmate.solvers.backends.highs import solve_linear
from checkmate.solvers.bounds.events.chains import EventChains, peaks
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import build_cuts
from checkmate.solvers.bounds.events.min_cut import segment, single_event
from checkmate.solvers.bounds.events.refine import Chain, longest_chain
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.clocks import no_alarm
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
    for seed in range(250):
        rng, small = random.Random(seed), seed % 5 < 3
        problem = tight_problem(rng, training=0.9, most_ops=(6, 7)) if small else tight_chain(rng)
        result = solve(problem, BruteForce(max_ops=13), raise_on_failure=False)
        if isinstance(result, Result) and result.gap == 0:
            found.append((seed, problem, result))
    return found


def sum_of_segments(model: CutModel, events: list[int]) -> float:
    return sum(segment(model, a, b, no_alarm()) for a, b in pairwise([*events, model.end]))


@pytest.mark.slow
def test_segments_of_a_chain_add_up_to_no_more_than_an_optimal_plan():
    """Of any chain; and a segment to the end is the bound of its event."""
    several = above_one_event = 0
    for seed, problem, result in solved():
        model = CutModel(problem)
        optimum = (result.cost - problem.graph.cost) / max(1, problem.graph.cost)
        for k in range(2):
            events = some_chain(random.Random(f"{seed} {k}"), model)
            bound = sum_of_segments(model, events)
            assert bound <= optimum + 1e-9, (seed, events)
            alone = [single_event(model, o, no_alarm()) for o in events]
            assert segment(model, events[-1], model.end, no_alarm()) == alone[-1]
            several += len(events) > 2
            above_one_event += bound > max(alone) + 1e-6
    assert several > 25
    assert above_one_event > 1


def test_what_is_needed_after_the_second_event_does_not_count():
    """A segment ends when its second event begins: of a chain whose values all have to be made again only those up to it."""
    for seed in range(60):
        problem = tight_chain(random.Random(seed))
        model = CutModel(problem)
        for a, b in combinations(some_chain(random.Random(seed), model), 2):
            assert segment(model, a, b, no_alarm()) <= single_event(model, a, no_alarm()) + 1e-9


def test_the_longest_chain_is_the_best_of_all_chains_of_candidates():
    for seed in range(60):
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
    assert found.sharpen(events, proven.append, lambda: 1.0, lambda: 0.0) == Chain(events, found.candidates)
    assert not proven


def test_candidates_stand_out_from_their_neighbours():
    """On the longest chain, in its order; those beside it, in the order of the graph, only where one of them proves more."""
    beside = 0
    for seed in range(200):
        model = CutModel(tight_problem(random.Random(seed), most_ops=(12,)))
        chain = longest_chain(model)
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
    assert beside > 2


@pytest.mark.slow
def test_programs_of_more_events_prove_no_more_than_a_plan_costs():
    """Few of the dearest events prove nearly as much as all that were tried, in the order of the chain."""
    grown = 0
    for seed, problem, result in solved():
        model = CutModel(problem)
        found = EventChains(model, no_alarm())
        _, events = found.longest(lambda: False)
        if not events:
            continue
        proven: list[float] = []
        first, peaks, prices = found.sharpen(events, proven.append, lambda: math.inf, lambda: math.inf)
        optimum = (result.cost - problem.graph.cost) / max(1, problem.graph.cost)
        assert max(proven) <= optimum + 1e-6, seed
        assert first == [o for o in found.candidates if o in first]
        assert peaks == found.candidates
        assert all(prices[a] >= prices[b] for a in first for b in set(prices) - set(first))
        enough = solve_linear(build_cuts(model, first, all_segments=True).program).bound
        assert enough >= 0.99 * max(proven) - 1e-9, seed
        grown += len(first) > 1
    assert grown > 2


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


def test_peaks_are_those_of_scipy():
    """With plateaus, ties and edges; scipy.signal itself takes a second of each process."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        heights = draw.integers(0, draw.integers(2, 8), size=draw.integers(1, 40)).astype(float)
        positions, properties = find_peaks(heights, prominence=0.0)
        assert peaks(heights) == dict(zip(positions.tolist(), properties["prominences"].tolist(), strict=True))
