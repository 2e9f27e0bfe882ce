"""Lifetimes of the storages of a plan: when each is made and freed, and which kind of memory it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Fetch, Free, Plan

Category = Literal["resident", "activations", "recomputed", "outputs", "gradients", "updates", "workspace"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""Kinds of memory: resident bytes and values on the host before the step, such as parameters; forward values as first computed;
values computed again; forward values that are held to the end of the step, such as predictions; outputs of backward ops; outputs
of the optimizer; workspace and random states for replay."""


class StorageLifetime(NamedTuple):
    """One storage while a plan runs."""

    value: int  # the value that owns it
    made_at: int  # step that makes it
    gone_at: int  # first step whose bytes exclude it; one more than the number of steps if it stays
    category: Category
    reads: tuple[int, ...]  # steps that read it, under its own name or that of a view
    kept: bool  # whether a value that must be live at the end is in this storage then


def storage_lifetimes(graph: Graph, plan: Plan) -> tuple[StorageLifetime, ...]:
    """Lifetimes of all storages that a plan makes, in the order in which they are made.

    A storage is freed with its last instance, its own or a view's. An op that runs while its outputs are live
    replaces them: the old storage is held until the op has finished. `checkmate.simulate` must be able to run the plan.
    """
    made: list[tuple[int, int, Category]] = []
    gone: dict[int, int] = {}
    reads: list[list[int]] = []
    sharers: list[int] = []
    newest: dict[int, int] = {}  # value -> storage of its newest instance
    runs: dict[int, int] = {}

    def make(v: int, step: int, category: Category) -> None:
        newest[v] = len(made)
        made.append((v, step, "resident" if graph.values[v].on_host else category))
        reads.append([])
        sharers.append(1)

    def leave(storage: int, step: int) -> None:
        sharers[storage] -= 1
        if not sharers[storage]:
            gone[storage] = step

    for p, step in enumerate(plan.steps):
        if isinstance(step, Free):
            leave(newest.pop(step.value), p)
        elif isinstance(step, Fetch):
            make(step.value, p, _category(graph.ops[graph.producer[step.value]].phase, 1))
        if not isinstance(step, Compute):
            continue
        op = graph.ops[step.op]
        runs[step.op] = runs.get(step.op, 0) + 1
        for storage in {newest[v] for v in op.inputs}:
            reads[storage].append(p)
        replaced = [newest[v] for v in op.outputs if v in newest]
        for v in op.outputs:
            if graph.values[v].base is None:
                make(v, p, _category(op.phase, runs[step.op]))
        for v in op.outputs:
            if graph.values[v].base is not None:
                newest[v] = newest[graph.storage_from[v]]
                sharers[newest[v]] += 1
        for storage in replaced:
            leave(storage, p + 1)
    never = len(plan.steps) + 1
    kept = {storage for v, storage in newest.items() if graph.values[v].kept}
    return tuple(
        StorageLifetime(v, p, gone.get(k, never), _with_outputs(category, k in kept), tuple(reads[k]), k in kept)
        for k, (v, p, category) in enumerate(made)
    )


def saved_for_backward(graph: Graph, plan: Plan, lives: Sequence[StorageLifetime]) -> list[StorageLifetime]:
    """The lifetimes, of those of a plan, of storages with bytes that the backward reads and that were made before it begins."""
    ops = [step.op if isinstance(step, Compute) else None for step in plan.steps]
    begins = next((p for p, op in enumerate(ops) if op is not None and begins_backward(graph, op)), len(ops))

    def read_later(life: StorageLifetime) -> bool:
        return any(p >= begins and ops[p] != graph.boundary for p in life.reads)  # the boundary reads the forward's outputs

    return [life for life in lives if graph.values[life.value].size_bytes and life.made_at < begins and read_later(life)]


def begins_backward(graph: Graph, op: int) -> bool:
    """Whether an op is one with which the backward can begin."""
    # Constants of the backward, for example the gradient of the loss, and views of parameters may be made at any time.
    reads, makes = graph.ops[op].inputs, graph.ops[op].outputs
    allocates = bool(reads) and any(graph.values[v].size_bytes for v in makes)
    return op == graph.boundary or (graph.ops[op].phase == "backward" and allocates)


class Replay(NamedTuple):
    """The state of a random generator, held so that an op gives the same result when it is computed again."""

    op: int
    first: int  # its first computation, a step
    last: int  # its last computation, a step


def replays(graph: Graph, plan: Plan) -> tuple[Replay, ...]:
    """States that a plan holds for random ops that it computes more than once."""
    runs: dict[int, list[int]] = {}
    for p, step in enumerate(plan.steps):
        if isinstance(step, Compute) and graph.ops[step.op].replay_bytes:
            runs.setdefault(step.op, []).append(p)
    return tuple(Replay(o, at[0], at[-1]) for o, at in runs.items() if len(at) > 1)


def by_category(graph: Graph, plan: Plan) -> npt.NDArray[np.int64]:
    """Bytes of each of `CATEGORIES` at every step, shape ``[category, step]``; a column sums to `Timeline.bytes` of that step."""
    steps = len(plan.steps)
    change = np.zeros((len(CATEGORIES), steps + 2), dtype=np.int64)
    change[CATEGORIES.index("resident"), 0] += graph.resident_bytes
    for lifetime in storage_lifetimes(graph, plan):
        row, size = CATEGORIES.index(lifetime.category), graph.values[lifetime.value].size_bytes
        change[row, lifetime.made_at] += size
        change[row, lifetime.gone_at] -= size
    workspace = CATEGORIES.index("workspace")
    for replay in replays(graph, plan):
        change[workspace, replay.first] += graph.ops[replay.op].replay_bytes
        change[workspace, replay.last + 1] -= graph.ops[replay.op].replay_bytes
    held = np.cumsum(change[:, :steps], axis=1)
    for p, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            held[workspace, p] += graph.ops[step.op].workspace_bytes
    return held


def _with_outputs(category: Category, kept: bool) -> Category:
    return "outputs" if kept and category == "activations" else category


def _category(phase: str, runs: int) -> Category:
    if runs > 1:
        return "recomputed"
    return {"backward": "gradients", "optimizer": "updates"}.get(phase, "activations")  # type: ignore[return-value]
