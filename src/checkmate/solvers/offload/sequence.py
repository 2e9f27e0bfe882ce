"""Makes a plan of a sequence of computations and copies: drops needless steps, and frees every value at its earliest place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from checkmate.core.plan import Compute, Discard, Fetch, Free, Offload, Plan, Step
from checkmate.core.problem import Problem
from checkmate.solvers.reductions.unread import ordered_ops


def plan_with_copies(problem: Problem, sequence: Sequence[Step]) -> Plan:
    """The plan of a sequence of `Compute`, `Offload`, `Fetch` and `Free` steps.

    A `Free` in the sequence is the earliest place for the free of its value, where the copy is expected to be done; if the last
    read is later, the value is freed after it. All other values are freed at their earliest place, and copies on the host
    after the first computation that reads the fetched value.
    """
    return _with_frees(problem, needed_steps(problem, sequence))


def needed_steps(problem: Problem, sequence: Sequence[Step]) -> list[Step]:
    """The sequence without computations and copies that no later step needs, as in `reductions.unread`."""
    graph = problem.graph
    tied = ordered_ops(graph)
    if not problem.reorder:
        tied.update(o for o in range(len(graph.ops)) if o not in graph.view_ops)
    earlier = Counter(step.op for step in sequence if isinstance(step, Compute))
    later = {v for v, value in enumerate(graph.values) if value.kept}  # values read before they are made again
    from_host: set[int] = set()  # values whose copies on the host are fetched
    needed: set[int] = set()
    kept: list[Step] = []
    for step in reversed(sequence):
        if isinstance(step, Compute):
            o, op = step.op, graph.ops[step.op]
            earlier[o] -= 1
            if later.isdisjoint(op.outputs) and (earlier[o] or (o not in tied and o in needed)):
                continue
            needed.add(o)
            later.difference_update(op.outputs)
            later.update(op.inputs)
        elif isinstance(step, Fetch):
            if step.value not in later:
                continue
            later.remove(step.value)
            from_host.add(step.value)
        elif step.value not in from_host:
            continue
        elif isinstance(step, Offload):
            from_host.remove(step.value)
            later.add(step.value)
        kept.append(step)
    return kept[::-1]


def _with_frees(problem: Problem, sequence: Sequence[Step]) -> Plan:
    graph = problem.graph
    newest: dict[int, int] = {}  # value -> position of the step that made its newest instance
    last: dict[tuple[int, int], int] = {}  # (value, position made) -> last position that needs it
    fetched: dict[int, int] = {}  # value -> position of its last fetch
    first_read: dict[tuple[int, int], int] = {}
    for p, step in enumerate(sequence):
        if isinstance(step, Compute):
            for v in graph.ops[step.op].inputs:
                last[v, newest[v]] = p
                first_read.setdefault((v, newest[v]), p)
            for v in graph.ops[step.op].outputs:
                newest[v] = p
                last[v, p] = p
        elif isinstance(step, Fetch):
            newest[step.value] = fetched[step.value] = p
            last[step.value, p] = p
        else:
            last[step.value, newest[step.value]] = p
    after: list[list[Step]] = [[] for _ in sequence]
    for (v, made), p in last.items():
        if not (graph.values[v].kept and newest[v] == made):
            after[p].append(Free(v))
    for v, p in fetched.items():
        after[first_read.get((v, p), len(sequence) - 1)].append(Discard(v))
    steps: list[Step] = []
    for step, following in zip(sequence, after, strict=True):
        if not isinstance(step, Free):
            steps.append(step)
        steps += sorted(following, key=lambda s: (isinstance(s, Free), s.value))  # type: ignore[union-attr]
    return Plan(tuple(steps), graph.digest, problem.host)
