"""A plan as a trace for ui.perfetto.dev."""

from __future__ import annotations

from typing import Any

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate
from checkmate.studies.lifetimes import CATEGORIES, by_category


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
