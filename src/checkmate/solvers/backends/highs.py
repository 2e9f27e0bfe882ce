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
from typing import Any

import highspy
import numpy as np

from checkmate.solvers.backends.program import Floats, Program, Solved, dual_bound, proves_infeasible


def solve_linear(program: Program, *, time_s: float = math.inf) -> Solved:
    """Solve the relaxation without integers.

    The bound is computed here from the engine's duals (`dual_bound`): it holds whatever the engine did. Infeasibility is
    believed only with a certificate that passes `proves_infeasible`.
    """
    engine = _engine(program, time_s, 1)
    if engine is None:
        return Solved()
    engine.setOptionValue("solver", "simplex")
    if not _run(engine, time_s):
        return Solved()
    status = engine.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        answer, has_ray, ray = engine.getDualRay()[:3]
        sound = answer == highspy.HighsStatus.kOk and has_ray
        proven = sound and proves_infeasible(program, np.asarray(ray, dtype=np.float64))
        return Solved(bound=math.inf if proven else -math.inf, finished=True)
    solution = engine.getSolution()
    duals = np.asarray(solution.row_dual, dtype=np.float64)
    bound = dual_bound(program, duals) if len(duals) == len(program.row_low) else -math.inf
    if status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kModelEmpty):
        return Solved(bound=bound)
    values = np.asarray(solution.col_value, dtype=np.float64)
    return Solved(bound=bound, solution=values, finished=True, row_prices=duals)


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
    """Solve the program with integers, up to a gap between bound and cost. The bound rests on the engine's tolerances.

    Solutions that cost the cutoff or more are ignored, and the bound is not improved beyond it. Unknown entries of a start are
    NaN. Every better solution is passed on at once.
    """
    engine = _engine(program, time_s, threads)
    if engine is None:
        return Solved()
    integral = np.flatnonzero(program.integral).astype(np.int32)
    engine.changeColsIntegrality(len(integral), integral, np.full(len(integral), highspy.HighsVarType.kInteger))
    engine.setOptionValue("mip_rel_gap", 0.0)
    engine.setOptionValue("mip_abs_gap", absolute_gap)
    # Restarts lose the tree. On event cuts, a cutoff without restarts reduced the time by a third.
    engine.setOptionValue("mip_allow_restart", False)
    if math.isfinite(cutoff):
        engine.setOptionValue("objective_bound", cutoff)
    if start is not None:
        known = np.flatnonzero(~np.isnan(start)).astype(np.int32)
        engine.setSolution(len(known), known, start[known])
    if not _run(engine, time_s, on_solution):
        return Solved()
    status, info = engine.getModelStatus(), engine.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return Solved(bound=cutoff, finished=True)
    bound = min(float(info.mip_dual_bound), cutoff)
    values = np.asarray(engine.getSolution().col_value, dtype=np.float64)
    return Solved(
        bound=bound if math.isfinite(bound) else -math.inf,
        solution=values if len(values) == len(program.cost) and info.primal_solution_status == 2 else None,
        finished=status == highspy.HighsModelStatus.kOptimal,
    )


def _run(engine: Any, time_s: float, on_solution: Callable[[Floats], None] | None = None) -> bool:
    """Run in another thread, which Ctrl-C, exceptions of ``on_solution`` and the time limit end; returns whether it has ended.

    Solutions are passed on here, since the engine's callback would lose an exception. An engine that neither keeps its limit nor
    reacts to the stop is left running and may not be touched. `highspy.Highs.startSolve` is not used: its locks belong to the
    class, and no two engines could run at a time, not even next to an engine left running.
    """
    found: deque[Floats] = deque()
    if on_solution is not None:
        engine.cbMipImprovingSolution.subscribe(lambda event: found.append(np.array(event.data_out.mip_solution)))
    engine.HandleUserInterrupt = True
    grace_s = 0.2  # this long after its limit the engine is told to stop; after as long again it is left running
    until = time.monotonic() + time_s + grace_s
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
            finished = ended.wait(0.05)  # between two looks for new solutions and Ctrl-C
            while found and on_solution is not None:
                on_solution(found.popleft())
            if not finished and time.monotonic() > until:
                engine.cancelSolve()
                if not ended.wait(grace_s):
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
    """An engine with a program; None if the time is too short to interrupt the engine within it."""
    # The engine may run 2 us for each matrix entry without reading the clock: reading, presolve, factors.
    if 2e-6 * program.matrix.nnz >= time_s:
        return None
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
        engine.setOptionValue("time_limit", float(max(time_s, 0.01)))
    engine.passModel(model)
    return engine
