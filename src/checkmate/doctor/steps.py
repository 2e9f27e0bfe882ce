"""Small training steps on every path, with a plan and keeping everything: peak, bits, reserved memory and time."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

import checkmate.torch
from checkmate.core.errors import InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.doctor.check import Check
from checkmate.doctor.training import (
    Example,
    Training,
    attention_matrix,
    convolutions,
    equal_bits,
    equal_up_to_rounding,
    free_memory,
    transformer,
)
from checkmate.studies.reserved import reserved_bytes
from checkmate.torch.measure.allocator import counted_memory
from checkmate.torch.options import Compiler
from checkmate.torch.steps.coordinator import coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPath:
    """A way from a model to a step that runs a plan."""

    name: str
    build: Callable[[int], Example]  # makes the model at a scale
    budget: str = "50%"  # a share of the step; for pieces, of the floor of whole ops: whole ops cannot keep it
    compiler: Compiler = "eager"
    whole: bool = False  # whether the optimizer's updates are in the step; otherwise gradients are compared
    plain: bool = False
    pieces: bool = False
    planning_s: float = 2.0  # the models are small, and plans need not be optimal
    timed_steps: int = 5  # the fastest counts


PATHS: Final = (
    StepPath(name="convolutions", build=convolutions, plain=True),
    StepPath(name="transformer", build=transformer),
    StepPath(name="whole step", build=transformer, whole=True),
    StepPath(name="in pieces", build=attention_matrix, budget="60%", pieces=True),
    StepPath(name="Inductor", build=transformer, compiler="inductor"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of one training."""

    total_bytes: int  # peak while the step ran, everything included
    reserved_bytes: int | None  # reserved by the CUDA allocator then; None on a CPU
    planned_bytes: int | None  # None if the compiler decides on stored values
    time_s: float  # of the fastest step
    planning_s: float  # seconds until the step was compiled and planned
    state: tuple[Tensor, ...]
    graph: Graph
    result: Result


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
    budget = _share_of_floor(path, device) if path.pieces else path.budget
    keep = run(path, device, None)
    try:
        planned = run(path, device, budget)
    except (InfeasibleBudgetError, PlanNotFoundError) as error:
        if not path.pieces:
            raise
        detail = f"no piece of the attention keeps every bit with the kernels of this device: {error.message}"
        return Check(path.name, "note", detail, 'use chunking="auto", which changes last bits')
    if path.compiler == "inductor" and not any("compiled by Inductor" in remark for remark in planned.result.remarks):
        detail = "no step that Inductor compiled kept the budget: the eager compiler took over, as the documentation says"
        return Check(path.name, "note", detail, "attach `checkmate doctor --json` to a report")
    figures = _figures(path, planned, keep)
    rounded = False
    if not figures["identical"] and device == "cuda":
        rounded = path.compiler == "inductor" and equal_up_to_rounding(planned.state, keep.state)
        if rounded or not equal_bits(run(path, device, None).state, keep.state):
            figures["identical"] = None
    faults = _faults(figures, device)
    if faults:
        return Check(path.name, "failed", "; ".join(fault for fault, _ in faults), faults[0][1], figures)
    detail = f"measured {format_bytes(planned.total_bytes)} within {format_bytes(planned.result.budget_bytes)}, bits "
    if rounded:
        detail += "equal up to rounding: Triton adds the terms of a sum in an order that depends on the rest of its kernel"
        return Check(path.name, "note", detail, 'use compiler="eager" for equal bits', figures)
    if figures["identical"] is None:
        detail += "not compared: keeping everything gives others in each run"
        return Check(path.name, "note", detail, "name the GPU and the versions in a report", figures)
    return Check(path.name, "ok", f"{detail}equal", figures=figures)


