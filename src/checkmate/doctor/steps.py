"""Small training steps through every path, each with a plan and keeping everything: peak, bits, reserved memory and time."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

import checkmate.torch
from checkmate.core.errors import InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.doctor.check import Check
from checkmate.doctor.networks import Example, attention_matrix, convolutions, transformer
from checkmate.studies.reserved import reserved_bytes
from checkmate.torch.graph.storages import unique_bytes
from checkmate.torch.measure.allocator import counted_memory
from checkmate.torch.measure.device_memory import device_memory
from checkmate.torch.options import Compiler
from checkmate.torch.steps.coordinator import coordinator

TOLERANCE: Final = 0.01
"""Largest difference of measured and planned peak, as a share of the planned one."""

_TRAINED: Final = 4
"""Steps that are compared bit by bit; the third and later run the plan of a step that is known as a whole."""

_ROUNDING: Final = 1e-4
"""Difference that the order of the terms of sums in float32 may make, as a share of a tensor's largest number."""

_ROUNDS: Final = 5
"""Timed steps; the fastest counts."""

_PLANNING_S: Final = 2.0
"""Time limit of planning: the models are small, and no plan has to be the best one."""

_REPORT: Final = "report this with the output of `checkmate doctor --json`: a promise is broken"
_ALLOCATOR: Final = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or lower the budget by the difference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A way from a model to a step that runs a plan.

    Attributes:
        name: Its name.
        build: Makes the model, at a scale.
        budget: The budget, a share of the step; for pieces, of the floor of whole ops.
        compiler: The compiler.
        whole: Whether the optimizer's updates are in the step. Otherwise gradients are compared.
        plain: Whether the step is a plain loop around ``torch.compile(model, backend="checkmate")``.
        pieces: Whether the budget is one that whole ops cannot keep.
    """

    name: str
    build: Callable[[int], Example]
    budget: str = "50%"
    compiler: Compiler = "eager"
    whole: bool = False
    plain: bool = False
    pieces: bool = False


PATHS: Final = (
    Path(name="convolutions", build=convolutions, plain=True),
    Path(name="transformer", build=transformer),
    Path(name="whole step", build=transformer, whole=True),
    Path(name="in pieces", build=attention_matrix, budget="60%", pieces=True),
    Path(name="Inductor", build=transformer, compiler="inductor"),
)
QUICK: Final = PATHS[:4]
"""Paths without a compiler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """Measurements of one training.

    Attributes:
        total_bytes: Peak while the step ran, everything included.
        reserved_bytes: What the CUDA allocator held then; None on a CPU.
        planned_bytes: Its planned peak; None where the compiler decides what is stored.
        budget_bytes: Its budget.
        overhead: Planned cost over that of computing each op once.
        time_s: Seconds of the fastest step.
        ops_s: Sum of the costs of all planned computations, in seconds.
        planning_s: Seconds until the step was compiled and planned.
        losses: Losses.
        state: Parameters or gradients, buffers, and the state of the random generator.
        graph: The graph of the step, where it is known.
        result: Its plan.
    """

    total_bytes: int
    reserved_bytes: int | None
    planned_bytes: int | None
    budget_bytes: int
    overhead: float
    time_s: float
    ops_s: float
    planning_s: float
    losses: tuple[float, ...]
    state: tuple[Tensor, ...]
    graph: Graph | None
    result: Result


def check_path(path: Path, device: str, scale: int) -> Check:
    """A path: its peak within the budget and as planned, its bits those of keeping everything with the same compiler.

    Args:
        path: The path.
        device: Type of the device.
        scale: Scale of the model.
    """
    try:
        with deterministic():
            return _check(path, device, scale)
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        with deterministic(warn_only=True):
            return _check(path, device, scale)


