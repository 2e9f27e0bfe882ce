"""The parts of the pack: each measures one thing of one model, and returns rows for its JSON.

A part stops before its deadline and says what it left out. Each runs in a process of its own, so that it finds the GPU as the
driver leaves it.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import measure
import steps
import torch
from cases import build
from models import Case

import checkmate.torch
from checkmate import (
    Graph,
    HostMemory,
    InfeasibleBudgetError,
    Limits,
    PlanNotFoundError,
    Problem,
    evaluate,
    min_budget,
    simulate,
    solve,
)
from checkmate.core.errors import CheckmateError
from checkmate.doctor.steps import deterministic
from checkmate.frontend.counted_memory import counted_bytes
from checkmate.frontend.planner import keep_everything
from checkmate.studies.reserved import allocator_peaks, smallest_arena
from checkmate.torch.graph.storages import storage_sizes
from checkmate.torch.measure.allocator import counted_memory
from checkmate.torch.partition.copies import BUFFERS, measured_host

FRACTIONS = (0.0, 0.1, 0.25, 0.5, 0.75)
"""Budgets of the peaks, between the smallest peak found and keeping everything."""

HOST_BYTES = 64 * 2**30
"""Memory of the host that copies may take."""

FAST_HOST_S = 2.0
"""Least seconds of the solve for a bus that is not there: the steps of a rehearsal are solved in less, which may find no copy."""

KNOBS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Values of torch's ``activation_memory_budget``."""


Make = Callable[[Case], Callable[[], Any]]
"""Makes the step of a model."""


@dataclass
class Setting:
    """How a part runs."""

    device: str
    tiny: bool
    deadline: float  # reading of the clock before which it ends
    solve_s: float  # time limit of one solve
    rounds: int  # timed steps of a variant
    left_out: list[str] = field(default_factory=list[str])  # what was not measured for want of time, or failed; in words

    @property
    def fractions(self) -> tuple[float, ...]:
        """Budgets between the smallest peak and keeping everything."""
        return FRACTIONS[::2] if self.tiny else FRACTIONS

    @property
    def knobs(self) -> tuple[float, ...]:
        """Values of torch's own budget."""
        return KNOBS[2:3] if self.tiny else KNOBS

    def asked(self, rows: list[dict[str, Any]]) -> list[int]:
        """Peaks of other variants at which ours are measured, the largest first."""
        found = sorted({row["allocated_bytes"] for row in rows}, reverse=True)
        return found[1:2] if self.tiny else found

    def time_for(self, what: str, seconds: float) -> bool:
        """Whether so many seconds are left; what is not measured is noted."""
        if time.perf_counter() + seconds < self.deadline:
            return True
        self.left_out.append(f"{what}: no time left")
        return False

    def case(self, name: str) -> Case:
        """A fresh copy of a model."""
        measure.settle()
        return build(name, self.device, self.tiny)


def observed(setting: Setting, step: Callable[[], Any], case: Case, *, bits: int = 0, emptied: bool = True) -> dict[str, Any]:
    """Peaks and times of a step, and a hash of what it computes in the first so many."""
    if emptied:
        step()  # compiles, where nothing is compiled yet
        case.model.zero_grad(set_to_none=True)
        measure.give_back()
    step()
    case.model.zero_grad(set_to_none=True)
    step()  # a plan for a step that begins without gradients is now in use, and every kernel is loaded
    row: dict[str, Any] = {}
    for name in ("bits", "bits_again")[:bits]:
        row[name] = measure.bits(step, case.model)
    row |= measure.peaks(step, case.model, case.batch.values(), setting.device, emptied=emptied)
    took = measure.seconds(step, case.model, setting.device, setting.rounds)
    return {**row, "time_s": min(took), "median_s": statistics.median(took)}


def resident(case: Case) -> tuple[int, ...]:
    """Sizes of what is there before a step."""
    return storage_sizes([*case.model.parameters(), *case.model.buffers(), *case.batch.values()])


