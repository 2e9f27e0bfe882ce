"""`fits`: whether a training step fits a device that need not be present, and how large a batch does."""

from __future__ import annotations

import functools
import os
import time

import torch

from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import HostMemory
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget, Reason, Result
from checkmate.core.units import Amount, format_bytes, parse_bytes
from checkmate.cost.device import Device, load_device
from checkmate.frontend.planner import keep_everything
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.solve import solve
from checkmate.studies.fit_report import Fits, Verdict
from checkmate.studies.min_budget import min_budget
from checkmate.studies.reserved import reserved_bytes
from checkmate.torch.chunking.choose import ChunkedStep
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.forecast.in_pieces import best_in_pieces, least_peak, why_in_pieces
from checkmate.torch.forecast.largest_size import largest_size
from checkmate.torch.forecast.tracer import SHARES, DeviceTracer, TracedStep
from checkmate.torch.joint.capture import Capture
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.options import Chunking, check_chunking
from checkmate.torch.step.arguments import validate_arguments
from checkmate.torch.step.batch import Example
from checkmate.torch.step.programs import Loss


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
    chunking: Chunking = "off",
    host: Amount | None = None,
    time_limit_s: float = 60.0,
) -> Fits:
    """Predict whether a training step fits a device, which need not be present; exact in bytes, approximate in time.

    The step is traced with fake tensors: nothing runs and nothing is allocated, so that model and example can be on the meta
    device (``with torch.device("meta"): ...``). Sizes of tensors are exact. Times are roofline estimates, which no device
    beats. Workspace that is unknown is listed in ``remarks``; the headroom is meant for it.

    Args:
        model: As in `compile`, like ``loss`` and ``example``.
        loss: The loss.
        example: A batch.
        device: A device's name (``"H100"``, ``"RTX 4090"``), a profile, or a file with one. For ``"CPU"`` each distinct op
            is run once on this machine, to measure its workspace.
        optimizer: ``"sgd"``, ``"momentum"``, ``"adam"``, ``"adamw"``, or an optimizer of the model's parameters.
        whole: Whether the optimizer's updates are planned with the rest, as in `compile`. False is a plain training loop.
        autocast: As in `compile`. The rules are the device's: softmax, norms and losses become float32 on a CUDA device.
        memory: Memory of the device, in place of that in its profile.
        headroom: Share of the memory to leave free, for fragmentation and unknown workspace.
        sequence_dim: A dimension of the example's tensors, such as the sequence length, whose largest size is also wanted.
        chunking: With ``"auto"``, ops on large tensors may run piece by piece, as in `compile`: the smallest peak, the plan and
            the largest sizes are then those of the step with some regions in pieces, which are named. Times of pieces are
            roofline estimates like all others. ``"exact"`` cannot be answered for a device that is not there.
        host: Memory of the host that values may be copied to over the device's bus, such as ``"32GiB"``. The verdict and the plan
            are then those with copies; the smallest peak and the largest sizes are without.
        time_limit_s: Seconds for everything. Tracing a large model takes half a minute; searches for which no time is left
            are skipped, with a remark.

    Returns:
        The report; true where the step fits.

    Raises:
        OptionError: The device or the optimizer is not known, the memory leaves nothing for the step, or the chunking cannot be
            answered for.
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
    check_chunking(chunking)
    if host is not None and chunking != "off":
        raise OptionError("host and chunking are not planned together", hint="leave out chunking, or host")
    target = EmulatedDevice(load_device(device), cpu_costs=Profiler())
    memory_of_host = None if host is None else target.device.host_memory(host)
    memory_bytes = target.device.memory_bytes if memory is None else parse_bytes(memory)
    headroom_bytes = _share(headroom, memory_bytes)
    available = memory_bytes - target.device.context_bytes - headroom_bytes
    if available <= 0:
        raise OptionError(
            f"{format_bytes(memory_bytes)} leave nothing after {format_bytes(target.device.context_bytes)} of context and "
            f"{format_bytes(headroom_bytes)} of headroom",
            hint="check the device's memory, such as memory='24GiB', or lower the headroom, such as headroom=0.01",
        )
    example = validate_arguments(model, loss, None if isinstance(optimizer, str) else optimizer, example)
    tracer = DeviceTracer(model, loss, example, optimizer, whole, autocast, target, began + time_limit_s)
    sequence = None if sequence_dim is None else tracer.size(sequence_dim)
    if sequence_dim is not None and sequence is None:
        raise OptionError(
            f"sequence_dim={sequence_dim}: the tensors of the example do not share one size in that dimension",
            hint="give the dimension in which all tensors of the example have the sequence length, usually 1",
        )
    step = tracer.traced()
    remarks = _caveats(target, step)
    least = least_peak(step, chunking)
    smallest = min_budget(least.captured.graph, limits=Limits(time_s=tracer.share_s(SHARES.smallest_budget)))
    verdict, graph, result = _best(step, least, smallest, available, tracer, remarks, memory_of_host)
    largest = functools.partial(largest_size, tracer, step, available, least.groups, remarks)
    # First what was asked for: time may be left for one of the two.
    longest = None if sequence is None or sequence_dim is None else largest("sequence", sequence_dim, sequence)
    batch = tracer.size(0)
    floor_bytes = max(smallest.floor_bytes, step.update_bytes)
    why = why_in_pieces(smallest.why, least.groups)
    reserved = _reserved(step, graph, result, memory_bytes, target.device, remarks)
    return Fits(
        verdict=verdict,
        device=target.device,
        memory_bytes=memory_bytes,
        headroom_bytes=headroom_bytes,
        available_bytes=available,
        graph=graph,
        whole=step.whole,
        parameter_bytes=step.parameter_bytes,
        state_bytes=step.state_bytes,
        keep_all_bytes=step.keep_all_bytes,
        smallest_bytes=max(smallest.peak_bytes, step.update_bytes),
        floor_bytes=floor_bytes,
        why="the optimizer's step needs all gradients" if floor_bytes == step.update_bytes else why,
        result=result,
        reserved_bytes=reserved,
        batch=batch,
        largest_batch=None if batch is None else largest("batch", 0, batch),
        sequence=sequence,
        longest_sequence=longest,
        remarks=tuple(remarks),
        elapsed_s=time.perf_counter() - began,
    )


def _share(headroom: float, memory_bytes: int) -> int:
    if not 0 <= headroom < 1:
        raise OptionError(
            f"headroom={headroom!r} is not a share from 0 to less than 1",
            hint="give a fraction: headroom=0.03 leaves three per cent free",
        )
    return round(headroom * memory_bytes)


def _caveats(target: EmulatedDevice, step: TracedStep) -> list[str]:
    """Remarks on how far the figures can be trusted."""
    if target.device.kind == "cpu":
        remarks = ["workspace was measured here, op by op; times are the least that the profile allows"]
    else:
        remarks = [f"nothing was measured: no {target.device.name} was used; times are the least that its profile allows"]
    if step.stateless:
        remarks.append(f"the state that {step.stateless} makes at its first step is not known, and counts as nothing")
    if target.cpu_only:
        names = ", ".join(sorted(target.cpu_only))
        remarks.append(f"{target.cpu_only.total()} ops exist on CPUs alone, and {target.device.name} has others: {names}")
    if target.unknown_workspace:
        names = ", ".join(f"{count} {name.split('.')[1]}" for name, count in target.unknown_workspace.most_common())
        share = f"{target.unknown_workspace.total()} of {len(step.graph.ops)} ops"
        remarks.append(f"workspace is not known, and counts as nothing, of {share}: {names}")
    return remarks


def _best(
    step: TracedStep,
    least: ChunkedStep[Capture],
    smallest: MinBudget,
    available: int,
    tracer: DeviceTracer,
    remarks: list[str],
    host: HostMemory | None,
) -> tuple[Verdict, Graph, Result | None]:
    """The verdict for the available bytes, and the cheapest plan found with the graph that it is for."""
    graph = step.graph
    if step.keep_all_bytes <= available:
        return "keeps everything", graph, keep_everything(graph)
    lowest = smallest.floor_bytes if host is None else floor(graph, copies=True).peak_bytes
    if max(lowest, step.update_bytes) > available:
        return "does not fit", graph, None
    if least.groups:
        found = best_in_pieces(step, least, smallest, available, tracer.share_s(SHARES.plan))
        if found is not None:
            remarks += found[1].remarks
            return "fits with recomputation", *found
        remarks.append(_not_known(available))
        return "not known", graph, None
    known = smallest.plan if smallest.peak_bytes <= available else None
    limits = Limits(time_s=tracer.share_s(SHARES.plan))
    result = solve(Problem(graph, available, host=host), limits=limits, initial=known, raise_on_failure=False)
    if host is not None:
        remarks.append("the smallest peak, its floor and the largest sizes are those without copies to the host")
        remarks += result.remarks
    if isinstance(result, Result):
        return ("fits with recomputation" if result.plan.host is None else "fits with offload"), graph, result
    if result.termination.reason is Reason.INFEASIBLE:
        remarks.append(f"the solver's cuts prove that no plan of any order keeps {format_bytes(available)}")
        return "does not fit", graph, None
    remarks.append(_not_known(available))
    return "not known", graph, None


def _not_known(available: int) -> str:
    return f"no plan was found that keeps {format_bytes(available)}, and none is proven impossible: raise time_limit_s"


def _reserved(
    step: TracedStep, graph: Graph, result: Result | None, memory_bytes: int, device: Device, remarks: list[str]
) -> int | None:
    """Bytes that PyTorch's caching allocator reserves on the device for a plan; None where it is another allocator."""
    if device.kind != "cuda" or result is None or result.plan is None:
        return None
    found = reserved_bytes(graph, result.plan, step.resident_sizes)
    room = memory_bytes - device.context_bytes
    if found > room:
        remarks.append(
            f"the caching allocator would reserve {format_bytes(found)}, and the device has {format_bytes(room)}: it returns "
            "free segments before it fails, which costs time; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reserves less"
        )
    return found
