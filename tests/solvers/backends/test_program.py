"""The arithmetic of bounds: safe whatever the engine says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import sparse

from checkmate.solvers.backends.highs import solve_integer, solve_linear
from checkmate.solvers.backends.program import Program, ProgramBuilder, dual_bound, proves_infeasible


def knapsack() -> Program:
    """Minimise -3a - 2b - 2c with 2a + b + c <= 2, all in [0, 1]: -4 in integers, -4.0 relaxed."""
    builder = ProgramBuilder()
    columns = builder.add_columns([-3.0, -2.0, -2.0])
    builder.add_row(columns, np.array([2.0, 1.0, 1.0]), high=2.0)
    return builder.build()


def test_any_duals_give_a_bound():
    """Weak duality needs no optimality: garbage duals give a loose bound, never a wrong one."""
    program = knapsack()
    solution = solve_integer(program).solution
    assert solution is not None
    best = float(program.cost @ solution)
    assert best == pytest.approx(-4.0)
    rng = np.random.default_rng(0)
    for _ in range(200):
        assert dual_bound(program, rng.normal(scale=5, size=1)) <= best + 1e-9
    assert solve_linear(program).bound == pytest.approx(-4.0)


def test_infeasibility_needs_a_certificate():
    """A ray that proves nothing is refused; the engine's own passes."""
    matrix = sparse.csr_matrix(np.array([[1.0, 1.0], [1.0, 1.0]]))
    program = Program(
        cost=np.zeros(2),
        low=np.zeros(2),
        high=np.ones(2),
        integral=np.ones(2, dtype=bool),
        matrix=matrix,
        row_low=np.array([1.5, -np.inf]),
        row_high=np.array([np.inf, 1.0]),
    )
    assert proves_infeasible(program, np.array([1.0, -1.0]))
    assert not proves_infeasible(program, np.array([1.0, 0.0]))
    assert not proves_infeasible(knapsack(), np.array([1.0]))
    assert math.isinf(solve_integer(program).bound)
