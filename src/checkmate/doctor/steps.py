"""Small training steps on every path, with a plan and keeping everything: peak, bits, reserved memory and time."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

import torch

from checkmate.core.units import format_bytes
from checkmate.doctor.checks import REPORT, Check
from checkmate.doctor.training import (
    Example,
    Trained,
    convolutions,
    equal_up_to_rounding,
    promises,
    trained,
    transformer,
)
from checkmate.studies.reserved import allocator_peaks
from checkmate.torch.graph.storages import same_bytes
from checkmate.torch.measure.allocator import counted_memory
from checkmate.torch.options import Compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPath:
    """A way from a model to a step that runs a plan."""

    name: str
    build: Callable[[int], Example]  # makes the model at a scale
    budget: str = "50%"
    compiler: Compiler = "eager"
    whole: bool = False  # whether the optimizer's updates are in the step; otherwise gradients are compared
    plain: bool = False
    planning_s: float = 2.0  # the models are small, and plans need not be optimal
    timed_steps: int = 5  # the fastest counts


PATHS: Final = (
    StepPath(name="convolutions", build=convolutions, plain=True),
    StepPath(name="whole step", build=transformer, whole=True),
    StepPath(name="Inductor", build=transformer, compiler="inductor"),
)

_FAULTS: Final = {
    "within_budget": "exceeds the budget",
    "as_planned": "the peak is not the planned one",
    "identical": "losses, gradients, buffers or random state are not those of keeping everything",
}
"""The words for a promise that is not kept."""


def check_path(path: StepPath, device: str) -> Check:
    """A path: its peak keeps the budget and the plan; its bits are as with everything kept, by the same compiler."""
    try:
        with deterministic():
            return _check(path, device)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        with deterministic(warn_only=True):
            return _check(path, device)


def _check(path: StepPath, device: str) -> Check:
    keep_all, planned = run(path, device, None), run(path, device, path.budget)
    inductor, result = path.compiler == "inductor", planned.result
    if inductor and not any("compiled by Inductor" in remark for remark in result.remarks):
        detail = "no step that Inductor compiled kept the budget: the eager compiler took over, as the documentation says"
        return Check(path.name, "note", detail, "attach `checkmate doctor --json` to a report")
    counted = counted_memory("allocated", torch.device("cuda", 0) if device == "cuda" else None)
    eager_bytes = result.peak_bytes if counted is None else counted(planned.graph, result.plan)  # a GPU counts whole blocks
    planned_bytes = None if inductor else eager_bytes  # Inductor decides on stored values
    kept = promises(planned, keep_all, planned_bytes)
    figures = _figures(path, planned, keep_all, planned_bytes, kept)
    measured, budget = format_bytes(planned.peak_bytes), format_bytes(result.budget_bytes)
    excuse = "" if kept["identical"] or device != "cuda" else _excuse(path, planned, keep_all)
    if excuse:
        kept["identical"], figures["identical"] = True, None
    if faults := [_FAULTS[name] for name, holds in kept.items() if not holds]:
        expandable = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower the budget by the difference"
        told = f"measured {measured} of {budget}" + ("" if planned_bytes is None else f", planned {format_bytes(planned_bytes)}")
        cure = expandable if device == "cuda" and kept["identical"] else REPORT
        return Check(path.name, "failed", f"{'; '.join(faults)} ({told})", cure, figures)
    told = f"measured {measured} within {budget}, bits {excuse or 'equal'}"
    if excuse:
        return Check(path.name, "note", told, 'use compiler="eager" for equal bits', figures)
    return Check(path.name, "ok", told, figures=figures)


def _excuse(path: StepPath, planned: Trained, keep_all: Trained) -> str:
    """The reason for which other bits on a GPU are no fault; empty if there is none."""
    if path.compiler == "inductor" and equal_up_to_rounding(planned.state, keep_all.state):
        return "equal up to rounding: Triton adds the terms of a sum in an order that depends on the rest of its kernel"
    if not all(map(same_bytes, run(path, "cuda", None).state, keep_all.state)):
        return "not compared: keeping everything gives others in each run"
    return ""


@contextlib.contextmanager
def deterministic(*, warn_only: bool = False) -> Generator[None]:
    """Context with kernels that give the same bits in every run; on a GPU, several kernels otherwise add in any order.

    Ops without these kernels raise an error, or run with ``warn_only``: attention may then add in any order.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it products are refused
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    unchanged: Any = dict.fromkeys(("enabled", "benchmark", "benchmark_limit", "allow_tf32", "fp32_precision"))
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    filled, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False  # it takes time on every new tensor
    try:
        with torch.backends.cudnn.flags(**unchanged, deterministic=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each op without these kernels
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def run(path: StepPath, device: str, budget: str | None) -> Trained:
    """Train some steps, measure the next one, and time more; no budget keeps everything."""
    example = _built(path, device)
    optimizer = torch.optim.AdamW(example.model.parameters(), lr=1e-3) if path.whole else None
    if path.plain:
        options: dict[str, Any] = {"plain": True, "budget": "100%" if budget is None else budget}
    else:
        options = {"budget": budget, "compiler": path.compiler}
    warm_up = 4  # the third and later steps run the plan of a step that is known as a whole
    batches = [example.batch] * (warm_up + 1 + path.timed_steps)
    return trained(example, optimizer, batches, measured=warm_up, time_limit_s=path.planning_s, **options)


def _built(path: StepPath, device: str) -> Example:
    """The model of a path; on a GPU tensors have to be larger than the blocks of its allocator."""
    torch.manual_seed(0)
    example = path.build(4 if device == "cuda" else 1)
    x, y = example.batch
    return Example(example.model.to(device), example.loss, (x.to(device), y.to(device)))


def _figures(
    path: StepPath, planned: Trained, keep_all: Trained, planned_bytes: int | None, kept: dict[str, bool]
) -> dict[str, Any]:
    predicted = None
    if planned.reserved_bytes is not None and planned_bytes is not None:
        sizes = [t.nbytes for t in planned.state[1:]]  # of parameters, or of their gradients, and buffers
        predicted = allocator_peaks(planned.graph, planned.result.plan, sizes).reserved_bytes
    time_s, keep_all_s = (min(training.seconds) for training in (planned, keep_all))
    return {
        "compiler": path.compiler,
        "budget_bytes": planned.result.budget_bytes,
        "planned_bytes": planned_bytes,
        "measured_bytes": planned.peak_bytes,
        "keep_all_bytes": keep_all.peak_bytes,
        "reserved_bytes": planned.reserved_bytes,
        "predicted_reserved_bytes": predicted,
        "identical": kept["identical"],
        "overhead": round(planned.result.overhead, 4),
        "time_ratio": round(time_s / keep_all_s, 4),
        "keep_all_s": keep_all_s,
        "keep_all_ops_s": keep_all.result.cost / 1e9,
        "planning_s": round(planned.compiling_s, 1),
    }
