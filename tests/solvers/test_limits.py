"""Time limits hold at any size: kernels are ended, engines are ended, and the best plan so far is returned."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time

import highspy
import numpy as np
import pytest

from benchmarks.generate import layered, skipping
from checkmate import (
    Graph,
    HostMemory,
    InfeasibleBudgetError,
    Limits,
    LocalSearch,
    PlanNotFoundError,
    Problem,
    min_budget,
    simulate,
    solve,
)
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.auto import Auto
from checkmate.solvers.backends.highs import solve_integer, solve_linear
from checkmate.solvers.backends.program import ProgramBuilder
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.clocks import Alarm
from checkmate.solvers.session import Session
from tests.solvers.chains import unit_chain

GENEROUS = 3.0
"""Memory of a busy machine is slow."""


def in_time(limit_s: float) -> float:
    """Most processor time of a solve that keeps a limit, times a generous factor."""
    return GENEROUS * (1.1 * limit_s + 1.0)


def tight(graph: Graph, share: float) -> Problem:
    """A budget between the largest working set and the peak of keeping everything."""
    low, high = floor(graph).peak_bytes, keep_all_bytes(graph)
    return Problem(graph, int(low + share * (high - low)))


@pytest.mark.parametrize("solver", [Auto(), LocalSearch()], ids=lambda solver: type(solver).__name__)
@pytest.mark.parametrize(("graph", "share"), [(layered(4000), 0.5), (skipping(12_000), 0.05)], ids=["layered", "skipping"])
def test_a_limit_holds_on_large_graphs(graph, share, solver):
    """A random layered graph takes a minute for its first plan, and a search that no one ends would take hours."""
    problem = tight(graph, share)
    began = time.process_time()
    result = solve(problem, solver, limits=Limits(time_s=0.5, gap=0.0), raise_on_failure=False)
    assert time.process_time() - began <= in_time(0.5)
    assert result.plan is None or result.peak_bytes <= problem.budget_bytes


def test_a_limit_holds_with_a_host():
    """A plan with copies of thousands of ops takes a second to make and to check, which is kept back from the search."""
    problem = tight(layered(4000), 0.5)
    began = time.process_time()
    result = solve(
        Problem(problem.graph, problem.budget_bytes, host=HostMemory("1GiB", 10**10, 10**10)),
        limits=Limits(time_s=0.5, gap=0.0),
        raise_on_failure=False,
    )
    assert time.process_time() - began <= in_time(0.5)
    assert result.plan is None or result.peak_bytes <= problem.budget_bytes


@pytest.mark.parametrize(("below", "error"), [(1, InfeasibleBudgetError), (0, PlanNotFoundError)])
def test_a_limit_holds_where_a_budget_is_refused(below, error):
    """Below the floor or at it: the smallest budget that the error names is looked for within the limit too."""
    graph = skipping(20_000)
    problem = Problem(graph, floor(graph).peak_bytes - below)
    began = time.process_time()
    with pytest.raises(error, match="smallest budget a plan was found for"):
        solve(problem, limits=Limits(time_s=0.5))
    assert time.process_time() - began <= in_time(0.5)


def test_a_limit_holds_where_the_smallest_budget_is_looked_for():
    """The floor, the orders and the account of a plan are a part of it."""
    graph = skipping(30_000)
    began = time.process_time()
    found = min_budget(graph, limits=Limits(time_s=0.5))
    assert time.process_time() - began <= in_time(0.5)
    assert found.peak_bytes == simulate(graph, found.plan).peak_bytes


def test_the_first_plan_comes_before_any_bound():
    """Who has little time wants a plan: no event is bounded before there is one."""
    result = solve(tight(skipping(2000), 0.3), limits=Limits(time_s=20.0, gap=1e-2))
    assert result.history[0].cost is not None
    assert result.gap <= 1e-2


def test_an_alarm_is_raised_when_the_time_is_up_and_lowered_when_it_is_set_again():
    """Kernels see it without calling back."""
    left = [0.05]
    began = time.perf_counter()
    alarm = Alarm(lambda: left[0] - (time.perf_counter() - began))
    assert not alarm.is_set
    alarm.set()
    assert alarm.is_set
    assert alarm.flag[0] == 0
    while not alarm.flag[0]:
        time.sleep(0.005)
    left[0] = 1000.0
    alarm.set()
    assert alarm.flag[0] == 0
    alarm.off()
    assert not alarm.is_set
    forever = Alarm(lambda: math.inf)
    forever.set()
    assert forever.flag[0] == 0
    late = Alarm(lambda: 0.0)
    late.set()
    assert late.flag[0] == 1


def test_a_phase_ends_before_the_session():
    """The flag of a phase is lowered after it: what follows has its own time."""
    session = Session(Problem(unit_chain(3), 4), Limits(time_s=1000.0))
    flag = session.time_up
    with session.within(session.elapsed_s() - 1.0):
        assert flag[0] == 1
    assert flag[0] == 0
    assert session.time_up is flag
    session.close()


def test_what_a_check_takes_is_kept_back():
    """A plan is checked once more at the end, so that the time for that is not the solver's."""
    graph = skipping(3000)
    session = Session(Problem(graph, keep_all_bytes(graph)), Limits(time_s=1000.0))
    session.offer(range(len(graph.ops)))
    assert session.cost == graph.cost
    assert session.left_s() < 1000.0 - session.elapsed_s()


def test_engines_keep_their_limits():
    """A program that cannot be ended in time is not begun, and one that can ends with it."""
    rng = np.random.default_rng(0)
    builder = ProgramBuilder()
    columns = builder.add_columns(-rng.random(3000))
    for _ in range(300):
        use = rng.choice(columns, 400, replace=False)
        builder.add_row(use, rng.random(400), high=20.0)
    program = builder.build()
    assert solve_linear(program, time_s=1e-4).bound == -math.inf
    assert solve_integer(program, time_s=1e-4).bound == -math.inf
    began = time.process_time()
    solved = solve_integer(program, time_s=0.5)
    assert time.process_time() - began <= in_time(0.5)
    assert not solved.finished


def test_an_engine_that_is_left_behind_keeps_no_other_from_running(monkeypatch):
    """It does not hear of its limit in presolve, and goes on; the next program has nothing to do with it."""
    stop = threading.Event()
    builder = ProgramBuilder()
    builder.add_row(builder.add_columns([1.0]), np.ones(1), low=1.0)
    program = builder.build()
    run, calls = highspy.Highs.run, itertools.count()
    monkeypatch.setattr(highspy.Highs, "run", lambda self: run(self) if next(calls) else stop.wait(20.0))
    assert solve_linear(program, time_s=0.05).bound == -math.inf
    assert solve_linear(program, time_s=5.0).bound == pytest.approx(1.0)
    assert solve_integer(program, time_s=5.0).bound == pytest.approx(1.0)
    stop.set()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_limits_hold_on_random_large_graphs(seed):
    """Sizes, shapes and budgets at random."""
    rng = random.Random(seed)
    make = rng.choice([layered, skipping])
    problem = tight(make(rng.randint(500, 30_000), seed=seed), rng.uniform(0.01, 0.9))
    limit_s = rng.choice([1.0, 5.0, 15.0])
    began = time.process_time()
    solve(problem, limits=Limits(time_s=limit_s, gap=0.0, seed=seed), raise_on_failure=False)
    assert time.process_time() - began <= in_time(limit_s)
