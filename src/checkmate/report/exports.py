"""Exports of a plan: a trace for ui.perfetto.dev, and a memory snapshot for the viewer at pytorch.org/memory_viz."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

import msgspec

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate
from checkmate.oom.snapshot import Block, Event, Frame, Segment, Snapshot
from checkmate.studies.lifetimes import CATEGORIES, by_category
from checkmate.studies.reserved import requests


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


def memory_snapshot(graph: Graph, plan: Plan) -> dict[str, Any]:
    """Convert a plan to the format of `torch.cuda.memory._snapshot`.

    Every storage, workspace and replay state is allocated and freed in the order of the plan. Addresses are never reused:
    the snapshot has the allocated bytes, without rounding and fragmentation. Resident memory is one block that is
    allocated from the start.

    Args:
        graph: The graph.
        plan: A plan of the graph.

    Returns:
        An object to be pickled, made of dictionaries, lists, numbers and text only.

    Raises:
        PlanError: The plan cannot run.
        WrongGraphError: The plan was made for another graph.

    Examples:
        >>> import checkmate
        >>> graph = checkmate.Graph.from_dag(cost=[1, 2], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> snapshot = memory_snapshot(graph, checkmate.Plan.from_order(graph, [0, 1]))
        >>> [(event["action"], event["size"]) for event in snapshot["device_traces"][0]]
        [('alloc', 4), ('alloc', 2), ('free_requested', 4), ('free_completed', 4)]
    """
    simulate(graph, plan)
    costs = [graph.ops[step.op].cost if isinstance(step, Compute) else 0 for step in plan.steps]
    began = list(accumulate(costs, initial=0))
    next_address = 0x7F0000000000
    blocks: dict[int, Block] = {}
    events: list[Event] = []

    def placed(size_bytes: int, frames: list[Frame]) -> Block:
        nonlocal next_address
        address, next_address = next_address, next_address - size_bytes // -512 * 512
        return Block(address=address, size=size_bytes, requested_size=size_bytes, state="active_allocated", frames=frames)

    resident = placed(graph.resident_bytes, [Frame("resident", "", 0)])
    for request in requests(graph, plan):
        step = plan.steps[request.step]
        if request.size_bytes:
            computing = _frames(graph, step.op) if isinstance(step, Compute) else []
            blocks[request.block] = block = placed(request.size_bytes, [Frame(request.name, "", 0), *computing])
            actions = ["alloc"]
        else:
            block, actions = blocks.pop(request.block), ["free_requested", "free_completed"]
        for action in actions:
            us = began[request.step] // 1000
            events.append(Event(action=action, addr=block.address, size=block.size, time_us=us, frames=block.frames))
    left = [*([resident] if graph.resident_bytes else []), *blocks.values()]
    content = msgspec.to_builtins(Snapshot(segments=[_segment(each) for each in left], device_traces=[events]))
    for event in content["device_traces"][0]:
        del event["device_free"]  # only events of errors have it
    return content


def _segment(block: Block) -> Segment:
    return Segment(
        address=block.address,
        total_size=block.size,
        allocated_size=block.size,
        active_size=block.size,
        requested_size=block.size,
        blocks=[block],
    )


def _frames(graph: Graph, o: int) -> list[Frame]:
    op = graph.ops[o]
    place = re.search(r"(?:^|, )([^,]+):(\d+)$", op.source)
    file, line = ("", 0) if place is None else (place[1], int(place[2]))
    return [Frame(op.kind or op.name, file, line), Frame(op.source or op.name, file, line)]
