"""`fits`: whether a training step fits a device that need not be present, and the largest batch that fits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch

from checkmate.core.errors import OptionError
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget, Reason, Result
from checkmate.core.units import Amount, format_bytes, parse_bytes
from checkmate.cost.device import Device, load_device
from checkmate.frontend.options import TIME_LIMIT_S, takes_options
from checkmate.frontend.planner import keep_everything
from checkmate.solvers.solve import solve
from checkmate.studies.fit_report import Fits, Verdict
from checkmate.studies.min_budget import min_budget
from checkmate.studies.reserved import allocator_peaks
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.forecast.largest_batch import SizeSearch, sequence_of
from checkmate.torch.forecast.tracer import DeviceTracer, Growing, TracedStep, optimizer_class
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.options import ForecastOptions, fields_of
from checkmate.torch.step.arguments import Example, Loss
from checkmate.torch.step.recipe import StepRecipe, refuse_for_function


@takes_options(ForecastOptions, StepRecipe, time_limit_s=2 * TIME_LIMIT_S, host=None)
def fits(
    model: torch.nn.Module | Callable[..., Any],
    loss: Loss | None = None,
    *,
    example: Example,
    device: Device | str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | str | None = None,
    memory: Amount | None = None,
    headroom: float = 0.03,
    sequence_dim: int | None = None,
    **options: Unpack[ForecastOptions],
) -> Fits:
    """Predict whether a training step fits a device, which need not be present; exact in bytes, approximate in time.

    The step is traced with fake tensors: nothing runs and nothing is allocated. Model and example may be on the meta device
    (``with torch.device("meta"): ...``). Sizes of tensors are exact. Times are roofline estimates: no device is
    faster. Unknown workspace is listed in ``remarks``; the headroom is for it.

    Args:
        model: As in `compile`, like ``loss`` and ``example``.
        loss: The loss.
        example: A batch.
        device: A device's name (``"H100"``, ``"RTX 4090"``), a profile, or a file with one. For ``"CPU"`` each distinct op
            is run once on this machine, to measure its workspace.
        optimizer: ``"sgd"``, ``"momentum"``, ``"adam"``, ``"adamw"``, or an optimizer of the model's parameters.
        memory: Memory of the device, in place of the amount in its profile.
        headroom: Share of the memory to leave free, for fragmentation and unknown workspace.
        sequence_dim: A dimension of the example's tensors, for example the sequence; its largest size is also searched.
        options: Further options; `ForecastOptions` describes them.

    Returns:
        The report; true if the step fits.

    Raises:
        OptionError: The device or the optimizer is unknown, or the memory leaves nothing for the step.
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
    sizes = _memory(target.device, memory, headroom)
    if isinstance(optimizer, str):
        if not isinstance(model, torch.nn.Module):
            refuse_for_function({"optimizer": optimizer})
        assert isinstance(model, torch.nn.Module)
        optimizer = optimizer_class(optimizer)([p for p in model.parameters() if p.requires_grad])
    given = {"model": model, "loss": loss, "optimizer": optimizer, "example": example}
    recipe = StepRecipe(**given, **fields_of(StepRecipe, options))
    host = options.get("host")
    there = None if host is None else target.device.host_memory(host)
    tracer = DeviceTracer(recipe, began + options.get("time_limit_s", 2 * TIME_LIMIT_S), target, there)
    longer = None if sequence_dim is None else sequence_of(example, sequence_dim)
    return _Forecast(tracer, target, *sizes, step=tracer.traced()).report(began, longer)


def _memory(device: Device, memory: Amount | None, headroom: float) -> tuple[int, int, int]:
    """The memory of a device or another amount, the part of it to leave free, and the rest less the context."""
    if not 0 <= headroom < 1:
        raise OptionError(
            f"headroom={headroom!r} is not a share from 0 to less than 1",
            hint="give a fraction: headroom=0.03 leaves three per cent free",
        )
    memory_bytes = device.memory_bytes if memory is None else parse_bytes(memory)
    headroom_bytes = round(headroom * memory_bytes)
    available = memory_bytes - device.context_bytes - headroom_bytes
    if available <= 0:
        raise OptionError(
            f"{format_bytes(memory_bytes)} leave nothing after {format_bytes(device.context_bytes)} of context and "
            f"{format_bytes(headroom_bytes)} of headroom",
            hint="check the device's memory, such as memory='24GiB', or lower the headroom, such as headroom=0.01",
        )
    return memory_bytes, headroom_bytes, available


