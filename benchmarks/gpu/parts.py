"""The parts of the pack: each measures the steps of one model, and keeps a row for each as it comes.

A part stops before its deadline and says what it left out. Each runs in a process of its own, so that it finds the GPU as the
driver leaves it. Plans are carried from a machine without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure
import msgspec
import steps
import torch
from cases import build
from fresh import ROOT
from generate import chain
from models import Case

import checkmate.torch
from checkmate import Graph, HostMemory, Limits, Plan, Problem
from checkmate.core import files
from checkmate.core.errors import CheckmateError
from checkmate.cost import CostStore, device_names, load_device
from checkmate.cost.device import FORMAT
from checkmate.doctor.steps import deterministic
from checkmate.frontend.counted_memory import Counted, counted_bytes
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import keep_everything, planner_for
from checkmate.studies.reserved import allocator_peaks
from checkmate.torch.graph.kernel_settings import kernel_settings
from checkmate.torch.graph.storages import storage_sizes
from checkmate.torch.measure.allocator import counted_memory
from checkmate.torch.partition.copies import BUFFERS, measured_host

CARRIED = {
    "peaks": ("25%", "50%"),
    "reserved": ("smallest", "50% reserved", "75% reserved"),
    "offload": ("10%", "10% host", "10% fast host"),
}
"""Plans of each kind of part; to the fast host copies go by a bus of a thousand times the rate, and far more of them pay."""

RECORDED = ("smallest", "25%")
"""Plans whose requests of the allocator of a GPU are recorded: graph, plan and history, which `history.py` replays."""

PROFILE = "measured.device.json"

Make = Callable[[Case], tuple[Callable[[], Any], Any]]
"""Makes the step of a model, and what Checkmate compiled it to: None for a step of others."""


@dataclass
class Setting:
    """How a part runs, and what it has found."""

    device: str
    tiny: bool
    deadline: float  # reading of the clock before which it ends
    solve_s: float  # time limit of one solve
    plans: Path  # folder of carried plans
    out: Path
    keep: Callable[[], None]  # keeps what was found so far
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    left_out: list[str] = field(default_factory=list[str])  # what was not measured for want of time, or failed; in words

    def measure(self, name: str, variants: Mapping[str, Make], *, kind: str) -> None:
        """Add a row for each step: peaks and times, and bits if it runs a plan that was carried, else its kernels."""
        for label, make in variants.items():
            if time.perf_counter() + 2 * self.solve_s > self.deadline:
                self.left_out.append(f"{label}: no time left")
                continue
            measure.settle()
            case = build(name, self.device, self.tiny)
            BUFFERS.peak_bytes = 0
            try:
                run, step = make(case)
                planned = {} if step is None else figures(step, kind, self.device, case)
                record = f"{self.out / name}.{kind}" if label in RECORDED else None
                if record is not None and step is not None:
                    files.write(step.graph, f"{record}.graph.json")
                    files.write(step.plan, f"{record}.plan.json")
                row = self._observed(run, case, kind, record)
                row |= {"host_bytes": BUFFERS.peak_bytes} if kind == "offload" else {}
                row |= {} if kind in CARRIED else measure.kernels(run, case.model, self.device)
                self.rows.append({"name": label, "ours": step is not None, **planned, **row})
            except Exception as error:  # noqa: BLE001 - the others are still to be measured; out of memory is one
                self.left_out.append(f"{label}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            self.keep()
            run = step = case = None

    def _observed(self, step: Callable[[], Any], case: Case, kind: str, record: str | None) -> dict[str, Any]:
        emptied = kind != "reserved"  # an arena is to stay
        if emptied:
            step()  # compiles, where nothing is compiled yet
            case.model.zero_grad(set_to_none=True)
            measure.give_back()
        step()
        case.model.zero_grad(set_to_none=True)
        step()  # a plan for a step that begins without gradients is now in use, and every kernel is loaded
        hashes = {"peaks": ("bits", "bits_again"), "reserved": ("bits", "bits_again"), "offload": ("bits",)}.get(kind, ())
        row: dict[str, Any] = measure.peaks(step, case.model, case.batch.values(), self.device, emptied=emptied, record=record)
        row |= measure.times(step, case.model, self.device, 2 if self.tiny else 10)
        return row | {name: measure.bits(step, case.model) for name in hashes}  # at last, since it takes memory of the device

    def plan(self, name: str, label: str, graph: Graph) -> Plan:
        """The carried plan if it can run a graph, or a plan that is made now."""
        path = plan_file(self.plans, name, label)
        try:
            known = for_structure(files.read_as(path, Plan), graph)
            checkmate.evaluate(graph, msgspec.structs.replace(known, graph_digest=graph.digest))
        except (CheckmateError, OSError):
            self.left_out.append(f"{label}: no plan was carried for this graph; it is planned in {self.solve_s:g} s")
            return plan_for(graph, label, self.device, self.solve_s)
        return known


def for_structure(plan: Plan, graph: Graph) -> Plan:
    """A plan for a graph that may have other workspaces where it runs."""
    return msgspec.structs.replace(plan, graph_digest=f"{graph.digest}+{graph.structure}")


def figures(step: Any, kind: str, device: str, case: Case) -> dict[str, Any]:
    """What is planned of a step. To count reserved memory here would return the memory that is reserved for the step."""
    counted = None if kind == "reserved" else counted_by(kind, device)
    sizes = storage_sizes([*case.model.parameters(), *case.model.buffers(), *case.batch.values()])
    timeline = checkmate.simulate(step.graph, step.plan)
    return {
        "planned_bytes": step.result.budget_bytes if kind == "reserved" else counted_bytes(step.graph, step.result, counted),
        "predicted_reserved_bytes": allocator_peaks(step.graph, step.plan, sizes).reserved_bytes,
        "planned_host_bytes": timeline.host_peak_bytes,
        "copies": sum(copy.direction == "out" for copy in timeline.copies),
        "planned_waits_s": timeline.waited / 1e9,
        "overhead": step.result.overhead,
        "ops_s": step.result.cost / 1e9,
    }


def plan_file(folder: Path, name: str, label: str) -> Path:
    """The file of a carried plan."""
    return folder / f"{name} {label}.plan.json".replace(" ", "-")


def plan_for(graph: Graph, label: str, device: str, time_s: float, smallest: Plan | None = None) -> Plan:
    """The plan of a label, for a device that may be absent; a share is one between the smallest peak and keeping everything."""
    smallest = smallest or checkmate.min_budget(graph, limits=Limits(time_s=time_s)).plan
    if label == "smallest":
        return smallest
    share, *how = label.split()
    host, bus = None, load_device("H100").host_memory("64GiB")
    if "host" in how:
        faster = 1000 if "fast" in how else 1
        host = HostMemory(bus.bytes, faster * bus.out_bytes_per_s, faster * bus.in_bytes_per_s)
    counted = counted_by("reserved" if "reserved" in how else "peaks" if host is None else "offload", device)
    results = checkmate.evaluate(graph, smallest), keep_everything(graph)
    low, top = (counted_bytes(graph, result, counted) for result in results)
    options = PlanningOptions.of(budget=low + (top - low) * int(share[:-1]) // 100, time_limit_s=time_s)
    try:
        return planner_for(dataclasses.replace(options, counted=counted, host=host))(graph).plan
    except (checkmate.InfeasibleBudgetError, checkmate.PlanNotFoundError):
        return smallest


def counted_by(kind: str, device: str) -> Counted | None:
    """The bytes of a plan that count in a part, on a device that may be absent; None for its live bytes."""
    if kind == "reserved":  # beside what the device holds now
        return counted_memory("reserved", torch.device(device) if device == "cuda" and torch.cuda.is_available() else None)
    blocks = device == "cuda" and kind != "offload"
    return (lambda graph, plan: allocator_peaks(graph, plan).allocated_bytes) if blocks else None


@deterministic()  # as the parts run: another kernel of attention is another graph
def make_plans(folder: Path, parts: Iterable[str], profile: Path | str, device: str, *, tiny: bool, time_s: float) -> None:
    """Write the plans of some parts for a GPU that is not here, by a device profile."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        kind, _, name = part.partition(":")
        labels = [label for label in CARRIED.get(kind, ()) if not plan_file(folder, name, label).exists()]
        if not labels:
            continue
        case = build(name, "cpu", tiny)
        graph = checkmate.torch.capture(case.model, example=case.batch, device=profile, **_options(kind, case))
        smallest = checkmate.min_budget(graph, limits=Limits(time_s=2 * time_s)).plan
        for label in labels:
            plan = for_structure(plan_for(graph, label, device, time_s, smallest), graph)
            files.write(plan, plan_file(folder, name, label))
            print(f"{name} {label}: {len(plan.order)} computations of {len(graph.ops)} ops", flush=True)


