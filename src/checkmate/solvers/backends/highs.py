"""HiGHS through highspy."""

# highspy ships no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportAttributeAccessIssue=false

from __future__ import annotations

import atexit
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import highspy
import numpy as np

from checkmate.solvers.backends.program import Floats, Program, Solved, dual_bound, proves_infeasible

_POLL_S: Final = 0.05
"""Seconds between two looks for new solutions and Ctrl-C."""
_LEAST_S: Final = 0.01
"""Shortest time limit given to the engine, in seconds."""
_GRACE_S: Final = 0.2
"""Seconds beyond its limit after which the engine is told to stop, and as many more after which it is left behind."""
_ENTRY_S: Final = 2e-6
"""Seconds, for each entry of the matrix, that the engine may go on without a look at the clock: reading, presolve, factors.
A program that cannot be interrupted within its limit is not begun."""


def solve_linear(program: Program, *, time_s: float = math.inf) -> Solved:
    """Solve the relaxation without integers.

    Returns:
        A bound that is computed here from the engine's duals (`dual_bound`), so that it holds whatever the engine did, and
        infeasibility only with a certificate that passes `proves_infeasible`.
    """
    unsolved = Solved(-math.inf, None, math.inf, False)
    if not _can_stop(program, time_s):
        return unsolved
    engine = _engine(program, time_s, 1)
    engine.setOptionValue("solver", "simplex")
    if not _run(engine, time_s, deque(), None):
        return unsolved
    status = engine.getModelStatus()
    solution = engine.getSolution()
    if status == highspy.HighsModelStatus.kInfeasible:
        answer, has_ray, ray = _dual_ray(engine)
        proven = answer and has_ray and proves_infeasible(program, ray)
        return Solved(math.inf if proven else -math.inf, None, math.inf, True)
    duals = np.asarray(solution.row_dual, dtype=np.float64)
    bound = dual_bound(program, duals) if len(duals) == len(program.row_low) else -math.inf
    finished = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kModelEmpty)
    values = np.asarray(solution.col_value, dtype=np.float64) if finished else None
    objective = float(engine.getInfo().objective_function_value) if finished else math.inf
    return Solved(bound, values, objective, finished, row_prices=duals if finished else None)


def solve_integer(
    program: Program,
    *,
    time_s: float = math.inf,
    absolute_gap: float = 1e-5,
    threads: int = 1,
    cutoff: float = math.inf,
    start: Floats | None = None,
    on_solution: Callable[[Floats], None] | None = None,
) -> Solved:
    """Solve the program with integers. The bound rests on the engine's tolerances.

    Args:
        program: The program.
        time_s: Seconds it may take.
        absolute_gap: Distance of bound and objective at which to stop.
        cutoff: Solutions that cost this much or more are not wanted: the bound is not pushed beyond it.
        threads: Threads it may use.
        start: A solution to start from, NaN where unknown. Shape ``[column]``.
        on_solution: Called with every better solution.
    """
    unsolved = Solved(-math.inf, None, math.inf, False)
    if not _can_stop(program, time_s):
        return unsolved
    engine = _engine(program, time_s, threads)
    integral = np.flatnonzero(program.integral).astype(np.int32)
    kinds = np.full(len(integral), highspy.HighsVarType.kInteger)
    engine.changeColsIntegrality(len(integral), integral, kinds)
    engine.setOptionValue("mip_rel_gap", 0.0)
    engine.setOptionValue("mip_abs_gap", absolute_gap)
    # Restarts lose the tree; on event cuts the cutoff and no restarts together took a third off.
    engine.setOptionValue("mip_allow_restart", False)
    if math.isfinite(cutoff):
        engine.setOptionValue("objective_bound", cutoff)
    if start is not None:
        known = np.flatnonzero(~np.isnan(start)).astype(np.int32)
        engine.setSolution(len(known), known, start[known])
    found: deque[Floats] = deque()
    if on_solution is not None:
        engine.cbMipImprovingSolution.subscribe(lambda event: found.append(np.array(event.data_out.mip_solution)))
    if not _run(engine, time_s, found, on_solution):
        return unsolved
    status = engine.getModelStatus()
    info = engine.getInfo()
    finished = status in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kInfeasible)
    if status == highspy.HighsModelStatus.kInfeasible:
        return Solved(cutoff, None, math.inf, True)
    bound = min(float(info.mip_dual_bound), cutoff)
    values = np.asarray(engine.getSolution().col_value, dtype=np.float64)
    objective = float(info.objective_function_value)
    solved = len(values) == len(program.cost) and info.primal_solution_status == 2
    return Solved(
        bound=bound if math.isfinite(bound) else -math.inf,
        solution=values if solved else None,
        objective=objective if solved else math.inf,
        finished=finished,
    )


def _can_stop(program: Program, time_s: float) -> bool:
    return _ENTRY_S * program.matrix.nnz < time_s


def _run(engine: Any, time_s: float, found: deque[Floats], on_solution: Callable[[Floats], None] | None) -> bool:
    """Run in another thread, so that Ctrl-C, exceptions of ``on_solution`` and the time limit end it.

    Solutions are passed on here, not in the engine's callback, where an exception would be lost. `highspy.Highs.startSolve` is
    not used: its locks belong to the class, so that no two engines can run at a time, not even one beside another that is left
    behind.

    Returns:
        Whether it has ended. One that neither keeps its limit nor hears of it goes on by itself and may not be touched.
    """
    engine.HandleUserInterrupt = True
    until = time.monotonic() + time_s + _GRACE_S
    ended = threading.Event()

    def work() -> None:
        try:
            engine.run()
            engine.resetGlobalScheduler(False)  # as highspy does in its threads: the engine's workers end with them
        finally:
            ended.set()

    thread = threading.Thread(target=work, daemon=True, name="checkmate-highs")
    thread.start()
    try:
        finished = False
        while not finished:
            finished = ended.wait(_POLL_S)
            while found and on_solution is not None:
                on_solution(found.popleft())
            if not finished and time.monotonic() > until:
                engine.cancelSolve()
                if not ended.wait(_GRACE_S):
                    # An engine that runs while the interpreter ends could crash it.
                    atexit.register(thread.join)
                    return False
                finished = True
    except BaseException:
        engine.cancelSolve()
        ended.wait()
        raise
    return True


def _engine(program: Program, time_s: float, threads: int) -> Any:
    model = highspy.HighsLp()
    model.num_col_ = len(program.cost)
    model.num_row_ = len(program.row_low)
    model.col_cost_ = program.cost
    model.col_lower_ = program.low
    model.col_upper_ = program.high
    model.row_lower_ = program.row_low
    model.row_upper_ = program.row_high
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = program.matrix.indptr
    model.a_matrix_.index_ = program.matrix.indices
    model.a_matrix_.value_ = program.matrix.data
    engine = highspy.Highs()
    engine.setOptionValue("output_flag", False)
    engine.setOptionValue("threads", threads)
    if math.isfinite(time_s):
        engine.setOptionValue("time_limit", float(max(time_s, _LEAST_S)))
    engine.passModel(model)
    return engine


def _dual_ray(engine: Any) -> tuple[bool, bool, Floats]:
    answer = engine.getDualRay()
    status, has_ray = answer[0], bool(answer[1])
    ray = np.asarray(answer[2], dtype=np.float64) if has_ray else np.zeros(0)
    return status == highspy.HighsStatus.kOk, has_ray, ray
