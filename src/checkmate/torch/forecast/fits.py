"""Does a step fit a device that is not there, and how much of it does?"""

from __future__ import annotations

import functools
import os
import time
from dataclasses import replace

import torch

from checkmate.core.errors import CheckmateError, GraphError, InfeasibleBudgetError, OptionError
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Reason, Result
from checkmate.core.simulate import simulate
from checkmate.core.units import Amount, format_bytes, parse_bytes
from checkmate.cost.device import Device, load_device
from checkmate.solvers.given import keep_everything, run_order
from checkmate.solvers.solve import solve
from checkmate.studies.affine import AffineGraph
from checkmate.studies.fit_report import Fits, Verdict
from checkmate.studies.max_batch import MaxBatch, max_batch
from checkmate.studies.min_budget import min_budget
from checkmate.studies.reserved import reserved_bytes
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.forecast.tracer import DeviceTracer, TracedStep
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.step.programs import Loss
from checkmate.torch.step.step import Example, checked

_SOLVE_S = 2.0  # the least that is worth a search
_TRIES = 2
_NEAR = 1.02  # how far a size may be from its line for a smaller one to be tried
_ROWS = 128  # to which kernels of attention round lengths up


def fits(
    model: torch.nn.Module,
    loss: Loss | None = None,
    *,
    example: Example,
    device: Device | str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | str | None = None,
    whole: bool | None = None,
    autocast: torch.dtype | None = None,
    memory: Amount | None = None,
    headroom: float = 0.03,
    sequence_dim: int | None = None,
    time_limit_s: float = 60.0,
) -> Fits:
    """Whether a training step fits a device, which need not be there; exact in bytes, approximate in time.

    The step is traced on shapes alone: nothing runs and nothing is allocated, so that model and example may be on the meta
    device (``with torch.device("meta"): ...``). Sizes of tensors are exact. Times are those of a roofline: no device is
    faster. What is not known of workspace is said in ``remarks``; the headroom is for it.

    Args:
        model: As in `compile`, like ``loss`` and ``example``.
        loss: The loss.
        example: A batch.
        device: A device's name (``"H100"``, ``"RTX 4090"``), a profile, or a file with one. For ``"CPU"`` each distinct op
            runs alone once, here, to measure its workspace.
        optimizer: ``"sgd"``, ``"momentum"``, ``"adam"``, ``"adamw"``, or an optimizer of the model's parameters.
        whole: Whether the optimizer's updates are planned with the rest, as in `compile`. False is a plain loop.
        autocast: As in `compile`. The rules are the device's: softmax, norms and losses become float32 on a CUDA device.
        memory: What the device has, instead of what its profile says.
        headroom: Share of the memory that is left free: for fragmentation, and for workspace that is not known.
        sequence_dim: Dimension of the example's tensors whose largest size is asked for besides the batch's.
        time_limit_s: Seconds for all of it. Tracing a large model takes half a minute; what there is no time for is
            left out, and a remark says so.

    Returns:
        The answers; true where the step fits.

    Raises:
        OptionError: The device or the optimizer is not known, or the memory leaves nothing for the step.
        GraphBreakError: The step cannot be traced as one graph.

    Examples:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model, x, y = torch.nn.Linear(1024, 1024), torch.empty(64, 1024), torch.empty(64, 1024)
        >>> answer = fits(model, torch.nn.functional.mse_loss, example=(x, y), device="H100", optimizer="adamw")
        >>> bool(answer), answer.verdict, answer.parameter_bytes, answer.state_bytes
        (True, 'keeps everything', 4198400, 8396800)
    """
    began = time.perf_counter()
    target = EmulatedDevice(load_device(device), cpu_costs=Profiler())
    memory_bytes = target.device.memory_bytes if memory is None else parse_bytes(memory)
    headroom_bytes = _share(headroom, memory_bytes)
    available = memory_bytes - target.device.context_bytes - headroom_bytes
    if available <= 0:
        raise OptionError(
            f"{format_bytes(memory_bytes)} leave nothing beside {format_bytes(target.device.context_bytes)} of context and "
            f"{format_bytes(headroom_bytes)} of headroom",
            hint="give the device's memory, such as memory='24GiB', or less headroom",
        )
    tracer = DeviceTracer(model, loss, checked(example, loss), optimizer, whole, autocast, target, began + time_limit_s)
    sequence = None if sequence_dim is None else tracer.size(sequence_dim)
    if sequence_dim is not None and sequence is None:
        raise OptionError(f"sequence_dim={sequence_dim}: the example's tensors have no such dimension of one size")
    step = tracer.traced()
    remarks = _caveats(target, step)
    smallest = min_budget(step.graph, limits=Limits(time_s=tracer.share_s(0.2)))
    verdict, result = _best(step, smallest, available, tracer, remarks)
    batch = tracer.size(0)
    hunt = functools.partial(_largest, tracer, step, available, remarks)
    floor_bytes = max(smallest.budget_bytes, step.update_bytes)
    reserved = _reserved(step, result, memory_bytes, target.device, remarks)
    return Fits(
        verdict=verdict,
        device=target.device,
        memory_bytes=memory_bytes,
        headroom_bytes=headroom_bytes,
        available_bytes=available,
        graph=step.graph,
        whole=step.whole,
        parameter_bytes=step.parameter_bytes,
        state_bytes=step.state_bytes,
        keep_all_bytes=step.keep_all_bytes,
        smallest_bytes=max(smallest.peak_bytes or step.keep_all_bytes, step.update_bytes),
        floor_bytes=floor_bytes,
        why="the optimizer's step needs all gradients" if floor_bytes == step.update_bytes else smallest.termination.detail,
        result=result,
        reserved_bytes=reserved,
        batch=batch,
        largest_batch=None if batch is None else hunt("batch", 0, batch),
        sequence=sequence,
        longest_sequence=None if sequence is None or sequence_dim is None else hunt("sequence", sequence_dim, sequence),
        remarks=tuple(remarks),
        elapsed_s=time.perf_counter() - began,
    )