def _check(path: Path, device: str, scale: int) -> Check:
    budget: str | int = path.budget
    if path.pieces:
        floor = _floor_bytes(path, device, scale)
        budget = int(float(path.budget.rstrip("%")) / 100 * floor)
    keep = run(path, device, scale, None)
    try:
        planned = run(path, device, scale, budget)
    except (InfeasibleBudgetError, PlanNotFoundError) as error:
        if not path.pieces:
            raise
        detail = f"no piece of the attention keeps every bit with the kernels of this device: {error.message}"
        return Check(name=path.name, verdict="note", detail=detail, cure='use chunking="auto", which changes last bits')
    if path.compiler == "inductor" and not any("compiled by Inductor" in remark for remark in planned.result.remarks):
        detail = "no step that Inductor compiled kept the budget: the eager compiler took over, as the documentation says"
        return Check(name=path.name, verdict="note", detail=detail, cure="attach `checkmate doctor --json` to a report")
    figures = _figures(path, planned, keep)
    if not figures["identical"] and device == "cuda" and not _identical(run(path, device, scale, None), keep):
        figures["identical"] = None
    fused = path.compiler == "inductor" and device == "cuda"
    rounded = fused and figures["identical"] is False and _equal_up_to_rounding(planned, keep)
    if rounded:
        figures["identical"] = None
    faults = _faults(figures, device)
    if faults:
        return Check(
            name=path.name,
            verdict="failed",
            detail="; ".join(fault for fault, _ in faults),
            cure=faults[0][1],
            figures=figures,
        )
    detail = f"measured {format_bytes(planned.total_bytes)} within {format_bytes(planned.budget_bytes)}, bits "
    if rounded:
        detail += "equal up to rounding: Triton adds the terms of a sum in an order that depends on the rest of its kernel"
        return Check(name=path.name, verdict="note", detail=detail, cure='use compiler="eager" for equal bits', figures=figures)
    if figures["identical"] is None:
        detail += "not compared: keeping everything gives others in each run"
        return Check(
            name=path.name, verdict="note", detail=detail, cure="name the GPU and the versions in a report", figures=figures
        )
    detail += "equal"
    return Check(name=path.name, verdict="ok", detail=detail, figures=figures)