@deterministic()
def peaks(setting: Setting, name: str) -> dict[str, Any]:
    """Planned and measured peaks at five budgets: reserved memory, bits, time, and costs against the measured step."""
    case = setting.case(name)
    began = time.perf_counter()
    graph = checkmate.torch.capture(case.model, example=case.batch)
    facts = {"ops": len(graph.ops), "capture_s": time.perf_counter() - began, "resident_bytes": graph.resident_bytes}
    del case
    counted = counted_memory("allocated", torch.device("cuda", 0) if setting.device == "cuda" else None)
    smallest = min_budget(graph, limits=Limits(time_s=2 * setting.solve_s))
    low, top = (counted_bytes(graph, result, counted) for result in (evaluate(graph, smallest.plan), keep_everything(graph)))
    rows: list[dict[str, Any]] = []
    for fraction in (None, *reversed(setting.fractions)):
        label = "keep all" if fraction is None else f"{fraction:.0%}"
        if not setting.time_for(label, 3 * setting.solve_s):
            continue
        budget = top if fraction is None else low + int(fraction * (top - low))
        case = setting.case(name)
        compiled = functools.partial(checkmate.torch.compile, case.model, example=case.batch, chunking="off")
        try:
            step = compiled(budget=None if fraction is None else budget, time_limit_s=setting.solve_s)
        except (PlanNotFoundError, InfeasibleBudgetError):
            step = compiled(plan=smallest.plan)
        row = observed(setting, lambda step=step, case=case: step(**case.batch)[1], case, bits=2)
        row |= {
            "budget": label,
            "budget_bytes": budget,
            "planned_bytes": counted_bytes(step.graph, step.result, counted),
            "live_bytes": step.result.peak_bytes,
            "predicted_reserved_bytes": allocator_peaks(step.graph, step.plan, resident(case)).reserved_bytes,
            "overhead": step.result.overhead,
            "bound_overhead": step.result.bound / step.graph.cost,
            "gap": step.result.gap,
            "ops_s": step.result.cost / 1e9,
        }
        rows.append(row)
        del case, step, compiled
    keep = next((row for row in rows if row["budget"] == "keep all"), None)
    for row in rows if keep is not None else []:
        row["identical"] = row["bits"] == keep["bits"] if keep["bits"] == keep["bits_again"] else None
        row["time_ratio"] = row["time_s"] / keep["time_s"]
    return {**facts, "keep_all_bytes": top, "floor_bytes": smallest.floor_bytes, "points": rows}


def front(setting: Setting, name: str) -> dict[str, Any]:
    """Peak and time of every other way to spend less memory, and ours at the peaks that they reach."""
    others: list[tuple[str, Make]] = [
        ("eager", steps.eager),
        ("activation checkpointing", steps.checkpointed),
        ("selective checkpointing", functools.partial(steps.checkpointed, selective=True)),
        *((f"activation_memory_budget={f}", _knob("aot_eager", f)) for f in setting.knobs),
    ]
    return _beside(setting, name, others, "eager")


def inductor(setting: Setting, name: str) -> dict[str, Any]:
    """The same with Inductor: stock, with torch's own budget, and ours at their peaks."""
    others = [("Inductor", _knob("inductor", 1.0))]
    others += [(f"Inductor, activation_memory_budget={f}", _knob("inductor", f)) for f in setting.knobs[:3:2]]
    return _beside(setting, name, others, "inductor")


def _knob(backend: str, fraction: float) -> Make:
    return functools.partial(steps.stock, backend=backend, fraction=fraction)


def _beside(setting: Setting, name: str, others: list[tuple[str, Make]], compiler: str) -> dict[str, Any]:
    """Other ways, and ours at the peaks that they reach."""
    rows = _variants(setting, name, others)
    mine = [(f"ours, {budget}", functools.partial(_ours, budget, compiler, setting.solve_s)) for budget in setting.asked(rows)]
    return {"variants": rows + [{**row, "ours": True} for row in _variants(setting, name, mine)]}


