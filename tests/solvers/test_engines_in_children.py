"""OR-Tools engines in a process of their own: plans, limits, interrupts, crashes and garbage."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from checkmate import Intervals, Limits, Milp, MissingExtraError, OptionError, Problem, Reason, SolverError, solve
from checkmate.solvers.backends import child
from checkmate.solvers.backends.highs import solve_integer
from checkmate.solvers.backends.mathopt import solve_integer as solve_with_scip
from checkmate.solvers.backends.stage_program import StageProgram
from checkmate.solvers.bounds.floor import floor
from tests.solvers.chains import unit_chain
from tests.solvers.generators import transformer
from tests.solvers.instances import LIMITS, check, draw, stage_optimum

# Found, not imported: OR-Tools and highspy cannot be loaded into one process.
needs_ortools = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="OR-Tools is not installed")


@needs_ortools
@pytest.mark.parametrize("count", [8, pytest.param(14, marks=pytest.mark.slow)])
def test_intervals_beat_no_brute_force_and_prove_no_more_than_there_is(count):
    """On graphs with views, random, pinned and overwritten ops, too."""
    feasible = [instance for instance in map(draw, range(count)) if instance.optimum is not None]
    found = sum(check(instance, Intervals(warm_start=False)).plan is not None for instance in feasible)
    assert found >= 0.6 * len(feasible)


@needs_ortools
@pytest.mark.parametrize("count", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_intervals_are_exact_in_their_class(count):
    """Of all R matrices of the graph's own order, no cheaper one fits."""
    compared = 0
    for seed in range(60):
        problem = draw(seed).problem
        if len(problem.graph.ops) > 4 or any(value.base is not None for value in problem.graph.values) or compared >= count:
            continue
        compared += 1
        result = solve(problem, Intervals(max_recomputes=4, warm_start=False), limits=LIMITS, raise_on_failure=False)
        assert result.cost == stage_optimum(problem), seed
        refused = floor(problem.graph).peak_bytes > problem.budget_bytes  # no solver runs
        if result.plan is None and not result.termination.limit and not refused:
            assert "proven" in result.termination.detail or "resident" in result.termination.detail, seed
    assert compared == count


@needs_ortools
@pytest.mark.parametrize("solver", [Intervals(), Intervals(warm_start=False), Milp("scip")], ids=repr)
def test_the_papers_chain_is_closed(solver):
    """linear8 at 4 units costs 26 in stages of its own order, and the engine proves it."""
    result = solve(Problem(unit_chain(8), 4), solver, limits=Limits(time_s=60, gap=0.0))
    assert result.cost == 26
    assert any(remark.startswith("given-order bound") and remark.endswith(": 26") for remark in result.remarks)


@needs_ortools
def test_two_engines_agree_on_a_program():
    """The same columns and rows have the same optimum, whoever solves them."""
    for graph, budget in ((unit_chain(4), 5), (transformer(1), 900_000)):
        program = StageProgram(Problem(graph, budget)).build()
        ours, theirs = solve_integer(program), solve_with_scip(program)
        assert theirs.finished == ours.finished
        assert theirs.bound == pytest.approx(ours.bound, abs=1e-4)
        if theirs.solution is not None:
            assert program.cost @ theirs.solution == pytest.approx(ours.objective, abs=1e-4)
            activity = program.matrix @ theirs.solution
            assert (activity <= program.row_high + 1e-6).all()
            assert (activity >= program.row_low - 1e-6).all()


@needs_ortools
def test_an_infeasible_program_is_called_so():
    """And the class is named, because other orders may still fit."""
    result = solve(Problem(unit_chain(8), 3), Intervals(max_recomputes=0), raise_on_failure=False)
    assert result.termination.reason is Reason.NOT_FOUND or result.cost > 17
    program = StageProgram(Problem(unit_chain(3), 2)).build()
    assert np.isposinf(solve_with_scip(program).bound)