@contextlib.contextmanager
def deterministic(*, warn_only: bool = False) -> Generator[None]:
    """Kernels that give the same bits in every run; on a GPU several add in any order otherwise.

    Args:
        warn_only: Whether ops without such a kernel may run. Attention then runs with one that adds in any order.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it products are refused
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    unchanged: Any = dict.fromkeys(("enabled", "benchmark", "benchmark_limit", "allow_tf32", "fp32_precision"))
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with torch.backends.cudnn.flags(**unchanged, deterministic=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one for each op without such a kernel
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def run(path: Path, device: str, scale: int, budget: str | int | None) -> Ran:
    """Train some steps, measure the next one, and time more.

    Args:
        path: The path.
        device: Type of the device.
        scale: Scale of the model.
        budget: The budget; None keeps everything.
    """
    torch._dynamo.reset()
    coordinator().forget_steps()
    _free()
    example = path.build(scale)
    model = example.model.to(device)
    x, y = (t.to(device) for t in example.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if path.whole else None
    began = time.perf_counter()
    train, step = _compiled(path, example, optimizer, (x, y), budget)
    torch.manual_seed(1)
    losses = [train() for _ in range(_TRAINED)]
    planning_s = time.perf_counter() - began
    parameters = list(model.parameters())
    state = [*parameters] if optimizer is not None else [p.grad for p in parameters if p.grad is not None]
    state += [*model.buffers(), torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]
    copied = tuple(t.detach().clone().cpu() for t in state)
    del state
    model.zero_grad(set_to_none=True)
    held = [*parameters, *model.buffers(), x, y] if step is None else None
    total, reserved = _measured(train, held, copied, device)
    planned_step = step or coordinator().step
    result = coordinator().result if planned_step is None else planned_step.result
    assert result is not None
    graph = None if planned_step is None else planned_step.graph
    counted = counted_memory("allocated", torch.device("cuda", 0) if device == "cuda" else None)
    planned = None if path.compiler == "inductor" else result.peak_bytes
    if planned is not None and graph is not None and counted is not None:
        planned = counted(graph, result.plan)  # a GPU's own count is of blocks
    return Ran(
        total_bytes=total,
        reserved_bytes=reserved,
        planned_bytes=planned,
        budget_bytes=result.budget_bytes,
        overhead=result.overhead,
        time_s=min(_timed(train, model, device) for _ in range(_ROUNDS)),
        ops_s=result.cost / 1e9,
        planning_s=planning_s,
        losses=tuple(losses),
        state=copied,
        graph=graph,
        result=result,
    )


def _compiled(
    path: Path, example: Example, optimizer: torch.optim.Optimizer | None, batch: tuple[Tensor, Tensor], budget: str | int | None
) -> tuple[Callable[[], float], checkmate.torch.Step | None]:
    """A function that runs one step and returns its loss, and the compiled step, where it is one."""
    model, (x, y) = example.model, batch
    if path.plain:
        options = {"budget": "100%" if budget is None else budget, "time_limit_s": _PLANNING_S}
        compiled = torch.compile(model, backend="checkmate", options=options)

        def loop() -> float:
            model.zero_grad(set_to_none=True)
            loss = example.loss(compiled(x), y)
            loss.backward()
            return float(loss.detach())

        return loop, None
    step = checkmate.torch.compile(
        model, example.loss, optimizer, example=(x, y), budget=budget, compiler=path.compiler, time_limit_s=_PLANNING_S
    )

    last: list[Any] = []

    def train() -> float:
        if optimizer is None:
            model.zero_grad(set_to_none=True)
        outputs = step(x, y)
        last[:] = [outputs] if step.whole else []  # as a loop holds them until the next step is over, which is planned for
        return float(outputs[1])

    return train, step


def _floor_bytes(path: Path, device: str, scale: int) -> int:
    """Floor of the peak of every plan of whole ops, as the refusal of a budget names it."""
    example = path.build(scale)
    batch = tuple(t.to(device) for t in example.batch)
    try:
        checkmate.torch.compile(
            example.model.to(device), example.loss, example=batch, budget=1, chunking="off", time_limit_s=_PLANNING_S
        )
    except InfeasibleBudgetError as refused:
        return refused.floor_bytes
    raise AssertionError("a budget of one byte was kept")


def _measured(
    train: Callable[[], float], held: Sequence[Tensor] | None, later: Sequence[Tensor], device: str
) -> tuple[int, int | None]:
    """Peak of the next step with everything that was allocated when it was planned, and what the CUDA allocator reserves for it.

    Args:
        train: Runs a step.
        held: The tensors of the model and of the batch; None for all that exist.
        later: Tensors that were made after it was planned, of those that exist.
        device: Type of the device.
    """
    _free()
    if device != "cuda":
        existing = device_memory(torch.device(device)).total_bytes - unique_bytes(later)
        return (existing if held is None else unique_bytes(held)) + checkmate.torch.measure_peak(train), None
    train()  # reserve again what was given back
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    train()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()


def _timed(train: Callable[[], float], model: nn.Module, device: str) -> float:
    model.zero_grad(set_to_none=True)
    if device == "cuda":
        torch.cuda.synchronize()
    # On one thread, the time of the process leaves out other processes.
    clock = time.process_time if device != "cuda" and torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    train()  # it returns the loss as a number, and so has waited for the device
    return clock() - began


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _figures(path: Path, planned: Ran, keep: Ran) -> dict[str, Any]:
    predicted = None
    if planned.reserved_bytes is not None and planned.graph is not None and planned.planned_bytes is not None:
        predicted = reserved_bytes(planned.graph, planned.result.plan)
    return {
        "compiler": path.compiler,
        "budget_bytes": planned.budget_bytes,
        "planned_bytes": planned.planned_bytes,
        "measured_bytes": planned.total_bytes,
        "keep_all_bytes": keep.total_bytes,
        "reserved_bytes": planned.reserved_bytes,
        "predicted_reserved_bytes": predicted,
        "identical": _identical(planned, keep),
        "overhead": round(planned.overhead, 4),
        "time_ratio": round(planned.time_s / keep.time_s, 4),
        "keep_all_s": keep.time_s,
        "keep_all_ops_s": keep.ops_s,
        "planning_s": round(planned.planning_s, 1),
        "in_pieces": any("in pieces" in remark for remark in planned.result.remarks),
    }


def _identical(planned: Ran, keep: Ran) -> bool:
    """Whether losses and all tensors are the same to the bit."""
    pairs = zip(planned.state, keep.state, strict=True)
    return planned.losses == keep.losses and all(torch.equal(_bits(a), _bits(b)) for a, b in pairs)


def _equal_up_to_rounding(planned: Ran, keep: Ran) -> bool:
    """Whether the state differs by less than `_ROUNDING` of the largest number of each tensor; whole numbers not at all."""
    for a, b in zip(planned.state, keep.state, strict=True):
        if not a.is_floating_point() and not torch.equal(a, b):
            return False
        if a.is_floating_point() and not (a - b).abs().max() <= _ROUNDING * b.abs().max():
            return False
    return True


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: zeros of either sign differ, and a NaN equals itself."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _faults(figures: dict[str, Any], device: str) -> list[tuple[str, str]]:
    """Promises that a path breaks, each with what to do."""
    measured, budget, planned = (figures[name] for name in ("measured_bytes", "budget_bytes", "planned_bytes"))
    cure = _ALLOCATOR if device == "cuda" else _REPORT
    found: list[tuple[str, str]] = []
    if figures["identical"] is False:
        found.append(("losses, gradients, buffers or random state are not those of keeping everything", _REPORT))
    if measured > budget:
        found.append((f"measured {format_bytes(measured)} exceeds the budget of {format_bytes(budget)}", cure))
    if planned is not None and abs(measured - planned) > TOLERANCE * planned:
        found.append((f"measured {format_bytes(measured)}, planned {format_bytes(planned)}", cure))
    return found
