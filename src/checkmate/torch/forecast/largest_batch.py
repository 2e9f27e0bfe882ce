"""`largest_batch`: the largest batch, and the longest sequence, of a training step within a budget."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from checkmate.core.errors import InfeasibleBudgetError, OptionError
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.units import Amount, format_at_least, format_bytes, parse_bytes
from checkmate.frontend import progress
from checkmate.studies.max_batch import ONE_EXTRA_FORWARD, MaxBatch, MaxOverhead
from checkmate.torch.forecast.in_pieces import least_peak
from checkmate.torch.forecast.largest_size import find_largest_size
from checkmate.torch.forecast.tracer import DeviceTracer, TracedStep
from checkmate.torch.options import Chunking, check_chunking
from checkmate.torch.step.arguments import validate_arguments
from checkmate.torch.step.batch import Example
from checkmate.torch.step.programs import Loss


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch, and the longest sequence if it was asked for, for which a plan of the step keeps a budget.

    Attributes:
        budget_bytes: The budget.
        batch: The largest batch found.
        plan: A plan of the step at that batch, for the argument ``plan`` of `checkmate.torch.compile`.
        result: Its peak and cost.
        upper_bound: No larger batch than this has such a plan.
        why: The reason for the upper bound, in words.
        longest_sequence: The longest sequence at the batch of the example: `MaxBatch.batch` is its length. None if it was not
            asked for.
        remarks: Sentences on what was not confirmed.
        elapsed_s: Wall seconds.
    """

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
        lines = [_described("batch", self.batch, self.result, self.upper_bound, self.why)]
        longest = self.longest_sequence
        if longest is not None:
            lines.append(_described("sequence", longest.batch, longest.result, longest.upper_bound, longest.why))
        return "\n".join([f"within {format_bytes(self.budget_bytes)}", *lines, *self.remarks])

    __str__ = render


def largest_batch(
    model: torch.nn.Module,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example: Example,
    budget: Amount,
    sequence_dim: int | None = None,
    max_overhead: MaxOverhead = ONE_EXTRA_FORWARD,
    whole: bool | None = None,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    chunking: Chunking = "off",
    time_limit_s: float = 60.0,
) -> LargestBatch:
    """The largest batch for which a plan of a training step keeps a budget, in place of halving it until nothing fails.

    Nothing is allocated at the sizes that are tried, except that each distinct op is run alone to measure it. The step is traced
    at the batch of the example and at twice that; every size is a line through the two, and the batch found is confirmed by a
    trace at it. Sequences are traced at three lengths and every size is a parabola, since attention without a fused kernel grows
    with the square of the length. The upper bound holds if sizes are these lines and parabolas, or grow faster.

    Args:
        model: As in `compile`, like ``loss``, ``optimizer``, ``whole``, ``clip_norm`` and ``autocast``.
        loss: The loss.
        optimizer: The optimizer. Its state counts, also before its first step.
        example: A batch of any size, whose tensors all have the batch as first dimension. Only shapes and types are used.
        budget: Total bytes on the device, such as ``"8GiB"``.
        sequence_dim: A dimension of the example's tensors, such as 1, whose largest size at the example's batch is also wanted.
        max_overhead: Limit on the cost of the plan: a factor over computing each op once, such as 1.3, or one extra forward.
        whole: Whether the optimizer's updates are planned with the rest.
        clip_norm: Largest norm of all gradients together.
        autocast: Type of `torch.autocast` around model and loss.
        chunking: With ``"auto"``, ops on large tensors may run piece by piece: the plan is then one of the graph with the regions
            that its result names. To train at that batch give `compile` the budget and the same ``chunking``, not the plan.
        time_limit_s: Seconds for everything. Tracing a large model takes half a minute, and three traces are needed.

    Raises:
        InfeasibleBudgetError: Proven: not even a batch of one keeps the budget.
        PlanNotFoundError: No batch was found that its own trace confirms.
        OptionError: The tensors of the example have no common size in the dimension, or ``chunking`` is ``"exact"``.
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
    check_chunking(chunking)
    budget_bytes = parse_bytes(budget)
    example = validate_arguments(model, loss, optimizer, example)
    tracer = DeviceTracer(model, loss, example, optimizer, whole, autocast, None, began + time_limit_s, clip_norm)
    batch = _size(tracer, 0, "all tensors of the example need the batch as first dimension")
    sequence = None
    if sequence_dim is not None:
        sequence = _size(tracer, sequence_dim, "give the dimension in which all tensors have the sequence length, usually 1")
    remarks: list[str] = []
    with progress.shown("looking for the largest batch"):
        step = tracer.traced()
        _check_update(step, budget_bytes)
        tracer.until -= 0 if sequence is None else (tracer.until - time.perf_counter()) / 2
        kinds = least_peak(step, chunking).groups
        found = find_largest_size(tracer, step, budget_bytes, kinds, remarks, "batch", 0, batch, max_overhead)
        longest = None
        if sequence is not None and sequence_dim is not None:
            tracer.until = began + time_limit_s
            longest = find_largest_size(
                tracer, step, budget_bytes, kinds, remarks, "sequence", sequence_dim, sequence, max_overhead
            )
    return LargestBatch(
        budget_bytes=budget_bytes,
        batch=found.batch,
        plan=found.plan,
        result=found.result,
        upper_bound=found.upper_bound,
        why=found.why,
        longest_sequence=longest,
        remarks=tuple(remarks),
        elapsed_s=time.perf_counter() - began,
    )


def _size(tracer: DeviceTracer, dim: int, hint: str) -> int:
    size = tracer.size(dim)
    if size is None:
        raise OptionError(f"the tensors of the example do not share one size in dimension {dim}", hint=hint)
    return size


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
    pieces = "".join(f"; {remark}" for remark in result.remarks)
    return f"{what} {size}: peak {format_bytes(result.peak_bytes)} at {result.overhead:.3f}x the cost; {exact}: {why}{pieces}"
