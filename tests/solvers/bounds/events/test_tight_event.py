"""Branches of the tightest event: they hold all plans, and what each proves is below the cost of each of its own."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from msgspec import structs

from checkmate import AStar, BruteForce, Graph, Op, Plan, Problem, Result, Value, simulate, solve
from checkmate.core.plan import Compute
from checkmate.solvers.alarm import no_alarm
from checkmate.solvers.backends import highs
from checkmate.solvers.backends.program import Solved
from checkmate.solvers.bounds.events import tight_event
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.min_cut import single_event
from checkmate.solvers.bounds.events.tight_event import Branch, TightEvent, TightEventParameters
from checkmate.solvers.bounds.floor import floor
from tests.solvers.bounds.events.test_event_cuts import tight_problem
from tests.solvers.chains import uneven_chain


def all_branches(
    tight: TightEvent, best: float = math.inf, seconds: float = math.inf, more: Iterable[int] = ()
) -> tuple[float, list[Branch]]:
    """The best bound that is proven, -1 if there is none, and the branches."""
    proven = [-1.0]
    branches = tight.bound(proven.append, lambda: best, lambda: seconds, list(more))
    assert proven == sorted(proven)
    return proven[-1], branches


def live_at(graph: Graph, plan: Plan, event: int) -> set[int]:
    """Values that are live while an op is computed for the first time."""
    step = plan.steps.index(Compute(event))
    return {resident.value for resident in simulate(graph, plan).live(step)}


@pytest.fixture
def every_branch(monkeypatch):
    """Each branch has a program and none is given up, so that small graphs reach all of the code."""
    monkeypatch.setattr(tight_event, "PARAMETERS", TightEventParameters(wide_share=1.0, least_gain=-math.inf))


def holds(tight: TightEvent, branch: Branch, live: set[int]) -> bool:
    """Whether the larger values that are live are one from each interval of a branch."""
    if len(live) != len(branch.intervals):
        return False
    if not live:
        return True
    start, stop = branch.intervals[0]
    rest = Branch(branch.bound, branch.intervals[1:], branch.events)
    return any(holds(tight, rest, live - {v}) for v in live & set(tight.values[start:stop].tolist()))


def tight_chain(rng: random.Random) -> Problem:
    """A training chain, some of whose ops run once, at a budget of little more than the smallest."""
    graph = uneven_chain(rng, rng.randint(4, 6))
    ops = [structs.replace(op, recomputable=op.phase == "forward" and rng.random() < 0.95) for op in graph.ops]
    graph = structs.replace(graph, ops=tuple(ops))
    own = simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes
    low = min(floor(graph).peak_bytes, own)
    return Problem(graph, rng.randint(low, (2 * low + own) // 3), recompute=rng.choice(["all", "forward"]))


def solved(seeds: Iterable[int] = range(500)) -> Iterator[tuple[int, Problem, Result]]:
    """Problems and their optima: small graphs of any kind, with replay states, and longer chains without."""
    for seed in seeds:
        rng, small = random.Random(seed), seed % 5 < 3
        problem = tight_problem(rng, training=0.9, most_ops=(6, 7)) if small else tight_chain(rng)
        result = solve(problem, BruteForce() if small else AStar(), raise_on_failure=False)
        if isinstance(result, Result) and result.gap == 0:
            yield seed, problem, result


def compared(seeds: Iterable[int]) -> Counter[str]:
    """Compare every event's branches with an optimal plan: its own branch proves no more than its cost.

    Args:
        seeds: Seeds of the problems.

    Returns:
        Events that were divided, of those the ones with several live values, with replay states, and proven above one event.
    """
    count: Counter[str] = Counter()
    for seed, problem, result in solved(seeds):
        graph = problem.graph
        model = CutModel(problem)
        optimum = (result.cost - graph.cost) / max(1, graph.cost)
        more = random.Random(seed).sample(range(model.end), min(3, model.end))
        for event in range(model.end):
            tight = TightEvent(model, event)
            if not tight.divides:
                continue
            proven, branches = all_branches(tight, more=more)
            assert proven <= optimum + 1e-6, (seed, event)
            live = live_at(graph, result.plan, event) & set(tight.values.tolist())
            own = [branch.bound for branch in branches if holds(tight, branch, live)]
            assert own, (seed, event)
            assert min(own) <= optimum + 1e-6, (seed, event)
            count["divided"] += 1
            count["several"] += tight.most > 1
            count["states"] += any(op.replay_bytes for op in graph.ops)
            count["above one event"] += proven > single_event(model, event, no_alarm()) + 1e-4
    return count


def test_no_plan_costs_less_and_each_is_in_a_branch(every_branch):
    """Of every event of random problems near the smallest budget."""
    count = compared(range(500))
    assert count["divided"] > 400
    assert count["several"] > 50
    assert count["states"] > 30
    assert count["above one event"] > 50


def test_the_solution_of_a_branch_holds_the_values_of_its_intervals():
    """And no other of the larger values: a start for a search."""
    problem, event = dropout_chain(0)
    tight = TightEvent(CutModel(problem), event)
    count = len(tight.values)
    assert count > 3
    for intervals in (((0, 1), (2, 3)), ((1, 3),), ((0, count),), ()):
        cut, point = tight.solution(Branch(0.0, intervals, ()))
        assert cut.cuts == (event,)
        held = {int(v) for k, v in enumerate(tight.values) if any(start <= k < stop for start, stop in intervals)}
        assert point.sum() == len(held)
        assert set(np.flatnonzero(np.isin(cut.live[0], np.flatnonzero(point))).tolist()) == held


def test_the_widest_interval_is_divided_first_and_single_values_are_not():
    assert Branch(0.0, ((5, 7), (8, 12), (20, 21)), ()).widest == 1
    assert Branch(0.0, ((0, 3), (40, 42)), ()).widest == 0
    assert Branch(0.0, ((0, 3), (40, 43)), ()).widest == 0
    assert Branch(0.0, ((0, 1), (40, 41)), ()).widest is None


@pytest.mark.slow
def test_ten_thousand_problems(every_branch):
    """The same of 10,000; a failure names its seed."""
    assert compared(range(500, 10_500))["above one event"] > 1000


def dropout_chain(states: int) -> tuple[Problem, int]:
    """Six layers with random ops and a loss beside which two of their values fit, and its op.

    Args:
        states: Bytes of each op's replay state.
    """
    layers = 6
    ops = [Op(f"f{i}", (i - 1,) if i else (), (i,), 10, replay_bytes=states, phase="forward") for i in range(layers)] + [
        Op("loss", (layers - 1,), (layers,), 1, phase="loss")
    ]
    values = [Value(f"v{i}", 40) for i in range(layers)] + [Value("loss", 100)]
    for i in reversed(range(layers)):
        ops.append(Op(f"g{i}", (i, len(values) - 1), (len(values),), 20, phase="backward"))
        values.append(Value(f"d{i}", 40))
    return Problem(Graph(tuple(ops), tuple(values)), 40 + 100 + 85, recompute="forward"), layers


def test_states_that_are_held_leave_room_for_fewer_values(every_branch):
    """Two values and the states of the layers between them do not fit together, where without states they do."""
    proven: dict[int, float] = {}
    for states in (0, 2, 10):
        problem, loss = dropout_chain(states)
        tight = TightEvent(CutModel(problem), loss)
        assert tight.most == 2
        proven[states], branches = all_branches(tight)
        assert any(math.isinf(b.bound) for b in branches if len(b.intervals) == 2) is (states > 0)
    assert proven[0] <= proven[2] <= proven[10]
    assert proven[0] < proven[10]


def test_where_all_values_fit_there_is_nothing_to_divide():
    """Or none, but then neither does the event."""
    problem, loss = dropout_chain(0)
    for budget, divides in ((140 + 5 * 40, False), (140 + 39, True), (139, False)):
        model = CutModel(problem.replace_budget(budget))
        assert TightEvent(model, loss).divides is divides
    last = len(problem.graph.ops) - 1
    assert not TightEvent(CutModel(problem), last).divides  # no op comes after it


def test_without_time_the_branches_still_hold_all_plans(every_branch):
    problem, loss = dropout_chain(0)
    tight = TightEvent(CutModel(problem), loss)
    proven, branches = all_branches(tight, seconds=0.0)
    assert [b.intervals for b in sorted(branches, key=lambda b: len(b.intervals))] == [(), ((0, 5),), ((0, 5), (0, 5))]
    assert proven <= all_branches(tight)[0]


def test_branches_whose_programs_time_cut_short_prove_what_the_event_does(every_branch, monkeypatch):
    """Such a program proves less than nothing."""
    problem, loss = dropout_chain(0)
    model = CutModel(problem)
    monkeypatch.setattr(highs, "solve_linear", lambda program, *, time_s: Solved(-math.inf, None, math.inf, False))
    branches = all_branches(TightEvent(model, loss))[1]
    assert {branch.bound for branch in branches} == {single_event(model, loss, no_alarm())}


def test_branches_that_time_cut_short_go_on(every_branch):
    """In whatever parts they have their time, they prove the same in the end, and each bound once."""
    problem, loss = dropout_chain(0)
    whole, branches = all_branches(TightEvent(CutModel(problem), loss))
    tight = TightEvent(CutModel(problem), loss)
    proven: list[float] = []
    some = iter([1.0] * 3)
    tight.bound(proven.append, lambda: math.inf, lambda: next(some, 0.0))
    begun = list(proven)
    for _ in range(100):
        left = iter([1.0] * 4)
        tight.resume(proven.append, lambda: math.inf, lambda left=left: next(left, 0.0))
    assert proven == sorted(set(proven))
    assert len(proven) > len(begun)
    assert proven[-1] == pytest.approx(whole)
    tight.resume(proven.append, lambda: math.inf, lambda: math.inf)
    assert proven[-1] == pytest.approx(whole)
    assert len(branches) > 3
    untried = TightEvent(CutModel(problem), loss)
    untried.resume(proven.append, lambda: math.inf, lambda: math.inf)  # nothing was begun
    assert proven[-1] == pytest.approx(whole)


def test_branches_end_where_the_plan_is_met(every_branch):
    """Nothing is divided that is proven already."""
    problem, loss = dropout_chain(0)
    model = CutModel(problem)
    alone = single_event(model, loss, no_alarm())
    most, divided = all_branches(TightEvent(model, loss))
    assert most > alone > 0
    assert len(divided) > 3
    assert len(all_branches(TightEvent(model, loss), best=alone)[1]) == 3


def test_branches_are_not_tried_where_none_can_gain(monkeypatch):
    """No branch proves more than the one in which nothing is live."""
    problem, loss = dropout_chain(0)
    tight = TightEvent(CutModel(problem), loss)
    for gain, divided in ((0.01, True), (1.0, False)):
        monkeypatch.setattr(tight_event, "PARAMETERS", TightEventParameters(least_gain=gain, wide_share=1.0))
        proven, branches = all_branches(tight, best=1.0)
        assert (proven > 0) is bool(branches) is divided