@contextlib.contextmanager
def deterministic(*, warn_only: bool = False) -> Generator[None]:
    """Context with kernels that give the same bits in every run; on a GPU, several kernels otherwise add in any order.

    Ops without these kernels raise an error, or run with ``warn_only``: attention may then add in any order.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it products are refused
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    unchanged: Any = dict.fromkeys(("enabled", "benchmark", "benchmark_limit", "allow_tf32", "fp32_precision"))
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with torch.backends.cudnn.flags(**unchanged, deterministic=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each op without these kernels
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def run(path: StepPath, device: str, budget: str | int | None) -> Measurements:
    """Train some steps, measure the next one, and time more; no budget keeps everything."""
    torch._dynamo.reset()
    coordinator().forget_steps()
    free_memory()
    example = _built(path, device)
    optimizer = torch.optim.AdamW(example.model.parameters(), lr=1e-3) if path.whole else None
    began = time.perf_counter()
    if path.plain:
        options: dict[str, Any] = {"plain": True, "budget": "100%" if budget is None else budget}
    else:
        options = {"budget": budget, "compiler": path.compiler}
    training = Training(example, optimizer, time_limit_s=path.planning_s, **options)
    for _ in range(4):  # the third and later run the plan of a step that is known as a whole
        training.advance(*example.batch)
    planning_s, state = time.perf_counter() - began, training.state()
    total, reserved = training.measure(*example.batch)
    for _ in range(path.timed_steps):
        training.advance(*example.batch)
    graph, result = training.graph, training.result
    counted = counted_memory("allocated", torch.device("cuda", 0) if device == "cuda" else None)
    planned = result.peak_bytes if counted is None else counted(graph, result.plan)  # a GPU counts whole blocks
    return Measurements(
        total_bytes=total,
        reserved_bytes=reserved,
        planned_bytes=None if path.compiler == "inductor" else planned,
        time_s=min(training.seconds[-path.timed_steps :]),
        planning_s=planning_s,
        state=state,
        graph=graph,
        result=result,
    )


def _built(path: StepPath, device: str) -> Example:
    """The model of a path; on a GPU tensors have to be larger than the blocks of its allocator."""
    torch.manual_seed(0)
    example = path.build(4 if device == "cuda" else 1)
    x, y = example.batch
    return Example(example.model.to(device), example.loss, (x.to(device), y.to(device)))


def _share_of_floor(path: StepPath, device: str) -> int:
    """A share of the floor for plans of whole ops, which the error for a smaller budget reports."""
    example = _built(path, device)
    try:
        checkmate.torch.compile(
            example.model, example.loss, example=example.batch, budget=1, chunking="off", time_limit_s=path.planning_s
        )
    except InfeasibleBudgetError as refused:
        return int(float(path.budget.rstrip("%")) / 100 * refused.floor_bytes)
    raise AssertionError("a budget of one byte was kept")


def _figures(path: StepPath, planned: Measurements, keep: Measurements) -> dict[str, Any]:
    predicted = None
    if planned.reserved_bytes is not None and planned.planned_bytes is not None:
        predicted = reserved_bytes(planned.graph, planned.result.plan)
    return {
        "compiler": path.compiler,
        "budget_bytes": planned.result.budget_bytes,
        "planned_bytes": planned.planned_bytes,
        "measured_bytes": planned.total_bytes,
        "keep_all_bytes": keep.total_bytes,
        "reserved_bytes": planned.reserved_bytes,
        "predicted_reserved_bytes": predicted,
        "identical": equal_bits(planned.state, keep.state),
        "overhead": round(planned.result.overhead, 4),
        "time_ratio": round(planned.time_s / keep.time_s, 4),
        "keep_all_s": keep.time_s,
        "keep_all_ops_s": keep.result.cost / 1e9,
        "planning_s": round(planned.planning_s, 1),
        "in_pieces": any("in pieces" in remark for remark in planned.result.remarks),
    }


def _faults(figures: dict[str, Any], device: str) -> list[tuple[str, str]]:
    """Promises that a path breaks, each with its cure."""
    measured, budget, planned = (figures[name] for name in ("measured_bytes", "budget_bytes", "planned_bytes"))
    report = "report this with the output of `checkmate doctor --json`: a promise is broken"
    expandable = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower the budget by the difference"
    cure = expandable if device == "cuda" else report
    found: list[tuple[str, str]] = []
    if figures["identical"] is False:
        found.append(("losses, gradients, buffers or random state are not those of keeping everything", report))
    if measured > budget:
        found.append((f"measured {format_bytes(measured)} exceeds the budget of {format_bytes(budget)}", cure))
    if planned is not None and abs(measured - planned) > 0.01 * planned:
        found.append((f"measured {format_bytes(measured)}, planned {format_bytes(planned)}", cure))
    return found
