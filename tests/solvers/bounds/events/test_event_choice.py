"""Choice of events for refinement, and what quick bounds prove of them."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given

from checkmate import Graph, Op, Plan, Problem, Value
from checkmate.core.plan import Compute
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import build_cuts
from checkmate.solvers.bounds.events.min_cut import single_event
from checkmate.solvers.bounds.events.refine import (
    chain_of,
    first_bytes,
    highest_events,
    longest_chain,
    promising_events,
    quick_bound,
    single_cuts,
)
from checkmate.solvers.clocks import no_alarm
from tests.oracle import naive_bytes
from tests.solvers.bounds.events.test_event_cuts import linear_bound, some_chain, some_targets, tight_problem
from tests.solvers.bounds.proof import strict_ancestors
from tests.solvers.chains import unit_chain
from tests.strategies import graphs_and_orders


def chain_graph(sizes: list[int], *, loss: int | None = None) -> Graph:
    """Ops in a row; only neighbours read each other, and all values are kept."""
    return Graph(
        tuple(Op(f"f{o}", (o - 1,) if o else (), (o,), 1, phase="loss" if o == loss else "forward") for o in range(len(sizes))),
        tuple(Value(f"v{o}", size) for o, size in enumerate(sizes)),
    )


@given(graphs_and_orders())
def test_first_bytes_are_those_of_the_first_computations(drawn):
    """Later computations of an op have a memory of their own."""
    graph, order = drawn
    plan = Plan.from_order(graph, order)
    held = naive_bytes(graph, plan)
    steps = {o: plan.steps.index(Compute(o)) for o in order}
    assert first_bytes(graph, order) == {o: held[p] for o, p in steps.items()}


@pytest.mark.parametrize("count", [5, 111, 112, 120, 170])
def test_highest_events_are_the_fullest_ops_that_lie_apart(count):
    """Of two that are too close the fuller is taken, of two that are as full the first; only the number leaves others out."""
    rng = random.Random(count)
    graph = chain_graph([rng.randint(1, 9) for _ in range(count)])
    held = first_bytes(graph, range(count))
    by_bytes = sorted(held, key=lambda o: (-held[o], o))
    apart = max(1, count // 56)
    for most in (1, 4, count):
        chosen = highest_events(graph, most, range(count))
        assert chosen == [o for o in by_bytes if o in chosen][:most]
        assert all(abs(a - b) > apart for i, a in enumerate(chosen) for b in chosen[:i])
        seen = by_bytes if len(chosen) < most else by_bytes[: by_bytes.index(chosen[-1])]
        for o in set(seen) - set(chosen):
            assert any(abs(o - c) <= apart for c in chosen if by_bytes.index(c) < by_bytes.index(o))


def test_promising_events_are_losses_and_the_peaks_of_every_order():
    """A training step holds most before its loss."""
    graph = chain_graph([1, 5, 2, 7, 3, 9, 4], loss=3)
    orders = [list(range(7)), [*range(7), 0, 1]]
    peaks = [o for order in orders for o in highest_events(graph, 7, order)]
    assert promising_events(graph, iter(orders)) == list(dict.fromkeys([3, *peaks]))
    assert promising_events(graph, []) == [3]


def test_a_longest_chain_is_a_longest_path_without_the_end():
    """Each op is a parent of the next, and no path has more ops."""
    for seed in range(80):
        problem = tight_problem(random.Random(seed))
        model = CutModel(problem)
        chain = longest_chain(model)
        assert all(a in model.parents[b] for a, b in pairwise(chain))
        above = strict_ancestors(problem)
        longest: list[int] = []
        for o in range(model.end):
            longest.append(1 + max((longest[a] for a in above[o]), default=0))
        assert len(chain) == max(longest)
        assert model.end not in chain


def test_of_two_longest_chains_the_first_is_taken():
    """Ties break by index, so that a seed gives the same plan everywhere."""
    diamonds = Graph.from_dag(
        cost=[1] * 7, size_bytes=[1] * 7, edges=[(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5)], kept=[4, 5, 6]
    )
    assert longest_chain(CutModel(Problem(diamonds, 9))) == [0, 1, 3, 4]
    assert longest_chain(CutModel(Problem(Graph((), ()), 9))) == []


def test_single_cuts_prove_each_bound_that_is_better_than_those_before():
    """And return the event with the best; each says whether it holds for any order."""
    infinite = 0
    for seed in range(30):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        model = CutModel(problem, some_targets(rng, problem))
        candidates = rng.sample(range(model.end), rng.randint(1, model.end))
        proven: list[tuple[float, bool]] = []
        best = single_cuts(
            model, candidates, lambda bound, any_order, proven=proven: proven.append((bound, any_order)), lambda: False
        )
        expected: list[tuple[float, bool]] = []
        event = None
        for candidate in candidates:
            bound = single_event(model, candidate, no_alarm())
            if not expected or bound > expected[-1][0]:
                expected.append((bound, model.any_order([candidate])))
                event = candidate
            if bound == math.inf:
                infinite += 1
                break
        assert (best, proven) == (event, expected), seed
    assert infinite


def test_single_cuts_stop_when_time_is_up():
    """After the first candidate at the earliest: one bound is better than none."""
    model = CutModel(Problem(unit_chain(6), 5))
    proven: list[float] = []
    assert single_cuts(model, [6, 5], lambda bound, _: proven.append(bound), lambda: True) == 6
    assert len(proven) == 1
    assert single_cuts(model, [], lambda bound, _: proven.append(bound), lambda: False) is None
    assert len(proven) == 1


def test_an_event_that_is_impossible_alone_ends_the_search():
    """Nothing can be proven beyond that there is no plan."""
    model = CutModel(Problem(chain_graph([1, 5, 5, 1]), 9))
    asked: list[bool] = []
    proven: list[tuple[float, bool]] = []
    best = single_cuts(model, [0, 2, 3], lambda *proof: proven.append(proof), lambda: bool(asked.append(True)))
    assert best == 2
    assert proven[-1] == (math.inf, True)
    assert len(asked) == 1


def test_the_quick_bound_is_the_better_of_two_and_says_if_floating_ops_pay():
    """With them the bound can only be sharper, but a program that is larger for nothing costs time."""
    seen = set()
    for seed in range(80):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        model = CutModel(problem)
        cuts = some_chain(rng, model)
        if build_cuts(model, cuts).impossible:
            continue
        without, with_them = (linear_bound(build_cuts(model, cuts, floating=floating)) for floating in (False, True))
        bound, floating = quick_bound(model, cuts)
        assert bound == max(without, with_them)
        assert floating is (with_them > without + 1e-5)
        seen.add(floating)
    assert seen == {True, False}


def test_a_chain_takes_each_event_that_is_comparable_with_those_before():
    """So the first events, which promise most, are in it; it is sorted, as indices follow the DAG."""
    for seed in range(80):
        rng = random.Random(seed)
        problem = tight_problem(rng)
        model = CutModel(problem)
        events = [rng.randrange(model.end) for _ in range(2 * model.end)]
        chain = chain_of(model, iter(events))
        assert chain == sorted(set(chain))
        assert events[0] in chain
        taken: list[int] = []
        for event in events:
            if event in chain:
                taken.append(event)
            else:
                assert not all(model.comparable(event, other) for other in taken)
        assert all(model.comparable(a, b) for a in chain for b in chain)