@dataclass(slots=True)
class _Forecast:
    """The answers for a traced step and a device."""

    tracer: DeviceTracer
    target: EmulatedDevice
    memory_bytes: int
    headroom_bytes: int
    available_bytes: int
    step: TracedStep
    remarks: list[str] = field(default_factory=list[str])

    def report(self, began: float, longer: Growing | None) -> Fits:
        """The answers, in the order of importance: there may be time for one of the largest sizes only."""
        tracer, step = self.tracer, self.step
        self._caveats()
        # The search has to prove its result, and rarely needs more time.
        smallest = min_budget(step.graph, limits=Limits(time_s=tracer.share_s(0.2)), host=tracer.host)
        verdict, result = self._best(smallest)
        larger = Growing.along(tracer.recipe.example, "batch", 0)
        if larger is None:
            self.remarks.append("the largest batch was not looked for: tensors of the example have different first dimensions")
        search = {"tracer": tracer, "step": step, "available_bytes": self.available_bytes, "remarks": self.remarks}
        longest = None if longer is None else SizeSearch(**search, growing=longer).run()
        floor_bytes = max(smallest.floor_bytes, step.update_bytes)
        by_update = floor_bytes == step.update_bytes
        return Fits(
            verdict=verdict,
            device=self.target.device,
            memory_bytes=self.memory_bytes,
            headroom_bytes=self.headroom_bytes,
            available_bytes=self.available_bytes,
            graph=step.graph,
            whole=step.whole,
            parameter_bytes=step.parameter_bytes,
            state_bytes=step.state_bytes,
            keep_all_bytes=step.keep_all_bytes,
            smallest_bytes=max(min(smallest.peak_bytes, (result or smallest).peak_bytes), step.update_bytes),
            floor_bytes=floor_bytes,
            why="the optimizer's step needs all gradients" if by_update else smallest.why,
            result=result,
            reserved_bytes=self._reserved(result),
            batch=None if larger is None else larger.size,
            largest_batch=None if larger is None else SizeSearch(**search, growing=larger).run(),
            sequence=None if longer is None else longer.size,
            longest_sequence=longest,
            remarks=tuple(self.remarks),
            elapsed_s=time.perf_counter() - began,
        )

    def _caveats(self) -> None:
        """Remarks on the limits of the figures."""
        target, remarks, name = self.target, self.remarks, self.target.device.name
        if target.device.kind == "cpu":
            remarks.append("workspace was measured here, op by op; times are the least that the profile allows")
        else:
            there = "but measured there for some ops" if target.device.measured else "times are the least that its profile allows"
            remarks.append(f"nothing was measured: no {name} was used; {there}")
        if self.step.stateless:
            remarks.append(f"the state that {self.step.stateless} makes at its first step is not known, and counts as nothing")
        if target.cpu_only:
            names = ", ".join(sorted(target.cpu_only))
            remarks.append(f"{target.cpu_only.total()} ops exist on CPUs alone, and {name} has others: {names}")
        if target.unknown_workspace:
            names = ", ".join(f"{count} {op.split('.')[1]}" for op, count in target.unknown_workspace.most_common())
            share = f"{target.unknown_workspace.total()} of {len(self.step.graph.ops)} ops"
            remarks.append(f"workspace is not known, and counts as nothing, of {share}: {names}")

    def _best(self, smallest: MinBudget) -> tuple[Verdict, Result | None]:
        """The verdict for the available bytes, and the cheapest plan found."""
        step, graph, available = self.step, self.step.graph, self.available_bytes
        if step.keep_all_bytes <= available:
            return "keeps everything", keep_everything(graph)
        if max(smallest.floor_bytes, step.update_bytes) > available:
            if step.update_bytes <= available:  # pieces of ops leave the bytes of the optimizer's step as they are
                self.remarks.append(
                    'ops count whole: the graph of capture(..., device=..., chunking="auto") may have a smaller min_budget'
                )
            return "does not fit", None
        known = smallest.plan if smallest.peak_bytes <= available else None
        limits = Limits(time_s=self.tracer.share_s(0.5))  # this is the main result
        result = solve(Problem(graph, available, host=self.tracer.host), limits=limits, initial=known, raise_on_failure=False)
        if isinstance(result, Result):
            return "fits with recomputation" if result.plan.host is None else "fits with copies from the host", result
        if result.termination.reason is Reason.INFEASIBLE:
            self.remarks.append(f"the solver's cuts prove that no plan of any order keeps {format_bytes(available)}")
            return "does not fit", None
        self.remarks.append(
            f"no plan was found that keeps {format_bytes(available)}, and none is proven impossible: raise time_limit_s"
        )
        return "not known", None

    def _reserved(self, result: Result | None) -> int | None:
        """Bytes that PyTorch's caching allocator reserves on the device for a plan; None for another allocator."""
        device = self.target.device
        if device.kind != "cuda" or result is None:
            return None
        found = allocator_peaks(self.step.graph, result.plan, self.step.resident_sizes).reserved_bytes
        left = self.memory_bytes - device.context_bytes
        if found > left:
            self.remarks.append(
                f"the caching allocator would reserve {format_bytes(found)}, and the device has {format_bytes(left)}: it returns "
                "free segments before it fails, which costs time; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reserves less"
            )
        return found
