"""Solvers and the engines behind them: each solves a small problem whose optimum is known."""

from __future__ import annotations

from typing import Final

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Result
from checkmate.doctor.check import Check
from checkmate.solvers.local_search import LocalSearch
from checkmate.solvers.milp import Milp
from checkmate.solvers.session import Solver
from checkmate.solvers.solve import solve

OPTIMUM: Final = 9
"""Least cost of `small_problem`, by brute force."""


def small_problem() -> Problem:
    """Forward and backward of four ops that do not fit: one op has to be computed twice."""
    edges = [(i, i + 1) for i in range(7)] + [(0, 7), (1, 6), (2, 5)]
    return Problem(Graph.from_dag(cost=[1] * 8, size_bytes=[1] * 8, edges=edges), 4)


def check_highs() -> Check:
    """HiGHS, through the exact formulation."""
    return check_engine("HiGHS", Milp(), "run `pip install --force-reinstall highspy`", optimum=OPTIMUM)


def check_search() -> Check:
    """The compiled local search, and the files in which numba keeps what it compiled."""
    from checkmate.solvers.backends.kernels import fault

    found = check_engine("local search", LocalSearch(), "run `pip install --force-reinstall numba`", optimum=None)
    reason = fault()
    if found.verdict != "ok" or reason is None:
        return found
    return Check(
        name="local search",
        verdict="failed",
        detail=f"compiled functions cannot be kept, so that each process compiles them for some seconds: {reason}",
        cure="set NUMBA_CACHE_DIR to a folder that can be written",
    )


def check_engine(name: str, solver: Solver, cure: str, *, optimum: int | None) -> Check:
    """A solver on the small problem.

    Args:
        name: Name of the check.
        solver: The solver.
        cure: What to do if it fails.
        optimum: The cost it has to find; None for a heuristic, whose plan only has to hold.
    """
    result = solve(small_problem(), solver, limits=Limits(time_s=30), raise_on_failure=False)
    if not isinstance(result, Result):
        return Check(name=name, verdict="failed", detail=f"no plan: {result.termination}", cure=cure)
    if optimum is not None and result.cost != optimum:
        return Check(name=name, verdict="failed", detail=f"cost {result.cost}, and the optimum is {optimum}", cure=cure)
    return Check(
        name=name, verdict="ok", detail=f"solves a problem of {len(result.plan.order)} steps in {result.elapsed_s:.1f} s"
    )
