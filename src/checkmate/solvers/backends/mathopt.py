"""SCIP through OR-Tools' MathOpt, in a child process.

CP-SAT is not offered here: MathOpt rounds the continuous columns for it, and what it then calls infeasible is not
(OR-Tools 9.15).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from checkmate.core.errors import SolverError
from checkmate.solvers.backends.child import ask, require_ortools
from checkmate.solvers.backends.program import Floats, Program, Solved

_CHILD = "checkmate.solvers.backends.mathopt_child"


def solve_integer(
    program: Program,
    *,
    time_s: float = math.inf,
    absolute_gap: float = 1e-5,
    threads: int = 1,
    start: Floats | None = None,
    on_solution: Callable[[Floats], None] | None = None,
) -> Solved:
    """The program with integers; as `highs.solve_integer`.

    Raises:
        MissingExtraError: OR-Tools is not installed.
        SolverError: The engine's answer is not a solution of the program.
    """
    require_ortools()
    columns = len(program.cost)
    best: Floats | None = None
    cost = math.inf

    def take(said: Any) -> None:
        nonlocal best, cost
        try:
            values = np.array(said, dtype=np.float64)
        except (TypeError, ValueError):
            values = np.zeros(0)
        if values.shape != (columns,) or not np.isfinite(values).all():
            raise SolverError(f"SCIP's answer is not a solution of {columns} columns: {str(said)[:80]}")
        found = float(program.cost @ values)
        if found < cost:
            best, cost = values, found
            if on_solution is not None:
                on_solution(values)

    job = {
        "absolute_gap": absolute_gap,
        "threads": threads,
        "start": None if start is None else [None if math.isnan(x) else x for x in start.tolist()],
        "program": _listed(program),
    }
    answer = ask(_CHILD, job, time_s=None if math.isinf(time_s) else time_s, on_message=take)
    if answer.reply is None:
        return Solved(-math.inf, best, cost, False, answer.detail)
    if answer.reply["infeasible"]:
        return Solved(math.inf, None, math.inf, True)
    bound = answer.reply["bound"]
    return Solved(-math.inf if bound is None else bound, best, cost, bool(answer.reply["finished"]))


def _listed(program: Program) -> dict[str, list[Any]]:
    """The program as lists, with None for what is infinite."""
    matrix = program.matrix.tocoo()
    return {
        "cost": program.cost.tolist(),
        "low": program.low.tolist(),
        "high": program.high.tolist(),
        "integral": program.integral.tolist(),
        "row_low": [None if math.isinf(x) else x for x in program.row_low.tolist()],
        "row_high": [None if math.isinf(x) else x for x in program.row_high.tolist()],
        "rows": matrix.row.tolist(),
        "columns": matrix.col.tolist(),
        "entries": matrix.data.tolist(),
    }
