"""The bound of a single event as a minimum cut: that of the stated linear program, below every plan, at any moment."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from checkmate import BruteForce, Graph, Op, Problem, Value, solve
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.min_cut import EventNetwork, Line, single_event
from checkmate.solvers.clocks import no_alarm
from tests.solvers.bounds.events.test_event_cuts import some_targets, tight_problem
from tests.solvers.bounds.proof import event_sides, least_share, strict_ancestors
from tests.solvers.chains import unit_chain


def test_the_cut_is_the_stated_program_of_its_event():
    """A cut has integral corners, so that prices lose nothing; and no plan exists where the program has no point."""
    sharp = impossible = 0
    for seed in range(75):
        rng = random.Random(seed)
        problem = tight_problem(rng, training=0.5)
        targets = some_targets(rng, problem)
        model = CutModel(problem, targets)
        for event in range(model.end):
            stated = least_share(problem, [event], targets=targets)
            share = single_event(model, event, no_alarm())
            assert share == pytest.approx(stated, abs=1e-4), (seed, event)
            sharp += 1e-4 < stated < math.inf
            impossible += math.isinf(stated)
    assert sharp > 20
    assert impossible > 1


def test_no_plan_costs_less():
    """Brute force over all schedules is the oracle; a bound that is infinite means that there is none."""
    positive = infinite = 0
    for seed in range(200):
        problem = tight_problem(random.Random(seed), most_ops=(5, 6, 7))
        if len(problem.graph.ops) > 7:
            continue
        model = CutModel(problem)
        shares = [single_event(model, event, no_alarm()) for event in range(model.end)]
        if max(shares) <= 0:
            continue
        optimum = solve(problem, BruteForce(), raise_on_failure=False).cost
        assert problem.graph.cost * (1 + max(shares)) <= (math.inf if optimum is None else optimum * (1 + 1e-9)), seed
        positive += math.isfinite(max(shares))
        infinite += math.isinf(max(shares))
    assert positive > 6
    assert infinite > 1


def test_the_sides_of_the_network_are_what_is_sure():
    """What surely comes after the event runs after it, what surely comes before runs only if it is computed again."""
    for seed in range(60):
        rng = random.Random(seed)
        problem = tight_problem(rng, training=0.5)
        model = CutModel(problem)
        event = rng.randrange(model.end)
        sure, late = event_sides(problem, event, None)
        network = EventNetwork(model, event, model.end, no_alarm())
        assert {o for o, node in enumerate(network.node) if node == 0} == {*late, event}
        once = {o for o in sure if not problem.graph.ops[o].recomputable}
        assert once <= {o for o, node in enumerate(network.node) if node == 1} <= sure
        assert strict_ancestors(problem)[event] == sure


def test_a_cut_says_what_runs_again_and_what_is_held():
    """There is room for 9 of 14 bytes: at least five ninths of the value that is cheap to make have to go."""
    graph = Graph(
        (
            Op("a", (), (0,), 10),
            Op("b", (), (1,), 3),
            Op("narrow", (0, 1), (2,), 1),
            Op("event", (2,), (3,), 1, workspace_bytes=4),
            Op("use", (0, 1, 3), (4,), 1),
        ),
        tuple(Value(name, size) for name, size in (("a", 5), ("b", 9), ("n", 1), ("e", 1), ("u", 1))),
    )
    model = CutModel(Problem(graph, 15))
    network = EventNetwork(model, 3, model.end, no_alarm())
    assert (network.held, network.room) == (14, 9)
    assert network.least_bytes()[0] == 0
    assert single_event(model, 3, no_alarm()) * graph.cost == pytest.approx(3.0 * 5 / 9, rel=1e-4)
    for price, cut in ((0.1, Line(0.0, 5.0)), (0.5, Line(3.0, -4.0))):
        value, runs = network.least_cost(price)
        assert network.line(runs) == cut
        assert value == pytest.approx(cut.cost + price * cut.excess)
    assert single_event(CutModel(Problem(graph, 20)), 3, no_alarm()) == 0
    assert single_event(CutModel(Problem(graph, 5)), 3, no_alarm()) == math.inf


def test_an_alarm_ends_it_with_what_is_proven():
    """Any price gives a bound: that of the first is there even if there is no time for a second."""
    model = CutModel(Problem(unit_chain(16), 6))
    flag = no_alarm()
    flag[0] = 1
    assert single_event(model, 17, flag) == 0.0
    assert single_event(model, 17, no_alarm()) > 0


def test_amounts_of_any_unit_give_the_same_share():
    """Costs and bytes are scaled to whole capacities below 2^52: nothing overflows, and nothing is rounded up."""
    shares = []
    for cost, size in ((1, 1), (1, 2**50), (2**50, 1), (2**50, 2**50), (997, 10**9)):
        graph = unit_chain(8)
        ops = [Op(op.name, op.inputs, op.outputs, cost, phase=op.phase) for op in graph.ops]
        scaled = Graph(tuple(ops), tuple(Value(value.name, size, kept=value.kept) for value in graph.values))
        shares.append(single_event(CutModel(Problem(scaled, 4 * size)), 9, no_alarm()))
    assert shares[0] > 0.1
    assert np.ptp(shares) < 2 * 2e-5
    exact = least_share(Problem(unit_chain(8), 4), [9])
    assert max(shares) <= exact + 1e-5


def test_an_op_beside_the_event_comes_after_those_that_it_reads():
    """Else the one with the large output would be put off, and the one that reads it would have run before."""
    graph = Graph(
        (
            Op("q", (), (0,), 10),
            Op("x", (0,), (1,), 1),
            Op("event", (1,), (2,), 1, workspace_bytes=10),
            Op("p", (), (3,), 4),
            Op("o", (0, 3), (4,), 1),
            Op("use", (2, 3, 4), (5,), 1),
        ),
        tuple(Value(name, size) for name, size in (("q", 5), ("x", 1), ("e", 1), ("p", 5), ("o", 1), ("u", 1))),
    )
    problem = Problem(graph, 13)
    assert single_event(CutModel(problem), 2, no_alarm()) * graph.cost == pytest.approx(4.0, rel=1e-3)
    assert least_share(problem, [2]) * graph.cost == pytest.approx(4.0, rel=1e-3)
