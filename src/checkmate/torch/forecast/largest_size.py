"""The largest batch or sequence that fits: two traces, a line through each size, and further traces that confirm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from checkmate.core.errors import CheckmateError, GraphError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Limits
from checkmate.core.simulate import simulate
from checkmate.frontend.planner import result_of_order
from checkmate.studies.affine import AffineGraph, check_same_structure
from checkmate.studies.max_batch import ONE_EXTRA_FORWARD, MaxBatch, MaxOverhead, max_batch
from checkmate.torch.chunking.choose import ChunkedStep, with_pieces
from checkmate.torch.chunking.region_groups import RegionGroup
from checkmate.torch.forecast.in_pieces import why_in_pieces, with_same_regions
from checkmate.torch.forecast.quadratic import QuadraticGraph
from checkmate.torch.forecast.tracer import SHARES, DeviceTracer, TracedStep
from checkmate.torch.joint.capture import Capture


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
            (`checkmate.torch.emulate.workspace`), so that sizes between cost as much as the next multiple. So are lengths of
            sequences on a device that is not there, whose attention pads others to multiples of 8 by separate ops, and of those
            that run piece by piece, since pieces are equal parts.
    """

    solve_s: float = 2.0
    confirmations: int = 2
    near: float = 1.02
    rows: int = 128


_PARAMETERS = LargestSizeParameters()