def _options(kind: str, case: Case) -> dict[str, Any]:
    return {"optimizer": torch.optim.SGD(case.model.parameters(), lr=1e-3)} if kind == "offload" else {}


@deterministic()
def carried(kind: str, setting: Setting, name: str) -> dict[str, Any]:
    """Steps by plans beside keeping everything: peaks, reserved memory, bits, copies and times as planned and as measured."""
    known: list[Graph] = []

    def make(label: str, case: Case) -> tuple[Callable[[], Any], Any]:
        options = _options(kind, case)
        if known:
            options["plan"] = setting.plan(name, label, known[0])
            if kind == "reserved" and (counted := counted_by(kind, setting.device)) is not None:
                options |= {"budget": counted(known[0], options["plan"]), "budget_of": "reserved"}
        step = checkmate.torch.compile(case.model, example=case.batch, chunking="off", **options)
        if not known:
            known.append(step.graph)
        return lambda: step(**case.batch)[1], step

    labels = ("keep all", *CARRIED[kind])
    setting.measure(name, {label: functools.partial(make, label) for label in labels}, kind=kind)
    first = setting.rows[0]
    for row in setting.rows:
        row["identical"] = row["bits"] == first["bits"] if first["bits"] == first.get("bits_again", first["bits"]) else None
        row["time_ratio"] = row["time_s"] / first["time_s"]
    if kind != "offload":  # the largest segment is an arena, if there is one
        sizes = [s["total_size"] for s in torch.cuda.memory_snapshot()] if setting.device == "cuda" else [0]
        return {"ops": len(known[0].ops), "resident_bytes": known[0].resident_bytes, "largest_segment_bytes": max(sizes)}
    host = measured_host(torch.device(setting.device), 2**30)
    return {"out_bytes_per_s": host.out_bytes_per_s, "in_bytes_per_s": host.in_bytes_per_s}


