"""The largest batch or sequence that fits: two traces, a line for each tensor size, and further traces that confirm."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Unpack

import torch
from msgspec import structs

from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, OptionError, PlanNotFoundError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Limits, Result
from checkmate.core.simulate import simulate
from checkmate.core.units import Amount, format_at_least, format_bytes, parse_bytes
from checkmate.frontend import progress
from checkmate.frontend.options import TIME_LIMIT_S, takes_options
from checkmate.studies.affine import AffineGraph, check_same_structure, combined
from checkmate.studies.max_batch import ONE_EXTRA_FORWARD, MaxBatch, MaxOverhead, max_batch
from checkmate.torch.forecast.tracer import DeviceTracer, Growing, TracedStep
from checkmate.torch.options import ForecastOptions, fields_of
from checkmate.torch.partition.copies import measured_host
from checkmate.torch.step.arguments import Example, Loss
from checkmate.torch.step.recipe import StepRecipe

_SOLVE_S = 2.0
"""Least seconds to start a search for plans."""

SEQUENCE = "sequence"
"""The name of a size that is halved for further traces."""

_ROWS = 128
"""Attention kernels round lengths up to multiples of these rows (`checkmate.torch.emulate.workspace`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch, and the longest sequence if requested, for which a plan of the step keeps a budget.

    Attributes:
        name: The name of the size: "batch", or the first in ``dynamic_shapes``.
        budget_bytes: The budget.
        batch: The largest size found.
        plan: A plan of the step at that batch, for the argument ``plan`` of `checkmate.torch.compile`.
        result: Its peak and cost.
        upper_bound: No larger batch has a plan within the budget.
        why: The reason for the upper bound, in words.
        longest_sequence: The longest sequence at the batch of the example: `MaxBatch.batch` is its length. None if it was not
            requested.
        remarks: Sentences on unconfirmed results.
        elapsed_s: Wall seconds.
    """

    name: str
    budget_bytes: int
    batch: int
    plan: Plan
    result: Result
    upper_bound: int
    why: str
    longest_sequence: MaxBatch | None
    remarks: tuple[str, ...]
    elapsed_s: float

    def render(self) -> str:
        """The sizes with their bounds as text."""
        lines = [_described(self.name, self.batch, self.result, self.upper_bound, self.why)]
        longest = self.longest_sequence
        if longest is not None:
            lines.append(_described(SEQUENCE, longest.batch, longest.result, longest.upper_bound, longest.why))
        return "\n".join([f"within {format_bytes(self.budget_bytes)}", *lines, *self.remarks])

    __str__ = render


@takes_options(ForecastOptions, StepRecipe, time_limit_s=2 * TIME_LIMIT_S, host=None)
def largest_batch(
    model: torch.nn.Module | Callable[..., Any],
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example: Example,
    budget: Amount,
    sequence_dim: int | None = None,
    dynamic_shapes: Any = None,
    max_overhead: MaxOverhead = ONE_EXTRA_FORWARD,
    **options: Unpack[ForecastOptions],
) -> LargestBatch:
    """The largest batch for which a plan of a training step keeps a budget, in place of halving it until nothing fails.

    Nothing is allocated at the tried sizes, except that each distinct op runs alone to be measured. The step is traced at the
    batch of the example and at twice that batch. Every size is a line through the two; a trace at the batch found confirms it.
    Sequences are traced at three lengths, and every size is a parabola, because attention without a fused kernel grows with the
    square of the length. The upper bound holds if sizes are these lines and parabolas, or grow faster.

    Args:
        model: As in `compile`, like ``loss`` and ``optimizer``.
        loss: The loss.
        optimizer: The optimizer. Its state counts, also before its first step.
        example: A batch of any size, whose tensors all have the batch as first dimension, or ``dynamic_shapes`` names the
            dimensions that grow. Only shapes and types are used.
        budget: Total bytes on the device, such as ``"8GiB"``.
        sequence_dim: A dimension of the example's tensors, e.g. 1; its largest size at the example's batch is also searched.
        dynamic_shapes: Names of dimensions of the example's tensors, as `torch.export.export` takes them, or as strings:
            ``(None, {0: "edges"}, {0: "edges"})``. The size searched is then that of the first name, and sizes of other names
            grow in proportion to it, as the atoms and the edges of a structure do.
        max_overhead: Limit on the cost of the plan: a factor over computing each op once, such as 1.3, or one extra forward.
        options: Further options; `ForecastOptions` describes them.

    Raises:
        InfeasibleBudgetError: Proven: not even a batch of one keeps the budget.
        PlanNotFoundError: No batch was confirmed by its own trace.
        OptionError: The tensors of the example have no common size in the dimension, or ``dynamic_shapes`` does not match them.
        GraphBreakError: The step cannot be traced as one graph.
        GraphError: The step has another structure at other sizes.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(256, 256)
        >>> x, y = torch.ones(4, 256), torch.ones(4, 256)
        >>> found = largest_batch(model, torch.nn.functional.mse_loss, example=(x, y), budget="2MiB")
        >>> found.batch == found.upper_bound, found.result.peak_bytes <= 2 * 2**20
        (True, True)
    """
    began = time.perf_counter()
    until = began + options.get("time_limit_s", 2 * TIME_LIMIT_S)
    budget_bytes = parse_bytes(budget)
    given = {"model": model, "loss": loss, "optimizer": optimizer, "example": example}
    host = options.get("host")
    recipe = StepRecipe(**given, **fields_of(StepRecipe, options), on_host=host is not None)
    tracer = DeviceTracer(recipe, until, host=None if host is None else measured_host(recipe.device, parse_bytes(host)))
    if dynamic_shapes is None:
        hint = 'give batches first in all tensors, or name the dimensions that grow: dynamic_shapes=(None, {0: "edges"})'
        larger = _along(example, "batch", 0, hint)
    else:
        larger = Growing.named(example, dynamic_shapes)
    longer = None if sequence_dim is None else sequence_of(example, sequence_dim)
    with progress.shown(f"looking for the largest {larger.name}"):
        step = tracer.traced()
        _check_update(step, budget_bytes)
        search = SizeSearch(tracer=tracer, step=step, available_bytes=budget_bytes, growing=larger, max_overhead=max_overhead)
        return _largest(search, None if longer is None else replace(search, growing=longer, _graphs={}), began)


def _largest(search: SizeSearch, longer: SizeSearch | None, began: float) -> LargestBatch:
    """The largest batch, and the longest sequence, each in half of the remaining time."""
    tracer, until = search.tracer, search.tracer.until
    if longer is not None:
        tracer.until -= (until - time.perf_counter()) / 2
    found = search.found()
    tracer.until = until
    return LargestBatch(
        name=search.growing.name,
        budget_bytes=search.available_bytes,
        batch=found.batch,
        plan=found.plan,
        result=found.result,
        upper_bound=found.upper_bound,
        why=found.why,
        longest_sequence=None if longer is None else longer.found(),
        remarks=tuple(search.remarks),
        elapsed_s=time.perf_counter() - began,
    )


def sequence_of(example: Example, dim: int) -> Growing:
    """The dimension of the sequence."""
    hint = "give the dimension in which all tensors of the example have the sequence length, usually 1"
    return _along(example, SEQUENCE, dim, f"sequence_dim={dim}: {hint}")


def _along(example: Example, name: str, dim: int, hint: str) -> Growing:
    found = Growing.along(example, name, dim)
    if found is None:
        raise OptionError(f"the tensors of the example do not share one size in dimension {dim}", hint=hint)
    return found


def _check_update(step: TracedStep, budget_bytes: int) -> None:
    """Refuse a budget that the optimizer's step after the backward exceeds at any batch."""
    if step.update_bytes > budget_bytes:
        raise InfeasibleBudgetError(
            f"the optimizer's step needs {format_bytes(step.update_bytes)} with all gradients, and the budget is "
            f"{format_bytes(budget_bytes)}",
            hint=f"raise the budget to at least {format_at_least(step.update_bytes)}, or plan the updates with whole=True",
            budget_bytes=budget_bytes,
            floor_bytes=step.update_bytes,
        )


def _described(what: str, size: int, result: Result, upper_bound: int, why: str) -> str:
    exact = "no larger one fits" if size == upper_bound else f"none above {upper_bound} fits"
    return f"{what} {size}: peak {format_bytes(result.peak_bytes)} at {result.overhead:.3f}x the cost; {exact}: {why}"


@dataclass(slots=True, kw_only=True)
class SizeSearch:
    """The search for the largest size of a dimension of the example's tensors for which a plan fits.

    The upper bound holds if no size grows slower than a line; for sequences, than a parabola if a quarter, half and all of the
    present length are on one. It bounds plans with nothing in pieces.
    """

    tracer: DeviceTracer
    step: TracedStep  # at the size of the example
    available_bytes: int
    growing: Growing
    max_overhead: MaxOverhead = ONE_EXTRA_FORWARD
    remarks: list[str] = field(default_factory=list[str])  # reservations, or the reason why there is no answer
    _graphs: dict[int, Graph] = field(default_factory=dict[int, Graph])

    @property
    def name(self) -> str:
        """The name of the size."""
        return self.growing.name

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

        Raises `InfeasibleBudgetError` if not even a size of one fits, which is proven; `PlanNotFoundError` if no size was
        confirmed by its own trace; `GraphError` if the step has another structure at other sizes.
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
            size_name="length" if self.name == SEQUENCE else self.name,
            host=tracer.host,
        )
        found = replace(found, batch=self._rounded(found.batch))
        if found.batch < 1:
            raise PlanNotFoundError("no plan was found for one row in each micro batch", hint="lower micro_batches")
        if found.batch not in sizes and not tracer.has_time_for(tracer.trace_s):
            self.remarks.append(f"the largest {self.name} is from lines through {small} and {large}, and was not traced itself")
            return found
        # A size that its own trace refutes is reduced in proportion: one more trace is enough if kernels round sizes up.
        size = found.batch
        for _ in range(2):
            graph = self._graph(size)
            check_same_structure(traces[large], large, graph, size)
            plan = structs.replace(found.plan, graph_digest=graph.digest)
            peak = simulate(graph, plan).peak_bytes
            if peak <= self.available_bytes:
                return replace(found, batch=size, plan=plan, result=evaluate(graph, plan))
            size = size * self.available_bytes // peak
            size = self._rounded(size - size % _ROWS if size > _ROWS else size)
            if peak > 1.02 * self.available_bytes or size < 1:
                break
        raise PlanNotFoundError(
            f"sizes do not grow in a line from {small} to {found.batch}",
            hint=f"give an example whose {self.name} is nearer to {found.batch}",
        )

    def _rounded(self, size: int) -> int:
        """The largest possible size that is no larger."""
        if self.name != SEQUENCE:
            return size - size % self.tracer.recipe.micro_batches
        # On an emulated device, attention pads other lengths to multiples of 8 by separate ops.
        return size - size % _ROWS if size > _ROWS and self.tracer.target is not None else size

    def _first_sizes(self) -> tuple[int, ...]:
        """The sizes to trace: lines through two of the graphs, or parabolas through three, give the graph at any size.

        Batches are doubled. Sequences are halved, because a longer one may have more positions than the model. Size 1 is special:
        torch broadcasts it, and its stride is arbitrary, so that the graph may differ from all others.
        """
        tracer, now = self.tracer, self.growing.size
        self._graphs[now] = self.step.graph
        if self.name != SEQUENCE or now < 4:
            now = max(2 * tracer.recipe.micro_batches, now)
            return now, 2 * now
        half, quarter = now // 2, now // 4
        self._graph(half)
        wanted = quarter > 1 and tracer.has_time_for(_SOLVE_S + 2 * tracer.trace_s)
        return (quarter, half, now) if wanted else (half, now)

    def _graph(self, size: int) -> Graph:
        """The graph of the step at a size."""
        if size not in self._graphs:
            self._graphs[size] = self.tracer.traced(self.growing, size).graph
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

        return combined([lines(size), traces[a], traces[b], traces[c]], lambda v: value(*v), lambda v: value(*v))

    return graph_at
