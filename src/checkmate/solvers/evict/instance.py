"""A folded graph as flat arrays, with an END op that reads every kept value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.solvers.reductions.fold_views import may_run_again

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.uint8]

NEVER = 1 << 40
"""A stage that is never reached."""


class Instance(NamedTuple):
    """What the search reads. Ops 0..n-1 are the graph's, op n is END; a stage computes one target.

    Attributes:
        targets: Op that each stage computes. Shape ``[stage]``.
        once: Whether an op may be computed only once. Shape ``[op]``.
        last_stage: Last stage in which an op may be computed. Shape ``[op]``.
        read_start: Start of each op's inputs in ``reads``. Shape ``[op + 1]``.
        reads: Values read.
        write_start: Start of each op's outputs in ``writes``. Shape ``[op + 1]``.
        writes: Values written.
        producer: Op that makes each value. Shape ``[value]``.
        slot: Place of each value among its op's outputs. Shape ``[value]``.
        cost: Cost of each op. Shape ``[op]``.
        workspace: Workspace of each op. Shape ``[op]``.
        replay: Replay bytes of each op. Shape ``[op]``.
        size: Bytes of each value. Shape ``[value]``.
        evictable: Whether a value may be dropped and made again. Shape ``[value]``.
    """

    targets: Ints
    once: Flags
    last_stage: Ints
    read_start: Ints
    reads: Ints
    write_start: Ints
    writes: Ints
    producer: Ints
    slot: Ints
    cost: Floats
    workspace: Floats
    replay: Floats
    size: Floats
    evictable: Flags


def build_instance(problem: Problem, on_demand: frozenset[int], order: Sequence[int] | None = None) -> Instance:
    """Arrays of a problem whose views are folded.

    Args:
        problem: The problem. A view left in its graph counts as a read of its storage's owner too.
        on_demand: Ops that are no targets: computed when somebody asks.
        order: Order of the targets; the graph's own by default.
    """
    graph = problem.graph
    count = len(graph.ops)
    reads = [_reads_with_storage(graph, op.inputs) for op in graph.ops]
    reads.append(_reads_with_storage(graph, [v for v, value in enumerate(graph.values) if value.kept]))
    writes: list[Sequence[int]] = [*(op.outputs for op in graph.ops), ()]
    targets = [o for o in (range(count) if order is None else order) if o not in on_demand] + [count]
    stage = {o: t for t, o in enumerate(targets)}
    last_stage = np.full(count + 1, NEVER, dtype=np.int64)
    for o, op in enumerate(graph.ops):
        if op.clobbered_by:
            last_stage[o] = min(stage[c] for c in op.clobbered_by)
    once = [not may_run_again(problem, o) for o in range(len(graph.ops))]
    read_start, read_values = rows(reads)
    write_start, written_values = rows(writes)
    slot = np.zeros(len(graph.values), dtype=np.int64)
    for op in graph.ops:
        for place, v in enumerate(op.outputs):
            slot[v] = place
    size = np.array([v.size_bytes for v in graph.values], dtype=np.float64)
    producer = np.array(graph.producer, dtype=np.int64)
    # A view that is left is tied to its place: made again, its storage's owner would be there twice.
    viewed = np.zeros(len(graph.values), dtype=np.bool_)
    viewed[[graph.root[v] for v, value in enumerate(graph.values) if value.base is not None]] = True
    once_flags = np.array([*once, True], dtype=np.uint8)
    return Instance(
        targets=np.array(targets, dtype=np.int64),
        once=once_flags,
        last_stage=last_stage,
        read_start=read_start,
        reads=read_values,
        write_start=write_start,
        writes=written_values,
        producer=producer,
        slot=slot,
        cost=_floats([op.cost for op in graph.ops]),
        workspace=_floats([op.workspace_bytes for op in graph.ops]),
        replay=_floats([op.replay_bytes for op in graph.ops]),
        size=size,
        evictable=((once_flags[producer] == 0) & (size > 0) & ~viewed).astype(np.uint8),
    )


def rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists one after another, as the kernels read them: where each starts, and all entries, one spare at the end."""
    starts = np.concatenate([[0], np.cumsum([len(entry) for entry in lists])]).astype(np.int64)
    return starts, np.array([entry for part in lists for entry in part] + [0], dtype=np.int64)


class Scratch(NamedTuple):
    """Working arrays of the kernels; what each holds is said where it is filled."""

    sequence: Any
    stage_of: Any
    live: Any
    bucket_head: Any
    bucket_next: Any
    bucket_value: Any
    touched_at: Any
    computed_at: Any
    stack_op: Any
    stack_read: Any
    touched: Any
    newest: Any
    first_instance: Any
    value_of: Any
    last_read: Any
    read_offset: Any
    read_instance: Any
    use_start: Any
    use_position: Any
    released: Any
    profile: Any
    first_run: Any
    last_run: Any
    run_start: Any
    run_position: Any
    over: Any
    seen_op: Any
    seen_value: Any
    stamp: Any
    group: Any
    candidate: Any
    score: Any
    noise: Any
    group_size: Any
    penalty: Any
    bytes_at: Any


def build_scratch(instance: Instance, stretch: int = 8) -> Scratch:
    """Arrays for sequences up to ``stretch`` times as long as the op list; longer ones count as no plan."""
    ops, values, stages = len(instance.cost), len(instance.size), len(instance.targets)
    length = stretch * ops + 64
    reads = stretch * len(instance.reads) + 64
    instances = stretch * values + 64

    def ints(n: int) -> npt.NDArray[np.int32]:
        return np.zeros(n, dtype=np.int32)

    def wide(n: int) -> Ints:
        return np.zeros(n, dtype=np.int64)

    return Scratch(
        sequence=ints(length),
        stage_of=ints(length),
        live=np.zeros(values, dtype=np.uint8),
        bucket_head=ints(stages + 1),
        bucket_next=ints(reads + instances),
        bucket_value=ints(reads + instances),
        touched_at=ints(values),
        computed_at=ints(ops),
        stack_op=ints(ops + 8),
        stack_read=wide(ops + 8),
        touched=ints(values + 8),
        newest=ints(values),
        first_instance=ints(length + 2),
        value_of=ints(instances),
        last_read=ints(instances),
        read_offset=ints(length + 2),
        read_instance=ints(reads),
        use_start=ints(instances + 2),
        use_position=ints(reads),
        released=np.zeros(length + 3),
        profile=np.zeros(length + 2),
        first_run=ints(ops),
        last_run=ints(ops),
        run_start=ints(ops + 1),
        run_position=ints(length + 2),
        over=ints(length + 2),
        seen_op=ints(ops),
        seen_value=ints(values),
        stamp=ints(1),
        group=ints(values + 8),
        candidate=ints(values),
        score=np.zeros(values),
        noise=np.zeros(values),
        group_size=ints(1),
        penalty=np.zeros(1),
        bytes_at=np.zeros(length + 2),
    )


def _reads_with_storage(graph: Graph, inputs: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(u for v in inputs for u in (v, graph.root[v])))


def _floats(amounts: list[int]) -> Floats:
    return np.array([*amounts, 0], dtype=np.float64)