def costs(setting: Setting, name: str) -> dict[str, Any]:
    """The costs of a step's ops: they and all that were measured before go into a device profile, to plan by it elsewhere."""
    case, began = build(name, setting.device, setting.tiny), time.perf_counter()
    graph = checkmate.torch.capture(case.model, example=case.batch)
    took_s, here = time.perf_counter() - began, kernel_settings(torch.device(setting.device))
    # Those of deterministic kernels come first, and count for ops that ran with no others.
    found = sorted(CostStore().get().items(), key=lambda item: item[0].endswith(here))
    measured = {key.partition(" least of ")[0]: tuple(cost) for key, cost in found}
    there = torch.cuda.get_device_name() if setting.device == "cuda" else "CPU"
    shipped = load_device(max((known for known in device_names() if known in there), key=len, default="H100"))
    profile = msgspec.structs.replace(shipped, name=f"{shipped.name} measured", measured=measured)
    body = {"format": FORMAT, **msgspec.to_builtins(profile)}
    (setting.out / PROFILE).write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=1) + b"\n")
    return {"ops": len(graph.ops), "ops_s": graph.cost / 1e9, "capture_s": took_s, "measured": len(measured)}


def beside(compiler: str, setting: Setting, name: str) -> dict[str, Any]:
    """Every other way to spend less memory, and after each ours at its peak: the time may not be enough for all."""
    backend = "aot_eager" if compiler == "eager" else compiler
    knobs = (0.9, 0.5, 0.1, 0.7, 0.3)[: int(compiler == "eager") if setting.tiny else None]
    variants = {"ours, keep all": _ours(setting, None, compiler), backend: _theirs(steps.stock, backend=backend)}
    variants |= {"eager": _theirs(steps.eager)} if compiler == "eager" else {}
    variants |= {f"activation_memory_budget={f}": _theirs(steps.stock, backend=backend, fraction=f) for f in knobs}
    if compiler == "eager":
        variants |= {"checkpointing": _theirs(steps.checkpointed), "selective": _theirs(steps.checkpointed, selective=True)}
    for label, make in variants.items():
        setting.measure(name, {label: make}, kind="beside")
        found = {row["name"]: row["allocated_bytes"] for row in setting.rows}
        peak, most = found.get(label, sys.maxsize), found.get("ours, keep all", sys.maxsize)
        if peak < most and f"ours, {peak}" not in found:
            setting.measure(name, {f"ours, {peak}": _ours(setting, peak, compiler)}, kind="beside")
    return {}


