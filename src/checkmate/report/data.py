"""A plan as data for viewers: one compact JSON object for the report page, and a trace for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Fetch, Free, Plan, Step
from checkmate.core.result import Measured
from checkmate.core.simulate import Timeline, simulate
from checkmate.report.tables import Markup
from checkmate.studies.lifetimes import CATEGORIES, by_category, replays, storage_lifetimes

_PHASES = ("forward", "loss", "backward", "optimizer")


class NamedPlan(NamedTuple):
    """A plan with its name on the page, its memory, and measurements of steps that ran it."""

    name: str
    timeline: Timeline
    measured: Measured | None = None


def embedded(graph: Graph, runs: Sequence[NamedPlan], budget_bytes: int | None) -> Markup:
    """Encode the graph and its plans as JSON that is safe inside a script element; repeated text is stored once."""
    strings: dict[str, int] = {}

    def number(text: str) -> int:
        return strings.setdefault(text, len(strings))

    content = {
        "name": graph.name,
        "cost_unit": graph.cost_unit,
        "resident": graph.resident_bytes,
        "budget": budget_bytes,
        "categories": CATEGORIES,
        "phases": _PHASES,
        "ops": {
            "name": [op.name for op in graph.ops],
            "kind": [number(op.kind) for op in graph.ops],
            "source": [number(op.source) for op in graph.ops],
            "phase": [_PHASES.index(op.phase) for op in graph.ops],
            "cost": [op.cost for op in graph.ops],
            "workspace": [op.workspace_bytes for op in graph.ops],
            "replay": [op.replay_bytes for op in graph.ops],
            "inputs": [op.inputs for op in graph.ops],
            "outputs": [op.outputs for op in graph.ops],
        },
        "values": {
            "name": [value.name for value in graph.values],
            "size": [value.size_bytes for value in graph.values],
            "root": graph.root,
            "kept": [int(value.kept) for value in graph.values],
        },
        "runs": [_run(graph, run) for run in runs],
        "strings": list(strings),
    }
    return Markup(msgspec.json.encode(content).decode().replace("<", "\\u003c"))


def _code(graph: Graph, step: Step) -> int:
    """A step as a number.

    With n values: o for a computation of op o, -1 - v for a free of value v, -2 - n - v for a fetch of v, and -1 - n for any
    other copy.
    """
    if isinstance(step, Compute):
        return step.op
    if isinstance(step, Free):
        return -1 - step.value
    return -1 - len(graph.values) - (1 + step.value if isinstance(step, Fetch) else 0)


def _run(graph: Graph, run: NamedPlan) -> dict[str, Any]:
    timeline, plan = run.timeline, run.timeline.plan
    made = storage_lifetimes(graph, plan)
    return {
        "name": run.name,
        "peak": timeline.peak_bytes,
        "peak_step": timeline.peak_step,
        "cost": timeline.cost,
        "steps": [_code(graph, step) for step in plan.steps],
        "lives": {
            "value": [life.value for life in made],
            "made": [life.made_at for life in made],
            "gone": [life.gone_at for life in made],
            "category": [CATEGORIES.index(life.category) for life in made],
        },
        "replays": replays(graph, plan),
        "measured": None
        if run.measured is None
        else run.measured.curve or [(0, run.measured.peak_bytes), (1, run.measured.peak_bytes)],
    }


def perfetto_trace(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Convert a plan to a trace in the Chrome trace event format: a slice for each computation, a counter for each category.

    Args:
        graph: The graph.
        plan: A plan of the graph.

    Returns:
        An object to be written as JSON. Costs without a time unit count as microseconds.

    Raises:
        PlanError: The plan cannot run.
        WrongGraphError: The plan was made for another graph.

    Examples:
        >>> import checkmate
        >>> graph = checkmate.Graph.from_dag(cost=[1000, 2000], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> trace = perfetto_trace(graph, checkmate.Plan.from_order(graph, [0, 1]))
        >>> [(event["name"], event["ts"], event["dur"]) for event in trace["traceEvents"] if event["ph"] == "X"]
        [('0', 0.0, 1.0), ('1', 1.0, 2.0)]
    """
    timeline = simulate(graph, plan)
    held = by_category(graph, plan)
    us = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}.get(graph.cost_unit, 1.0)
    tracks = {0: graph.name or "training step", 1: "computed first", 2: "computed again"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": k, "name": "thread_name" if k else "process_name", "args": {"name": name}}
        for k, name in tracks.items()
    ]
    used = [(row, category) for row, category in enumerate(CATEGORIES) if held[row].any()]
    begun, seen = 0, set[int]()
    for p, step in enumerate(plan.steps):
        if not isinstance(step, Compute):
            continue
        op, at, bytes_held = graph.ops[step.op], begun * us, int(timeline.bytes[p])
        again = step.op in seen
        arguments = {"op": step.op, "step": p, "phase": op.phase, "kind": op.kind, "source": op.source, "held_bytes": bytes_held}
        run = {"ph": "X", "pid": 1, "tid": 1 + again, "name": op.name, "cat": op.phase, "ts": at, "dur": op.cost * us}
        events.append({**run, "args": arguments})
        for category, size in [*((category, int(held[row, p])) for row, category in used), ("all", bytes_held)]:
            events.append({"ph": "C", "pid": 1, "name": f"memory: {category}", "ts": at, "args": {"bytes": size}})
        seen.add(step.op)
        begun += op.cost
    return {"displayTimeUnit": "ns", "traceEvents": events}