def _share(headroom: float, memory_bytes: int) -> int:
    if not 0 <= headroom < 1:
        raise OptionError(f"headroom={headroom!r} is not a share from 0 to less than 1", hint="0.03 leaves three per cent free")
    return round(headroom * memory_bytes)


def _caveats(target: EmulatedDevice, step: TracedStep) -> list[str]:
    """What the figures are worth."""
    if target.device.kind == "cpu":
        remarks = ["workspace was measured here, op by op; times are the least that the profile allows"]
    else:
        remarks = [f"nothing was measured: no {target.device.name} was used; times are the least that its profile allows"]
    if step.stateless:
        remarks.append(f"the state that {step.stateless} makes at its first step is not known, and counts as nothing")
    if target.cpu_only:
        names = ", ".join(sorted(target.cpu_only))
        remarks.append(f"{target.cpu_only.total()} ops are a processor's, and {target.device.name} has others: {names}")
    if target.unknown_workspace:
        names = ", ".join(f"{count} {name.split('.')[1]}" for name, count in target.unknown_workspace.most_common())
        share = f"{target.unknown_workspace.total()} of {len(step.graph.ops)} ops"
        remarks.append(f"workspace is not known, and counts as nothing, of {share}: {names}")
    return remarks


def _best(
    step: TracedStep, smallest: Result, available: int, tracer: DeviceTracer, remarks: list[str]
) -> tuple[Verdict, Result | None]:
    """The answer for what is available, and the cheapest plan found."""
    graph = step.graph
    if step.keep_all_bytes <= available:
        return "keeps everything", keep_everything(graph)
    if max(smallest.budget_bytes, step.update_bytes) > available:
        return "does not fit", None
    known = smallest.plan if smallest.peak_bytes is not None and smallest.peak_bytes <= available else None
    limits = Limits(time_s=tracer.share_s(0.5))
    result = solve(Problem(graph, available), limits=limits, initial=known, raise_on_failure=False)
    if result.plan is not None:
        return "fits with recomputation", result
    if result.termination.reason is Reason.INFEASIBLE:
        remarks.append(f"the solver's cuts prove that no plan of any order keeps {format_bytes(available)}")
        return "does not fit", None
    remarks.append(f"no plan was found that keeps {format_bytes(available)}, and none is proven impossible: give it more time")
    return "not known", None


def _reserved(step: TracedStep, result: Result | None, memory_bytes: int, device: Device, remarks: list[str]) -> int | None:
    """What the allocator takes of the device for a plan."""
    if device.kind != "cuda" or result is None or result.plan is None:
        return None
    found = reserved_bytes(step.graph, result.plan, step.resident_sizes)
    room = memory_bytes - device.context_bytes
    if found > room:
        remarks.append(
            f"the allocator would take {format_bytes(found)} of {format_bytes(room)} if it could: it gives back what is free "
            "before it fails, which costs time, and keeps less with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
        )
    return found


def _largest(
    tracer: DeviceTracer, step: TracedStep, available: int, remarks: list[str], what: str, dim: int, now: int
) -> MaxBatch | None:
    """The largest size of a dimension, from lines through two traces, confirmed by another where there is time."""
    if step.update_bytes > available:
        return None
    if not tracer.has_time_for(2 * _SOLVE_S + tracer.trace_s):
        remarks.append(f"the largest {what} was not looked for: it takes another trace; raise time_limit_s")
        return None
    try:
        lines = _lines(tracer, step, what, dim, now)
        small, large = lines.small_batch, lines.large_batch
        found = max_batch(lines, budget_bytes=available, limits=Limits(time_s=tracer.share_s(0.6)))
        if found.batch in (small, large):
            return found
        if not tracer.has_time_for(tracer.trace_s):
            remarks.append(f"the largest {what} is from lines through {small} and {large}, and was not traced itself")
            return found
        confirmed = _confirmed(tracer, lines, found, available, dim)
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
    """Sizes as lines through two traces, of which one is there."""
    if what == "sequence" and now > 1:
        return AffineGraph(tracer.traced(dim, now // 2).graph, now // 2, step.graph, now)
    double = tracer.traced(dim, 2 * now).graph
    try:
        return AffineGraph(step.graph, now, double, 2 * now)
    except GraphError:
        # One is a size like no other: it is broadcast, and its stride may be anything.
        if now > 1 or not tracer.has_time_for(_SOLVE_S + tracer.trace_s):
            raise
        return AffineGraph(double, 2, tracer.traced(dim, 4).graph, 4)


def _confirmed(tracer: DeviceTracer, lines: AffineGraph, found: MaxBatch, available: int, dim: int) -> MaxBatch | None:
    """What was found on lines, as a trace at that size has it; kernels that round sizes up may take it down a little."""
    for _ in range(_TRIES):
        true = tracer.traced(dim, found.batch).graph
        peak = simulate(true, Plan.from_order(true, found.plan.order)).peak_bytes
        if peak <= available:
            return found
        fewer = found.batch * available // peak
        if peak > _NEAR * available or fewer < 1:
            return None
        fewer -= fewer % _ROWS if fewer > _ROWS else 0
        result = run_order(lines(fewer), found.plan.order)
        assert result.plan is not None
        found = replace(found, batch=fewer, plan=result.plan, result=result)
    return None
