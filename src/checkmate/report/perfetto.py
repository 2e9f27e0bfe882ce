"""Export of a plan as a trace for ui.perfetto.dev, in the Chrome trace event format."""

from __future__ import annotations

from typing import Any

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate
from checkmate.studies.lifetimes import CATEGORIES, by_category

_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
_FIRST, _AGAIN = 1, 2
"""Tracks of first computations and of recomputations."""


def perfetto_trace(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Convert a plan to a trace: a slice for each computation, and a counter for each memory category.

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
    scale = _MICROSECONDS.get(graph.cost_unit, 1.0)
    events: list[dict[str, Any]] = [
        _name("process_name", 0, graph.name or "training step"),
        _name("thread_name", _FIRST, "computed first"),
        _name("thread_name", _AGAIN, "computed again"),
    ]
    used = [(row, category) for row, category in enumerate(CATEGORIES) if held[row].any()]
    begun, seen = 0, set[int]()
    for p, step in enumerate(plan.steps):
        if not isinstance(step, Compute):
            continue
        op = graph.ops[step.op]
        at = begun * scale
        arguments = {"op": step.op, "step": p, "phase": op.phase, "kind": op.kind, "source": op.source}
        arguments["held_bytes"] = int(timeline.bytes[p])
        track = _AGAIN if step.op in seen else _FIRST
        events.append(
            {
                "ph": "X",
                "pid": 1,
                "tid": track,
                "name": op.name,
                "cat": op.phase,
                "ts": at,
                "dur": op.cost * scale,
                "args": arguments,
            }
        )
        events += [_count(f"memory: {category}", at, int(held[row, p])) for row, category in used]
        events.append(_count("memory: all", at, int(timeline.bytes[p])))
        seen.add(step.op)
        begun += op.cost
    return {"displayTimeUnit": "ns", "traceEvents": events}


def _name(kind: str, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": track, "name": kind, "args": {"name": name}}


def _count(name: str, at: float, size_bytes: int) -> dict[str, Any]:
    return {"ph": "C", "pid": 1, "name": name, "ts": at, "args": {"bytes": size_bytes}}