def largest_size(
    tracer: DeviceTracer,
    step: TracedStep,
    available_bytes: int,
    kinds: Sequence[RegionGroup],
    remarks: list[str],
    what: str,
    dim: int,
    now: int,
) -> MaxBatch | None:
    """As `find_largest_size`; None, with the reason among the remarks, where the answer is not known.

    Args:
        tracer: Traces the step at other sizes.
        step: The step as traced at its present size.
        available_bytes: The budget.
        kinds: Regions of the step that run piece by piece.
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
        return find_largest_size(tracer, step, available_bytes, kinds, remarks, what, dim, now)
    except InfeasibleBudgetError as error:
        remarks.append(f"not even a {what} of one fits: {error.message}")
    except (CheckmateError, RuntimeError) as error:
        remarks.append(f"the largest {what} is not known: {str(error).splitlines()[0]}")
    return None


def find_largest_size(
    tracer: DeviceTracer,
    step: TracedStep,
    available_bytes: int,
    kinds: Sequence[RegionGroup],
    remarks: list[str],
    what: str,
    dim: int,
    now: int,
    max_overhead: MaxOverhead = ONE_EXTRA_FORWARD,
) -> MaxBatch:
    """The largest size of a dimension for which a plan fits; where none is found in pieces, that with nothing in pieces.

    The upper bound holds if no size grows slower than a line; for sequences, than a parabola where a quarter, half and all of
    the present length are on one. It is one for plans with these regions piece by piece.

    Args:
        tracer: As in `largest_size`, like ``step``, ``available_bytes``, ``kinds``, ``remarks``, ``what``, ``dim`` and ``now``.
        step: The step.
        available_bytes: The budget.
        kinds: Regions that run piece by piece.
        remarks: Gets a sentence for each reservation.
        what: Name of the dimension.
        dim: The dimension.
        now: Its present size.
        max_overhead: As in `checkmate.max_batch`; of the step in which nothing runs piece by piece.

    Raises:
        InfeasibleBudgetError: Proven: not even a size of one fits.
        PlanNotFoundError: No size was found that its own trace confirms.
        GraphError: The step has another structure at other sizes.
    """
    traces = _Traces(tracer, dim, {now: step}, kinds)
    if kinds:
        try:
            return _found(traces, available_bytes, remarks, what, now, max_overhead)
        except (InfeasibleBudgetError, PlanNotFoundError, GraphError) as error:
            remarks.append(f"the largest {what} was looked for with nothing in pieces: {error.message}")
    return _found(traces.whole_alone(), available_bytes, remarks, what, now, max_overhead)


def _found(traces: _Traces, available_bytes: int, remarks: list[str], what: str, now: int, max_overhead: MaxOverhead) -> MaxBatch:
    tracer, kinds = traces.tracer, traces.kinds
    sizes = _first_sizes(traces, what, now)
    search = _SizeSearch(traces, sizes, available_bytes)
    found = search.largest(max_overhead, "length" if what == "sequence" else what)
    if what == "sequence" and found.batch > _PARAMETERS.rows and (kinds or tracer.target is not None):
        found = replace(found, batch=found.batch - found.batch % _PARAMETERS.rows)
    elif what == "batch" and kinds:
        found = replace(found, batch=_whole_sequences(found.batch, kinds))
    if found.batch not in sizes and not tracer.has_time_for(tracer.trace_s):
        where = f"lines through {sizes[-2]} and {sizes[-1]}"
        remarks.append(f"the largest {what} is from {where}, and was not traced itself")
        return search.on_curve(found)
    confirmed = search.confirmed(found)
    if confirmed is None:
        raise PlanNotFoundError(
            f"sizes do not grow in a line from {sizes[-2]} to {found.batch}",
            hint=f"give an example whose {what} is nearer to {found.batch}",
        )
    return confirmed


def _check_like_others(graph: Graph, others: Graph, size: int) -> None:
    try:
        check_same_structure(graph, size, others, size)
    except GraphError as error:
        raise GraphError(
            f"the step traces to another structure at {size} than at the sizes that the search was made from",
            hint="give an example of a larger size",
        ) from error


def _whole_sequences(batch: int, kinds: Sequence[RegionGroup]) -> int:
    """The largest batch up to this one of which each piece is some sequences or an equal part of one."""
    count = max(region.count for kind in kinds for region in kind.regions)
    return batch - batch % (count if batch >= count else 1 << (batch.bit_length() - 1))


class _Traces:
    """Traces of a step by the size of a dimension, each made when it is asked for.

    Args:
        tracer: Makes them.
        dim: The dimension.
        steps: Those that there are.
        kinds: Regions of the step that run piece by piece.
    """

    def __init__(self, tracer: DeviceTracer, dim: int, steps: dict[int, TracedStep], kinds: Sequence[RegionGroup]) -> None:
        self.tracer, self.dim, self.kinds = tracer, dim, kinds
        self._steps = steps
        self._in_pieces: dict[int, ChunkedStep[Capture]] = {}

    def whole_alone(self) -> _Traces:
        """The same with nothing in pieces."""
        return _Traces(self.tracer, self.dim, self._steps, ())

    def in_pieces(self, size: int) -> ChunkedStep[Capture]:
        """The step at a size, with the regions piece by piece."""
        if size not in self._in_pieces:
            self._in_pieces[size] = with_same_regions(self._step(size).captured, self.kinds)
        return self._in_pieces[size]

    def planned(self, size: int) -> Graph:
        """The graph of the step at a size, with the regions piece by piece."""
        return self.in_pieces(size).captured.graph

    def whole(self, size: int) -> Graph:
        """The graph of the step at a size, in which nothing runs piece by piece."""
        return self._step(size).graph

    def _step(self, size: int) -> TracedStep:
        if size not in self._steps:
            self._steps[size] = self.tracer.traced(self.dim, size)
        return self._steps[size]


def _first_sizes(traces: _Traces, what: str, now: int) -> tuple[int, ...]:
    """The sizes whose graphs are those at any size, as lines through two of them or parabolas through three.

    Batches are doubled. Sequences are halved, since a longer one may have more positions than the model.
    """
    tracer = traces.tracer
    if what == "sequence" and now > 1:
        half, quarter = now // 2, now // 4
        traces.whole(half)
        wanted = 1 < quarter < half and tracer.has_time_for(_PARAMETERS.solve_s + 2 * tracer.trace_s)
        return (quarter, half, now) if wanted else (half, now)
    try:
        check_same_structure(traces.whole(now), now, traces.whole(2 * now), 2 * now)
    except GraphError:
        # Size 1 is special: torch broadcasts it, and its stride is arbitrary, so that the graph may differ from all others.
        if now > 1 or not tracer.has_time_for(_PARAMETERS.solve_s + tracer.trace_s):
            raise
        return 2, 4
    return now, 2 * now


def _curve(sizes: Sequence[int], graph_at: Callable[[int], Graph]) -> AffineGraph | QuadraticGraph:
    """The graph at any size: a parabola through three sizes, or a line through two."""
    *_, small, large = sizes
    lines = AffineGraph(graph_at(small), small, graph_at(large), large)
    return QuadraticGraph({size: graph_at(size) for size in sizes}, lines) if len(sizes) == 3 else lines


class _SizeSearch:
    """The search for the largest size that fits.

    Args:
        traces: Traces of the step.
        sizes: The sizes from which its graphs at other sizes are made.
        available_bytes: The budget.
    """

    def __init__(self, traces: _Traces, sizes: Sequence[int], available_bytes: int) -> None:
        self.traces, self.available_bytes = traces, available_bytes
        self.curve = _curve(sizes, traces.planned)
        self.whole = _curve(sizes, traces.whole) if traces.kinds else self.curve

    def largest(self, max_overhead: MaxOverhead, size_name: str) -> MaxBatch:
        """The largest size if sizes are these lines or parabolas."""
        limits = Limits(time_s=self.traces.tracer.share_s(SHARES.largest_size))
        return max_batch(
            self.curve,
            budget_bytes=self.available_bytes,
            limits=limits,
            max_overhead=max_overhead,
            reference_at=self.whole if self.traces.kinds else None,
            size_name=size_name,
        )

    def on_curve(self, found: MaxBatch) -> MaxBatch:
        """The same size, with the figures of its plan that lines or parabolas give."""
        size, kinds = found.batch, self.traces.kinds
        return self._with_plan(found, self.curve(size), self.whole(size), kinds) if kinds else found

    def confirmed(self, found: MaxBatch) -> MaxBatch | None:
        """Confirm a size by a trace; reduce it a little if kernels round sizes up.

        Returns:
            The confirmed size, or None if sizes are not lines.
        """
        for _ in range(_PARAMETERS.confirmations):
            size = found.batch
            graph = self.traces.planned(size)
            _check_like_others(graph, self.curve(size), size)
            peak = simulate(graph, Plan.from_order(graph, found.plan.order)).peak_bytes
            if peak <= self.available_bytes:
                return self._with_plan(found, graph, self.traces.whole(size), self.traces.in_pieces(size).groups)
            fewer = size * self.available_bytes // peak
            if peak > _PARAMETERS.near * self.available_bytes or fewer < 1:
                return None
            fewer -= fewer % _PARAMETERS.rows if fewer > _PARAMETERS.rows else 0
            found = replace(found, batch=fewer)
        return None

    def _with_plan(self, found: MaxBatch, graph: Graph, whole: Graph, kinds: Sequence[RegionGroup]) -> MaxBatch:
        """The same size, with its plan on a graph at that size."""
        result = with_pieces(result_of_order(graph, found.plan.order), whole, kinds)
        return replace(found, plan=result.plan, result=result, why=why_in_pieces(found.why, kinds))
