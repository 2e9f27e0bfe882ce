"""An integer program in SCIP: the child's side of `checkmate.solvers.backends.mathopt`."""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Callable
from typing import Any

from checkmate.solvers.backends.child import serve


def solve(job: dict[str, Any], say: Callable[[Any], None]) -> dict[str, Any]:
    """Build the model, search, and send every better solution."""
    from ortools.math_opt.python import mathopt

    model = mathopt.Model.from_model_proto(_model(job["program"]))
    columns = list(model.variables())
    best = math.inf
    cost = job["program"]["cost"]

    def send(solution: dict[Any, float]) -> None:
        nonlocal best
        values = [solution[x] for x in columns]
        found = sum(c * x for c, x in zip(cost, values, strict=True))
        if found < best - 1e-12:
            best = found
            say(values)

    def better(event: Any) -> Any:
        if event.solution is not None:
            send(event.solution)
        return mathopt.CallbackResult()

    left = None if job["until"] is None else datetime.timedelta(seconds=max(0.01, job["until"] - time.monotonic()))
    parameters = mathopt.SolveParameters(
        time_limit=left,
        absolute_gap_tolerance=job["absolute_gap"],
        relative_gap_tolerance=0.0,
        threads=job["threads"],
    )
    hints: list[Any] = []
    if job["start"] is not None:
        known = {x: value for x, value in zip(columns, job["start"], strict=True) if value is not None}
        hints.append(mathopt.SolutionHint(variable_values=known))
    result = mathopt.solve(
        model,
        mathopt.SolverType.GSCIP,
        params=parameters,
        model_params=mathopt.ModelSolveParameters(solution_hints=hints),
        callback_reg=mathopt.CallbackRegistration(events={mathopt.Event.MIP_SOLUTION}),
        cb=better,
    )
    if result.has_primal_feasible_solution():
        send(result.variable_values())
    reason = result.termination.reason
    bound = result.termination.objective_bounds.dual_bound
    return {
        "infeasible": reason == mathopt.TerminationReason.INFEASIBLE,
        "finished": reason == mathopt.TerminationReason.OPTIMAL,
        "bound": bound if math.isfinite(bound) else None,
    }


def _model(program: dict[str, list[Any]]) -> Any:
    from ortools.math_opt import model_pb2

    model = model_pb2.ModelProto()
    count, rows = len(program["cost"]), len(program["row_low"])
    model.variables.ids.extend(range(count))
    model.variables.lower_bounds.extend(program["low"])
    model.variables.upper_bounds.extend(program["high"])
    model.variables.integers.extend(program["integral"])
    used = [c for c in range(count) if program["cost"][c]]
    model.objective.linear_coefficients.ids.extend(used)
    model.objective.linear_coefficients.values.extend(program["cost"][c] for c in used)
    model.linear_constraints.ids.extend(range(rows))
    model.linear_constraints.lower_bounds.extend(-math.inf if x is None else x for x in program["row_low"])
    model.linear_constraints.upper_bounds.extend(math.inf if x is None else x for x in program["row_high"])
    entries = sorted(zip(program["rows"], program["columns"], program["entries"], strict=True))
    model.linear_constraint_matrix.row_ids.extend(row for row, _, _ in entries)
    model.linear_constraint_matrix.column_ids.extend(column for _, column, _ in entries)
    model.linear_constraint_matrix.coefficients.extend(entry for _, _, entry in entries)
    return model


if __name__ == "__main__":
    serve(solve)