@needs_ortools
@pytest.mark.parametrize("solver", [Intervals(), pytest.param(Milp("scip"), marks=pytest.mark.slow)], ids=repr)
def test_a_real_ctrl_c_ends_the_child_and_keeps_the_plan(solver):
    """SIGINT inside the engine's search: the best plan so far, at once, and nobody left behind."""
    script = (
        "import os, signal, threading, time; from checkmate import *; from tests.solvers.generators import transformer;"
        "from checkmate.solvers.evict.starts import load_kernels; load_kernels();"  # compiling takes longer than the search
        "signal.signal(signal.SIGINT, signal.default_int_handler);"  # a job in the background inherits SIGINT ignored
        "threading.Timer(5, lambda: os.kill(os.getpid(), signal.SIGINT)).start(); began = time.time();"
        f"r = solve(Problem(transformer(6), '30%'), {solver!r}, limits=Limits(time_s=100, gap=0.0));"
        "print(r.termination.limit, r.plan is not None, time.time() - began < 20)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["interrupt", "True", "True"]


@needs_ortools
def test_time_limits_of_children_are_kept():
    """Start of the process included."""
    result = solve(Problem(transformer(4), "35%"), Intervals(), limits=Limits(time_s=3.0, gap=0.0))
    assert result.elapsed_s < 3 + child.GRACE_S + 2


def test_a_missing_engine_is_named_with_the_command_that_installs_it(monkeypatch):
    """At the call, before any work."""
    monkeypatch.setattr(child.importlib.util, "find_spec", lambda name: None)
    for solver in (Intervals(), Milp("scip")):
        with pytest.raises(MissingExtraError, match=r'pip install "checkmate-remat\[solvers\]"'):
            solve(Problem(unit_chain(3), 4), solver)


def as_child(monkeypatch, script: str) -> None:
    """Let every child run a script of ours instead of its module."""
    start = subprocess.Popen
    monkeypatch.setattr(child, "require_ortools", lambda: None)
    monkeypatch.setattr("checkmate.solvers.backends.mathopt.require_ortools", lambda: None)
    monkeypatch.setattr(child.subprocess, "Popen", lambda command, **rest: start([sys.executable, "-c", script], **rest))


@pytest.mark.parametrize("solver", [Intervals(), Intervals(warm_start=False), Milp("scip")], ids=repr)
@pytest.mark.parametrize("script", ["import os; os.abort()", "raise SystemExit('out of memory')", ""])
def test_an_engine_that_dies_leaves_the_plan_so_far(monkeypatch, solver, script):
    """A crash is harmless: a termination that says so, and what was found before."""
    as_child(monkeypatch, script)
    result = solve(Problem(unit_chain(6), 6), solver, raise_on_failure=False)
    assert "process ended with exit code" in result.termination.detail
    assert (result.plan is None) == (solver == Intervals(warm_start=False))


@pytest.mark.parametrize("solver", [Intervals(), Milp("scip")], ids=repr)
@pytest.mark.parametrize(
    "said",
    [
        "nonsense",
        "[1]",
        '{"reply": false, "content": [99]}',
        '{"reply": false, "content": "x"}',
        '{"reply": false, "content": [3]}',
    ],
)
def test_garbage_from_an_engine_is_a_solver_error(monkeypatch, solver, said):
    """What is no order and no solution is never taken for one."""
    as_child(monkeypatch, f"print('''{said}''', flush=True); input(); input()")
    with pytest.raises(SolverError):
        solve(Problem(unit_chain(6), 6), solver)


def test_an_engine_that_does_not_stop_is_ended(monkeypatch):
    """The limit is the parent's to keep."""
    monkeypatch.setattr(child, "GRACE_S", 0.2)
    as_child(monkeypatch, "import time; time.sleep(60)")
    result = solve(Problem(unit_chain(6), 6), Intervals(), limits=Limits(time_s=1.0, gap=0.0))
    assert result.termination.detail == "the engine did not stop at its time limit and was ended"
    assert result.plan is not None
    assert result.elapsed_s < 5


@needs_ortools
def test_a_child_ends_with_its_parent():
    """However the parent ends, it closes the child's input."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from checkmate.solvers.backends.child import serve; import time; serve(lambda *_: time.sleep(60))",
        ],
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(b"{}\n")
    process.stdin.close()
    assert process.wait(timeout=10) == 1


def test_options_that_mean_nothing_are_refused():
    """An unusable value is an error at once."""
    with pytest.raises(OptionError):
        Intervals(max_recomputes=-1)


def test_too_many_ops_are_refused_in_words():
    """The model grows with the square of the ops."""
    if importlib.util.find_spec("ortools") is None:
        pytest.skip("OR-Tools is not installed")
    result = solve(Problem(unit_chain(8), 6), Intervals(max_ops=10), raise_on_failure=False)
    assert result.termination.detail == "17 ops, and retention intervals stop at 10"
