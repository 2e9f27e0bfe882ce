"""The largest batch or sequence that fits: two traces, a line through each size, and further traces that confirm."""

from __future__ import annotations

from dataclasses import dataclass, replace

from checkmate.core.errors import CheckmateError, GraphError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Limits
from checkmate.core.simulate import simulate
from checkmate.frontend.planner import result_of_order
from checkmate.studies.affine import AffineGraph
from checkmate.studies.max_batch import ONE_EXTRA_FORWARD, MaxBatch, MaxOverhead, max_batch
from checkmate.torch.forecast.quadratic import QuadraticGraph
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
    """As `find_largest_size`; None, with the reason among the remarks, where the answer is not known.

    Args:
        tracer: Traces the step at other sizes.
        step: The step as traced at its present size.
        available_bytes: The budget.
        remarks: Gets a sentence for each reservation, or the reason why the result is None.
        what: ``"batch"`` or ``"sequence"``, for the remarks.
        dim: The dimension of the example's tensors.
        now: Its present size.
    """
    if step.update_bytes > available_bytes:
        return None
    if not tracer.has_time_for(2 * _PARAMETERS.solve_s + tracer.trace_s):
        remarks.append(f"the largest {what} was not looked for: it takes another trace; raise time_limit_s")
        return None
    try:
        return find_largest_size(tracer, step, available_bytes, remarks, what, dim, now)
    except InfeasibleBudgetError as error:
        remarks.append(f"not even a {what} of one fits: {error.message}")
    except (CheckmateError, RuntimeError) as error:
        remarks.append(f"the largest {what} is not known: {str(error).splitlines()[0]}")
    return None


def find_largest_size(
    tracer: DeviceTracer,
    step: TracedStep,
    available_bytes: int,
    remarks: list[str],
    what: str,
    dim: int,
    now: int,
    max_overhead: MaxOverhead = ONE_EXTRA_FORWARD,
) -> MaxBatch:
    """The largest size of a dimension for which a plan fits.

    The upper bound holds if no size grows slower than a line; for sequences, than a parabola where a quarter, half and all of
    the present length are on one.

    Args:
        tracer: As in `largest_size`, like ``step``, ``available_bytes``, ``remarks``, ``what``, ``dim`` and ``now``.
        step: The step.
        available_bytes: The budget.
        remarks: Gets a sentence for each reservation.
        what: Name of the dimension.
        dim: The dimension.
        now: Its present size.
        max_overhead: As in `checkmate.max_batch`.

    Raises:
        InfeasibleBudgetError: Proven: not even a size of one fits.
        PlanNotFoundError: No size was found that its own trace confirms.
        GraphError: The step has another structure at other sizes.
    """
    search = _SizeSearch(tracer, available_bytes, dim, max_overhead)
    lines = _lines(tracer, step, what, dim, now)
    search.traced |= {lines.small_batch: lines.small, lines.large_batch: lines.large}
    quarter = now // 4
    if what == "sequence" and 1 < quarter < lines.small_batch and tracer.has_time_for(_PARAMETERS.solve_s + 2 * tracer.trace_s):
        search.traced[quarter] = tracer.traced(dim, quarter).graph
        found = search.on(QuadraticGraph(dict(search.traced), lines))
    else:
        found = search.on(lines)
    if found.batch in search.traced:
        return search.with_traced_plan(found)
    if not tracer.has_time_for(tracer.trace_s):
        where = f"lines through {lines.small_batch} and {lines.large_batch}"
        remarks.append(f"the largest {what} is from {where}, and was not traced itself")
        return found
    confirmed = search.confirmed(found)
    if confirmed is None:
        raise PlanNotFoundError(
            f"sizes do not grow in a line from {lines.small_batch} to {found.batch}",
            hint=f"give an example whose {what} is nearer to {found.batch}",
        )
    return confirmed


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


class _SizeSearch:
    """Sizes that were traced, and the search for the largest one that fits."""

    def __init__(self, tracer: DeviceTracer, available_bytes: int, dim: int, max_overhead: MaxOverhead) -> None:
        self.tracer, self.available_bytes, self.dim = tracer, available_bytes, dim
        self.max_overhead: MaxOverhead = max_overhead
        self.traced: dict[int, Graph] = {}

    def on(self, lines: AffineGraph | QuadraticGraph) -> MaxBatch:
        """The largest size if sizes are these lines or parabolas."""
        limits = Limits(time_s=self.tracer.share_s(SHARES.largest_size))
        return max_batch(lines, budget_bytes=self.available_bytes, limits=limits, max_overhead=self.max_overhead)

    def with_traced_plan(self, found: MaxBatch) -> MaxBatch:
        """The same size, with its plan on the trace at that size."""
        result = result_of_order(self.traced[found.batch], found.plan.order)
        return replace(found, plan=result.plan, result=result)

    def peak_bytes(self, found: MaxBatch) -> int:
        """Peak of the plan at its size, which is traced."""
        if found.batch not in self.traced:
            self.traced[found.batch] = self.tracer.traced(self.dim, found.batch).graph
        graph = self.traced[found.batch]
        return simulate(graph, Plan.from_order(graph, found.plan.order)).peak_bytes

    def confirmed(self, found: MaxBatch) -> MaxBatch | None:
        """Confirm a size by a trace; reduce it a little if kernels round sizes up.

        Returns:
            The confirmed size, or None if sizes are not lines.
        """
        for _ in range(_PARAMETERS.confirmations):
            peak = self.peak_bytes(found)
            if peak <= self.available_bytes:
                return self.with_traced_plan(found)
            fewer = found.batch * self.available_bytes // peak
            if peak > _PARAMETERS.near * self.available_bytes or fewer < 1:
                return None
            fewer -= fewer % _PARAMETERS.rows if fewer > _PARAMETERS.rows else 0
            found = replace(found, batch=fewer)
        return None
