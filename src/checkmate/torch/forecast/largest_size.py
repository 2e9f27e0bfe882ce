"""The largest batch or sequence that fits: two traces, a line through each size, and a third trace that confirms."""

from __future__ import annotations

from dataclasses import dataclass, replace

from checkmate.core.errors import CheckmateError, GraphError, InfeasibleBudgetError
from checkmate.core.plan import Plan
from checkmate.core.result import Limits
from checkmate.core.simulate import simulate
from checkmate.frontend.planner import result_of_order
from checkmate.studies.affine import AffineGraph
from checkmate.studies.max_batch import MaxBatch, max_batch
from checkmate.torch.forecast.tracer import SHARES, DeviceTracer, TracedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSizeParameters:
    """How the largest size of a dimension is searched.

    Attributes:
        solve_s: Seconds without which a search for plans is not started.
        confirmations: Most traces that try to confirm a size. A size that its own trace refutes is reduced in proportion to the
            excess, so that one more trace suffices where kernels round sizes up.
        near: Excess of the traced peak over the available bytes, as a ratio, up to which sizes count as lines that kernels
            round up, and a smaller size is tried. Above it, sizes do not grow in a line, and the answer is "not known".
        rows: Reduced sizes above this are multiples of it: attention kernels round lengths up to 128 rows
            (`checkmate.torch.emulate.workspace`), so that sizes between cost as much as the next multiple.
    """

    solve_s: float = 2.0
    confirmations: int = 2
    near: float = 1.02
    rows: int = 128


_PARAMETERS = LargestSizeParameters()


def largest_size(
    tracer: DeviceTracer, step: TracedStep, available_bytes: int, remarks: list[str], what: str, dim: int, now: int
) -> MaxBatch | None:
    """The largest size of a dimension for which a plan fits.

    Args:
        tracer: Traces the step at other sizes.
        step: The step as traced at its present size.
        available_bytes: The budget.
        remarks: Gets a sentence for each reservation, or the reason why the result is None.
        what: ``"batch"`` or ``"sequence"``, for the remarks.
        dim: The dimension of the example's tensors.
        now: Its present size.

    Returns:
        The largest size with its plan and a proven upper bound; None where it is not known.
    """
    if step.update_bytes > available_bytes:
        return None
    if not tracer.has_time_for(2 * _PARAMETERS.solve_s + tracer.trace_s):
        remarks.append(f"the largest {what} was not looked for: it takes another trace; raise time_limit_s")
        return None
    try:
        lines = _lines(tracer, step, what, dim, now)
        small, large = lines.small_batch, lines.large_batch
        found = max_batch(lines, budget_bytes=available_bytes, limits=Limits(time_s=tracer.share_s(SHARES.largest_size)))
        if found.batch in (small, large):
            return found
        if not tracer.has_time_for(tracer.trace_s):
            remarks.append(f"the largest {what} is from lines through {small} and {large}, and was not traced itself")
            return found
        confirmed = _confirmed(tracer, lines, found, available_bytes, dim)
    except InfeasibleBudgetError as error:
        remarks.append(f"not even a {what} of one fits: {error.message}")
    except (CheckmateError, RuntimeError) as error:
        remarks.append(f"the largest {what} is not known: {str(error).splitlines()[0]}")
    else:
        if confirmed is None:
            remarks.append(f"the largest {what} is not known: sizes do not grow in a line from {small} to {found.batch}")
        return confirmed
    return None


def _lines(tracer: DeviceTracer, step: TracedStep, what: str, dim: int, now: int) -> AffineGraph:
    """The graph at any size, as lines through two traces, one of which is ``step``.

    Batches are doubled. Sequences are halved, since a longer one may have more positions than the model.
    """
    if what == "sequence" and now > 1:
        return AffineGraph(tracer.traced(dim, now // 2).graph, now // 2, step.graph, now)
    double = tracer.traced(dim, 2 * now).graph
    try:
        return AffineGraph(step.graph, now, double, 2 * now)
    except GraphError:
        # Size 1 is special: torch broadcasts it, and its stride is arbitrary, so that the graph may differ from all others.
        if now > 1 or not tracer.has_time_for(_PARAMETERS.solve_s + tracer.trace_s):
            raise
        return AffineGraph(double, 2, tracer.traced(dim, 4).graph, 4)


def _confirmed(tracer: DeviceTracer, lines: AffineGraph, found: MaxBatch, available_bytes: int, dim: int) -> MaxBatch | None:
    """Confirm a size found on lines by a trace at that size; reduce it a little if kernels round sizes up.

    Returns:
        The confirmed size, or None if sizes are not lines.
    """
    for _ in range(_PARAMETERS.confirmations):
        traced = tracer.traced(dim, found.batch).graph
        peak = simulate(traced, Plan.from_order(traced, found.plan.order)).peak_bytes
        if peak <= available_bytes:
            return found
        fewer = found.batch * available_bytes // peak
        if peak > _PARAMETERS.near * available_bytes or fewer < 1:
            return None
        fewer -= fewer % _PARAMETERS.rows if fewer > _PARAMETERS.rows else 0
        result = result_of_order(lines(fewer), found.plan.order)
        found = replace(found, batch=fewer, plan=result.plan, result=result)
    return None
