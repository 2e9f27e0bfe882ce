"""The largest batch or sequence that fits: two traces, a line for each tensor size, and further traces that confirm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

import msgspec

from checkmate.core.errors import CheckmateError, GraphError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Limits
from checkmate.core.simulate import simulate
from checkmate.frontend.planner import result_of_order
from checkmate.studies.affine import AffineGraph, check_same_structure
from checkmate.studies.max_batch import ONE_EXTRA_FORWARD, MaxBatch, MaxOverhead, max_batch
from checkmate.torch.forecast.tracer import DeviceTracer, TracedStep

_SOLVE_S = 2.0
"""Least seconds to start a search for plans."""

_ROWS = 128
"""Attention kernels round lengths up to multiples of these rows (`checkmate.torch.emulate.workspace`)."""


@dataclass(slots=True, kw_only=True)
class SizeSearch:
    """The search for the largest size of a dimension of the example's tensors for which a plan fits.

    The upper bound holds if no size grows slower than a line; for sequences, than a parabola if a quarter, half and all of the
    present length are on one. It bounds plans with nothing in pieces.
    """

    tracer: DeviceTracer
    step: TracedStep  # at the size of the example
    available_bytes: int
    name: Literal["batch", "sequence"] = "batch"
    dim: int = 0
    max_overhead: MaxOverhead = ONE_EXTRA_FORWARD
    remarks: list[str] = field(default_factory=list[str])  # reservations, or the reason why there is no answer
    _graphs: dict[int, Graph] = field(default_factory=dict[int, Graph])

    def run(self) -> MaxBatch | None:
        """The largest size; None, with a remark, if unknown."""
        if self.step.update_bytes > self.available_bytes:
            return None
        if not self.tracer.has_time_for(2 * _SOLVE_S + self.tracer.trace_s):
            self.remarks.append(f"the largest {self.name} was not looked for: it takes another trace; raise time_limit_s")
            return None
        try:
            return self.found()
        except InfeasibleBudgetError as error:
            self.remarks.append(f"not even a {self.name} of one fits: {error.message}")
        except (CheckmateError, RuntimeError) as error:
            self.remarks.append(f"the largest {self.name} is not known: {str(error).splitlines()[0]}")
        return None

    def found(self) -> MaxBatch:
        """The largest size.

        Raises:
            InfeasibleBudgetError: Proven: not even a size of one fits.
            PlanNotFoundError: No size was confirmed by its own trace.
            GraphError: The step has another structure at other sizes.
        """
        tracer = self.tracer
        sizes = self._first_sizes()
        curve = _curve(sizes, self._graph)
        found = max_batch(
            curve,
            budget_bytes=self.available_bytes,
            limits=Limits(time_s=tracer.share_s(0.6)),  # the rest is for the trace that confirms the size
            max_overhead=self.max_overhead,
            size_name="length" if self.name == "sequence" else self.name,
        )
        # On an emulated device, attention pads other lengths to multiples of 8 by separate ops.
        if self.name == "sequence" and found.batch > _ROWS and tracer.target is not None:
            found = replace(found, batch=found.batch - found.batch % _ROWS)
        if found.batch not in sizes and not tracer.has_time_for(tracer.trace_s):
            where = f"lines through {sizes[-2]} and {sizes[-1]}"
            self.remarks.append(f"the largest {self.name} is from {where}, and was not traced itself")
            return found
        # A size that its own trace refutes is reduced in proportion: one more trace is enough if kernels round sizes up.
        size = found.batch
        for _ in range(2):
            graph = self._graph(size)
            _check_like_others(graph, curve(size), size)
            peak = simulate(graph, Plan.from_order(graph, found.plan.order)).peak_bytes
            if peak <= self.available_bytes:
                result = result_of_order(graph, found.plan.order)
                return replace(found, batch=size, plan=result.plan, result=result)
            size = size * self.available_bytes // peak
            if peak > 1.02 * self.available_bytes or size < 1:
                break
            size -= size % _ROWS if size > _ROWS else 0
        raise PlanNotFoundError(
            f"sizes do not grow in a line from {sizes[-2]} to {found.batch}",
            hint=f"give an example whose {self.name} is nearer to {found.batch}",
        )

    def _first_sizes(self) -> tuple[int, ...]:
        """The sizes to trace: lines through two of the graphs, or parabolas through three, give the graph at any size.

        Batches are doubled. Sequences are halved, because a longer one may have more positions than the model.
        """
        tracer, now = self.tracer, self.tracer.size(self.dim)
        assert now is not None
        self._graphs[now] = self.step.graph
        if self.name == "sequence" and now > 1:
            half, quarter = now // 2, now // 4
            self._graph(half)
            wanted = 1 < quarter < half and tracer.has_time_for(_SOLVE_S + 2 * tracer.trace_s)
            return (quarter, half, now) if wanted else (half, now)
        try:
            check_same_structure(self._graph(now), now, self._graph(2 * now), 2 * now)
        except GraphError:
            # Size 1 is special: torch broadcasts it, and its stride is arbitrary: the graph may differ from all others.
            if now > 1 or not tracer.has_time_for(_SOLVE_S + tracer.trace_s):
                raise
            return 2, 4
        return now, 2 * now

    def _graph(self, size: int) -> Graph:
        """The graph of the step at a size."""
        if size not in self._graphs:
            self._graphs[size] = self.tracer.traced(self.dim, size).graph
        return self._graphs[size]


def _check_like_others(graph: Graph, others: Graph, size: int) -> None:
    try:
        check_same_structure(graph, size, others, size)
    except GraphError as error:
        raise GraphError(
            f"the step traces to another structure at {size} than at the sizes that the search was made from",
            hint="give an example of a larger size",
        ) from error


def _curve(sizes: Sequence[int], graph_at: Callable[[int], Graph]) -> AffineGraph | QuadraticGraph:
    """The graph at any size: a parabola through three sizes, or a line through two."""
    *_, small, large = sizes
    lines = AffineGraph(graph_at(small), small, graph_at(large), large)
    return QuadraticGraph({size: graph_at(size) for size in sizes}, lines) if len(sizes) == 3 else lines


@dataclass(frozen=True, slots=True)
class QuadraticGraph:
    """Graph of a step at any size of a dimension, for example the sequence length of attention without a fused kernel.

    Each size and cost is the parabola through its three values if no coefficient is negative: the parabola then rises
    everywhere. Otherwise it is the value of `AffineGraph` for the two nearest traces.
    """

    traces: Mapping[int, Graph]  # three, by size
    lines: AffineGraph  # through the two nearest sizes

    def __post_init__(self) -> None:
        first, _, third = sorted(self.traces)
        check_same_structure(self.traces[first], first, self.traces[third], third)

    def __call__(self, size: int) -> Graph:
        """The graph at a size."""
        line = self.lines(size)
        graphs = [self.traces[at] for at in sorted(self.traces)]

        def value(get: Callable[[Graph], int]) -> int:
            return _on_parabola(size, sorted(self.traces), [get(graph) for graph in graphs], get(line))

        ops = tuple(
            msgspec.structs.replace(
                op,
                cost=value(lambda g, o=o: g.ops[o].cost),
                workspace_bytes=value(lambda g, o=o: g.ops[o].workspace_bytes),
                replay_bytes=value(lambda g, o=o: g.ops[o].replay_bytes),
            )
            for o, op in enumerate(line.ops)
        )
        values = tuple(
            msgspec.structs.replace(v, size_bytes=value(lambda g, i=i: g.values[i].size_bytes)) for i, v in enumerate(line.values)
        )
        return msgspec.structs.replace(line, ops=ops, values=values, resident_bytes=value(lambda g: g.resident_bytes))


def _on_parabola(size: int, at: Sequence[int], known: Sequence[int], on_line: int) -> int:
    """The parabola through three values, rounded up; the value on the line if a coefficient is negative."""
    (a, b, c), (x, y, z) = at, known
    first, second = Fraction(y - x, b - a), Fraction(z - y, c - b)
    square = (second - first) / (c - a)
    linear = first - square * (a + b)
    constant = x - linear * a - square * a * a
    if min(square, linear, constant) < 0:
        return on_line
    return -int(-(square * size * size + linear * size + constant) // 1)