def graphs(setting: Setting, name: str) -> dict[str, Any]:
    """CUDA graphs of Inductor, stock and ours, and of a whole step: what a replay uses shows in reserved memory."""
    given: Any = {"mode": "reduce-overhead"}
    both = {"Inductor": _theirs(steps.stock, backend="inductor", **given), "ours": _ours(setting, None, "inductor", **given)}

    def whole(mode: Any, case: Case) -> tuple[Callable[[], Any], Any]:
        optimizer = torch.optim.SGD(case.model.parameters(), 1e-5)
        step = checkmate.torch.compile(case.model, optimizer=optimizer, example=case.batch, chunking="off", mode=mode)
        return lambda: step(**case.batch)[1], step

    steps_of = {f"whole step, {mode}": functools.partial(whole, mode) for mode in ("default", given["mode"])}
    setting.measure(name, {**both, **steps_of}, kind="graphs")
    return {}


def updates(setting: Setting, name: str) -> dict[str, Any]:
    """Whole steps with AdamW, in eager mode and ours: time, and the kernels of the updates."""

    def make(ours: bool, fused: bool | None, case: Case) -> tuple[Callable[[], Any], Any]:
        optimizer = torch.optim.AdamW(case.model.parameters(), lr=1e-5, fused=fused)
        if ours:
            step = checkmate.torch.compile(case.model, optimizer=optimizer, example=case.batch, chunking="off")
            return lambda: step(**case.batch)[1], step
        run = steps.eager(case)
        return lambda: (run(), optimizer.step(), optimizer.zero_grad(set_to_none=True))[0], None

    kinds = {"AdamW": None, "fused AdamW": True}
    both = {f"{who}, {kind}": functools.partial(make, who == "ours", f) for kind, f in kinds.items() for who in ("eager", "ours")}
    setting.measure(name, both, kind="updates")
    return {}


def _theirs(make: Callable[..., Callable[[], Any]], **options: Any) -> Make:
    return lambda case: (make(case, **options), None)


def _ours(setting: Setting, budget: int | None, compiler: Any, **options: Any) -> Make:
    given = {"budget": budget, "compiler": compiler, "time_limit_s": setting.solve_s, "chunking": "off", **options}

    def make(case: Case) -> tuple[Callable[[], Any], Any]:
        step = checkmate.torch.compile(case.model, example=case.batch, **given)
        return lambda: step(**case.batch)[1], step

    return make


def tests(setting: Setting, marker: str) -> dict[str, Any]:
    """The tests that need a device, as tests.log says; meanwhile the solvers' kernels are compiled, for all parts to come."""
    marked = [str(path) for path in sorted((ROOT / "tests" / "torch").rglob("test_*.py")) if f"mark.{marker}" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-m", marker, *(["--collect-only"] if setting.tiny else []), *marked]
    with (setting.out / "tests.log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as running:
        limits = Limits(time_s=1.0, gap=0.0)
        checkmate.solve(Problem(chain(12), "45%"), limits=limits, raise_on_failure=False)
        checkmate.min_budget(chain(12), limits=limits)
        try:
            return {"status": running.wait(max(1.0, setting.deadline - time.perf_counter()))}
        finally:
            running.kill()


KINDS: dict[str, Callable[[Setting, str], dict[str, Any]]] = {
    **{kind: functools.partial(carried, kind) for kind in CARRIED},
    "front": functools.partial(beside, "eager"),
    "inductor": functools.partial(beside, "inductor"),
    "updates": updates,
    "graphs": graphs,
    "costs": costs,
    "tests": tests,
}
"""Ways to run a step of a PyTorch model, and what is measured of each; returned facts go beside the rows."""
