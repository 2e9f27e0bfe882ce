"""Naive lines that say what a plan holds and how long it takes: the third account, for the tests only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from checkmate import Compute, Discard, Fetch, Free, Graph, HostMemory, Offload, Plan


def naive_bytes(graph: Graph, plan: Plan) -> list[int]:
    """Bytes at every step: live storages are a set of objects, found again at each step."""
    runs: dict[int, list[int]] = {}
    for step, what in enumerate(plan.steps):
        if isinstance(what, Compute):
            runs.setdefault(what.op, []).append(step)
    newest: dict[int, tuple[int, int]] = {}  # value -> (owner of its storage, step that made the storage)
    held: list[int] = []
    for step, what in enumerate(plan.steps):
        extra = 0
        if isinstance(what, Compute):
            op, old = graph.ops[what.op], dict(newest)
            for v in sorted(op.outputs, key=lambda v: _depth(graph, v)):
                base = graph.values[v].base
                if base is None:
                    newest[v] = (v, step)
                elif base in op.outputs or base in op.inputs:
                    newest[v] = (newest if base in op.outputs else old)[base]
                else:
                    newest[v] = old[next(u for u in op.inputs if graph.root[u] == graph.root[v])]
            extra = op.workspace_bytes + sum(graph.values[s[0]].size_bytes for s in set(old.values()) - set(newest.values()))
        elif isinstance(what, Free):
            del newest[what.value]
        elif isinstance(what, Fetch):
            newest[what.value] = (what.value, step)
        replays = sum(
            graph.ops[o].replay_bytes for o, at in runs.items() if len(at) > 1 and (at[0] <= step < at[-1] or step == at[-1])
        )
        held.append(graph.resident_bytes + sum(graph.values[s[0]].size_bytes for s in set(newest.values())) + extra + replays)
    return held


def _depth(graph: Graph, v: int) -> int:
    """Number of values that a value is a view through."""
    base = graph.values[v].base
    return 0 if base is None else 1 + _depth(graph, base)


def naive_host_bytes(graph: Graph, plan: Plan) -> list[int]:
    """Bytes on the host after every step: the copies there are a set of values."""
    there = {step.value for step in plan.steps if isinstance(step, Fetch) and graph.values[step.value].on_host}
    held: list[int] = []
    for step in plan.steps:
        if isinstance(step, Offload):
            there.add(step.value)
        elif isinstance(step, Discard):
            there.remove(step.value)
        held.append(sum(graph.values[v].size_bytes for v in there))
    return held


@dataclass(eq=False)
class _Job:
    """A copy that an engine does when it comes to it."""

    length: int
    needs: list[_Job] = field(default_factory=list)
    end: int | None = None
    done: bool = False


def naive_end(graph: Graph, plan: Plan, host: HostMemory) -> int:
    """Time at which a step ends, by moving a clock from event to event: one compute stream and two queues of copies."""
    waits = _waits(graph, plan)
    jobs: dict[int, _Job] = {}
    queues: dict[type, deque[_Job]] = {Offload: deque(), Fetch: deque()}
    made: dict[int, _Job] = {}
    now, position, running, waited = 0, 0, None, False
    while True:
        moved = False
        for queue in queues.values():
            if queue and queue[0].end is None and all(job.done for job in queue[0].needs):
                queue[0].end, moved = now + queue[0].length, True
            if queue and queue[0].end == now:
                queue.popleft().done, moved = True, True
        if running is not None and running <= now:
            running, moved = None, True
        elif running is None and position < len(plan.steps):
            step, (before, after) = plan.steps[position], waits[position]
            if not waited and all(jobs[j].done for j in before):
                waited, moved = True, True
                if isinstance(step, Compute):
                    running = now + graph.ops[step.op].cost
                elif isinstance(step, (Offload, Fetch)):
                    out = isinstance(step, Offload)
                    rate = host.out_bytes_per_s if out else host.in_bytes_per_s
                    length = ceil(Fraction(graph.values[step.value].size_bytes * 10**9, rate))
                    jobs[position] = _Job(length, [made[step.value]] if not out and step.value in made else [])
                    queues[type(step)].append(jobs[position])
                    if out:
                        made[step.value] = jobs[position]
            elif waited and all(jobs[j].done for j in after):
                position, waited, moved = position + 1, False, True
        if not moved:
            ends = [running] if running is not None else []
            ends += [queue[0].end for queue in queues.values() if queue and queue[0].end is not None]
            if not ends:
                return now
            now = min(ends)


def _waits(graph: Graph, plan: Plan) -> list[tuple[list[int], list[int]]]:
    """For each step, the copies that must be done before it begins, and before the next step begins."""
    newest: dict[int, tuple[int, int]] = {}  # value -> (owner of its storage, step that made the storage)
    moved: dict[tuple[int, int], list[int]] = {}  # storage -> steps that copy from or into it
    host: dict[int, list[int]] = {}  # value -> steps that copy to or from its copy on the host
    found: list[tuple[list[int], list[int]]] = []
    for step, what in enumerate(plan.steps):
        before: list[int] = []
        old = dict(newest)
        if isinstance(what, Compute):
            op = graph.ops[what.op]
            before = [newest[v][1] for v in op.inputs if isinstance(plan.steps[newest[v][1]], Fetch)]
            for v in sorted(op.outputs, key=lambda v: graph.values[v].base is not None):
                base = graph.values[v].base
                if base is None:
                    newest[v] = (v, step)
                elif base in op.outputs or base in op.inputs:
                    newest[v] = (newest if base in op.outputs else old)[base]
                else:
                    newest[v] = old[next(u for u in op.inputs if graph.root[u] == graph.root[v])]
        elif isinstance(what, Free):
            del newest[what.value]
        elif isinstance(what, Offload):
            moved.setdefault(newest[what.value], []).append(step)
            host[what.value] = [step]
        elif isinstance(what, Fetch):
            newest[what.value] = (what.value, step)
            moved[newest[what.value]] = [step]
            host.setdefault(what.value, []).append(step)
        gone = set(old.values()) - set(newest.values())
        after = [copy for storage in gone for copy in moved.get(storage, ())]
        found.append((before, after + (host.pop(what.value) if isinstance(what, Discard) else [])))
    return found
