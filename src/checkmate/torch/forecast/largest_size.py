"""The largest batch or sequence that fits: two traces, a line for each tensor size, and further traces that confirm."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Limits
from checkmate.core.simulate import simulate
from checkmate.frontend.planner import result_of_order
from checkmate.studies.affine import AffineGraph, check_same_structure, combined
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
        traces = {size: self._graph(size) for size in sizes}
        *_, small, large = sizes
        lines = AffineGraph(traces[small], small, traces[large], large)
        curve = parabolas(traces, lines) if len(sizes) == 3 else lines
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
            self.remarks.append(f"the largest {self.name} is from lines through {small} and {large}, and was not traced itself")
            return found
        # A size that its own trace refutes is reduced in proportion: one more trace is enough if kernels round sizes up.
        size = found.batch
        for _ in range(2):
            graph = self._graph(size)
            check_same_structure(traces[large], large, graph, size)
            peak = simulate(graph, Plan.from_order(graph, found.plan.order)).peak_bytes
            if peak <= self.available_bytes:
                result = result_of_order(graph, found.plan.order)
                return replace(found, batch=size, plan=result.plan, result=result)
            size = size * self.available_bytes // peak
            if peak > 1.02 * self.available_bytes or size < 1:
                break
            size -= size % _ROWS if size > _ROWS else 0
        raise PlanNotFoundError(
            f"sizes do not grow in a line from {small} to {found.batch}",
            hint=f"give an example whose {self.name} is nearer to {found.batch}",
        )

    def _first_sizes(self) -> tuple[int, ...]:
        """The sizes to trace: lines through two of the graphs, or parabolas through three, give the graph at any size.

        Batches are doubled. Sequences are halved, because a longer one may have more positions than the model. Size 1 is special:
        torch broadcasts it, and its stride is arbitrary, so that the graph may differ from all others.
        """
        tracer, now = self.tracer, self.tracer.size(self.dim)
        assert now is not None
        self._graphs[now] = self.step.graph
        if self.name == "batch" or now < 4:
            return max(2, now), 2 * max(2, now)
        half, quarter = now // 2, now // 4
        self._graph(half)
        wanted = quarter > 1 and tracer.has_time_for(_SOLVE_S + 2 * tracer.trace_s)
        return (quarter, half, now) if wanted else (half, now)

    def _graph(self, size: int) -> Graph:
        """The graph of the step at a size."""
        if size not in self._graphs:
            self._graphs[size] = self.tracer.traced(self.dim, size).graph
        return self._graphs[size]


def parabolas(traces: Mapping[int, Graph], lines: AffineGraph) -> Callable[[int], Graph]:
    """The graph of a step at any size, for example the sequence length of attention without a fused kernel.

    Each size and cost is the parabola through its values in three traces, rounded up, if no coefficient is negative: the
    parabola then rises everywhere. Otherwise it is on a line of ``lines``, which go through the two nearest traces.
    """
    a, b, c = sorted(traces)
    check_same_structure(traces[a], a, traces[c], c)

    def graph_at(size: int) -> Graph:
        def value(on_line: int, x: int, y: int, z: int) -> int:
            first, second = Fraction(y - x, b - a), Fraction(z - y, c - b)
            square = (second - first) / (c - a)
            linear = first - square * (a + b)
            constant = x - linear * a - square * a * a
            return on_line if min(square, linear, constant) < 0 else math.ceil(square * size * size + linear * size + constant)

        return combined([lines(size), traces[a], traces[b], traces[c]], value, value)

    return graph_at