def _variants(setting: Setting, name: str, variants: list[tuple[str, Make]]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for label, make in variants:
        if not setting.time_for(label, 3 * setting.solve_s):
            continue
        case = setting.case(name)
        try:
            rows.append({"name": label, **observed(setting, make(case), case)})
        except (CheckmateError, RuntimeError) as error:  # out of memory among them
            setting.left_out.append(f"{label}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        del case
    return rows


def _ours(budget: int, compiler: Any, time_limit_s: float, case: Case) -> Callable[[], Any]:
    step = checkmate.torch.compile(
        case.model, example=case.batch, budget=budget, compiler=compiler, time_limit_s=time_limit_s, chunking="off"
    )
    return lambda: step(**case.batch)[1]


def reserved(setting: Setting, name: str) -> dict[str, Any]:
    """Budgets of reserved memory: what the allocator holds while a plan runs that is planned for it."""
    case = setting.case(name)
    keep = checkmate.torch.compile(case.model, example=case.batch)
    top = smallest_arena(keep.graph, keep.plan, resident(case)).reserved_bytes
    least = keep.graph.resident_bytes
    del case, keep
    rows: list[dict[str, Any]] = []
    for share in (1.0,) if setting.tiny else (0.75, 0.5):
        budget = least + int(share * (top - least))
        if not setting.time_for(f"{share:.0%}", 4 * setting.solve_s):
            continue
        case = setting.case(name)
        try:
            step = checkmate.torch.compile(
                case.model, example=case.batch, budget=budget, budget_of="reserved", time_limit_s=setting.solve_s, chunking="off"
            )
        except CheckmateError as error:
            setting.left_out.append(f"{share:.0%}: {error.message}")
            continue
        row = observed(setting, lambda step=step, case=case: step(**case.batch)[1], case, emptied=False)
        predicted = smallest_arena(step.graph, step.plan, resident(case)).reserved_bytes
        rows.append({"budget": f"{share:.0%}", "budget_bytes": budget, "predicted_reserved_bytes": predicted, **row})
        del case, step
    return {"keep_all_reserved_bytes": top, "points": rows}


@deterministic()
def offload(setting: Setting, name: str) -> dict[str, Any]:
    """Whole steps that copy values to the host beside some that do not: bits, bytes on both sides, and time.

    The last row copies what a bus of a thousand times the rate could hide: whether copies are right does not depend on
    whether they pay.
    """
    device = torch.device("cuda", 0) if setting.device == "cuda" else torch.device("cpu")
    host = measured_host(device, HOST_BYTES)
    fast = HostMemory(HOST_BYTES, 1000 * host.out_bytes_per_s, 1000 * host.in_bytes_per_s)
    graph, keep = _copying(setting, setting.case(name), {})
    limits = Limits(time_s=setting.solve_s)
    low, top = min_budget(graph, limits=limits).peak_bytes, keep["planned_bytes"]
    rows = [{"name": "keep all", **keep}]
    fractions = setting.fractions[1:3]
    for fraction in fractions:
        budget = low + int(fraction * (top - low))
        planned = {"budget": budget, "time_limit_s": setting.solve_s}
        variants: dict[str, dict[str, Any]] = {"alone": planned, "host": {**planned, "host": HOST_BYTES}}
        if fraction == fractions[-1]:
            some = Limits(time_s=max(FAST_HOST_S, setting.solve_s))
            variants["fast host"] = {"plan": solve(Problem(graph, budget, host=fast), limits=some).plan}
        for kind, options in variants.items():
            label = f"{fraction:.0%}, {kind}"
            if setting.time_for(label, 4 * setting.solve_s):
                rows.append({"name": label, "budget_bytes": budget, **_copying(setting, setting.case(name), options)[1]})
    for row in rows[1:]:
        row["identical"] = row["bits"] == rows[0]["bits"]
        row["time_ratio"] = row["time_s"] / rows[0]["time_s"]
    return {"out_bytes_per_s": host.out_bytes_per_s, "in_bytes_per_s": host.in_bytes_per_s, "points": rows}


def _copying(setting: Setting, case: Case, options: dict[str, Any]) -> tuple[Graph, dict[str, Any]]:
    """The graph of a whole step, and what is measured of it beside what was planned; the step itself is freed, and its model."""
    optimizer = torch.optim.SGD(case.model.parameters(), lr=1e-3)
    step = checkmate.torch.compile(case.model, optimizer=optimizer, example=case.batch, chunking="off", **options)
    timeline = simulate(step.graph, step.plan)
    BUFFERS.peak_bytes = 0
    return step.graph, observed(setting, lambda: step(**case.batch)[1], case, bits=1) | {
        "planned_bytes": timeline.peak_bytes,
        "copies": sum(copy.direction == "out" for copy in timeline.copies),
        "planned_host_bytes": timeline.host_peak_bytes,
        "host_bytes": BUFFERS.peak_bytes,
        "planned_s": timeline.cost / 1e9,
        "planned_waits_s": timeline.waited / 1e9,
    }


KINDS: dict[str, Callable[[Setting, str], dict[str, Any]]] = {
    "peaks": peaks,
    "front": front,
    "reserved": reserved,
    "offload": offload,
    "inductor": inductor,
}
