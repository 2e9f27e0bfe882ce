"""`largest_batch`: the largest batch, and the longest sequence, of a training step within a budget."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Unpack

import torch

from checkmate.core.errors import InfeasibleBudgetError, OptionError
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.units import Amount, format_at_least, format_bytes, parse_bytes
from checkmate.frontend import progress
from checkmate.frontend.options import TIME_LIMIT_S, takes_options
from checkmate.studies.max_batch import ONE_EXTRA_FORWARD, MaxBatch, MaxOverhead
from checkmate.torch.forecast.largest_size import SizeSearch
from checkmate.torch.forecast.tracer import DeviceTracer, TracedStep
from checkmate.torch.options import ForecastOptions, fields_of
from checkmate.torch.step.arguments import Example, Loss
from checkmate.torch.step.recipe import StepRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch, and the longest sequence if requested, for which a plan of the step keeps a budget.

    Attributes:
        budget_bytes: The budget.
        batch: The largest batch found.
        plan: A plan of the step at that batch, for the argument ``plan`` of `checkmate.torch.compile`.
        result: Its peak and cost.
        upper_bound: No larger batch has a plan within the budget.
        why: The reason for the upper bound, in words.
        longest_sequence: The longest sequence at the batch of the example: `MaxBatch.batch` is its length. None if it was not
            requested.
        remarks: Sentences on unconfirmed results.
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


@takes_options(ForecastOptions, StepRecipe, time_limit_s=2 * TIME_LIMIT_S)
def largest_batch(
    model: torch.nn.Module,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example: Example,
    budget: Amount,
    sequence_dim: int | None = None,
    max_overhead: MaxOverhead = ONE_EXTRA_FORWARD,
    clip_norm: float | None = None,
    **options: Unpack[ForecastOptions],
) -> LargestBatch:
    """The largest batch for which a plan of a training step keeps a budget, in place of halving it until nothing fails.

    Nothing is allocated at the tried sizes, except that each distinct op runs alone to be measured. The step is traced at the
    batch of the example and at twice that batch. Every size is a line through the two; a trace at the batch found confirms it.
    Sequences are traced at three lengths, and every size is a parabola, because attention without a fused kernel grows with the
    square of the length. The upper bound holds if sizes are these lines and parabolas, or grow faster.

    Args:
        model: As in `compile`, like ``loss``, ``optimizer``, ``whole``, ``clip_norm`` and ``autocast``.
        loss: The loss.
        optimizer: The optimizer. Its state counts, also before its first step.
        example: A batch of any size, whose tensors all have the batch as first dimension. Only shapes and types are used.
        budget: Total bytes on the device, such as ``"8GiB"``.
        sequence_dim: A dimension of the example's tensors, e.g. 1; its largest size at the example's batch is also searched.
        max_overhead: Limit on the cost of the plan: a factor over computing each op once, such as 1.3, or one extra forward.
        clip_norm: Largest norm of all gradients together.
        options: Further options; `ForecastOptions` describes them.

    Raises:
        InfeasibleBudgetError: Proven: not even a batch of one keeps the budget.
        PlanNotFoundError: No batch was confirmed by its own trace.
        OptionError: The tensors of the example have no common size in the dimension.
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
    given = {"model": model, "loss": loss, "optimizer": optimizer, "example": example, "clip_norm": clip_norm}
    tracer = DeviceTracer(StepRecipe(**given, **fields_of(StepRecipe, options)), until)
    _check_size(tracer, 0, "all tensors of the example need the batch as first dimension")
    if sequence_dim is not None:
        _check_size(tracer, sequence_dim, "give the dimension in which all tensors have the sequence length, usually 1")
    with progress.shown("looking for the largest batch"):
        step = tracer.traced()
        _check_update(step, budget_bytes)
        search = SizeSearch(tracer=tracer, step=step, available_bytes=budget_bytes, max_overhead=max_overhead)
        return _largest(search, sequence_dim, began)


def _largest(search: SizeSearch, sequence_dim: int | None, began: float) -> LargestBatch:
    """The largest batch, and the longest sequence, each in half of the remaining time."""
    tracer, until, longest = search.tracer, search.tracer.until, None
    longer = None if sequence_dim is None else replace(search, name="sequence", dim=sequence_dim, _graphs={})
    if longer is not None:
        tracer.until -= (until - time.perf_counter()) / 2
    found = search.found()
    if longer is not None:
        tracer.until = until
        longest = longer.found()
    return LargestBatch(
        budget_bytes=search.available_bytes,
        batch=found.batch,
        plan=found.plan,
        result=found.result,
        upper_bound=found.upper_bound,
        why=found.why,
        longest_sequence=longest,
        remarks=tuple(search.remarks),
        elapsed_s=time.perf_counter() - began,
    )


def _check_size(tracer: DeviceTracer, dim: int, hint: str) -> None:
    if tracer.size(dim) is None:
        raise OptionError(f"the tensors of the example do not share one size in dimension {dim}", hint=hint)


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
