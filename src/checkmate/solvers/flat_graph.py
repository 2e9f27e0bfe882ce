"""A folded graph as flat arrays, which all compiled searches read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.problem import Problem
from checkmate.solvers.reductions.fold_views import may_run_again, reads_with_storage

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

NEVER: Final = 1 << 30
"""A stage after all others, or one that is never reached; fits int32."""


class FlatGraph(NamedTuple):
    """A folded graph for numba: arrays of ops and of values, and the values that ops read and write, op after op.

    Ops 0..n-1 are the graph's. Op n is END: the target of the last stage, which reads every kept value. Therefore no other rule
    is needed to keep values live to the end. Ops after END are moves (`with_stages`).
    Bytes and costs are float64, which is exact below 2^53.
    """

    # Of each op; one more entry of the last two ends the last row.
    cost: Floats
    workspace: Floats
    replay: Floats
    last_stage: Ints  # last stage in which it may run: the stage of the first op that overwrites its inputs
    once: Ints  # whether it may run only once
    reads_from: Ints  # start of its values in `reads`
    writes_from: Ints
    # Of each value.
    size: Floats
    producer: Ints
    slot: Ints  # place among the outputs of its op
    fetched_at: Ints  # stage of the last move that fetches it from the host, or `NEVER`
    evictable: Ints  # whether it may be dropped and made again
    kept: Ints
    reads: Ints  # shape [read + 1]: numba refuses to type an empty list, so the last entry is unused
    writes: Ints
    targets: Ints  # op that each stage computes; shape [stage]
    ordered: Ints  # pairs of ops whose first computations are ordered; shape [pair, 2]
    overwritten: Ints  # pairs of an op and one that overwrites its inputs; shape [pair, 2]


class Move(NamedTuple):
    """An op in addition to the graph's, which costs nothing and runs once: the effect of a copy to or from the host."""

    value: int
    fetches: bool  # whether it makes a new instance of the value; otherwise it reads the newest, which is held until then


def flatten(problem: Problem) -> FlatGraph:
    """The arrays of a problem whose views are folded, with a stage for each op in the graph's own order.

    If folding left a view, reading it also reads the owner of its storage.
    """
    graph = problem.graph
    end = len(graph.ops)
    kept = [value.kept for value in graph.values]
    reads = [reads_with_storage(graph, op.inputs) for op in graph.ops]
    reads.append(reads_with_storage(graph, np.flatnonzero(kept).tolist()))
    reads_from, read = rows(reads)
    writes_from, written = rows([*(op.outputs for op in graph.ops), ()])
    once = np.array([*(not may_run_again(problem, o) for o in range(end)), True], dtype=np.int32)
    size, producer = np.array([v.size_bytes for v in graph.values], dtype=np.float64), np.array(graph.producer, dtype=np.int32)
    slot = np.zeros(len(size), dtype=np.int32)
    for op in graph.ops:
        slot[list(op.outputs)] = range(len(op.outputs))
    # If folding left a view, a rule ties the view to its place, and the view keeps its owner's instance. If the owner were
    # evicted and made again, both instances would be live, and the bytes counted here would be too few.
    viewed = np.zeros(len(size), dtype=np.bool_)
    viewed[[graph.root[v] for v, value in enumerate(graph.values) if value.base is not None]] = True
    clobbers = [(o, c) for o, op in enumerate(graph.ops) for c in op.clobbered_by]
    overwritten = np.array(clobbers, dtype=np.int32).reshape(-1, 2)
    targets = np.arange(end + 1, dtype=np.int32)
    return FlatGraph(
        cost=np.array([*(op.cost for op in graph.ops), 0], dtype=np.float64),
        workspace=np.array([*(op.workspace_bytes for op in graph.ops), 0], dtype=np.float64),
        replay=np.array([*(op.replay_bytes for op in graph.ops), 0], dtype=np.float64),
        last_stage=_last_stages(overwritten, targets),
        once=once,
        reads_from=reads_from,
        writes_from=writes_from,
        size=size,
        producer=producer,
        slot=slot,
        fetched_at=np.full(len(size), NEVER, dtype=np.int32),
        evictable=((once[producer] == 0) & (size > 0) & ~viewed).astype(np.int32),
        kept=np.array(kept, dtype=np.int32),
        reads=read,
        writes=written,
        targets=targets,
        ordered=np.array(graph.order, dtype=np.int32).reshape(-1, 2),
        overwritten=overwritten,
    )


def with_stages(
    given: FlatGraph, order: Ints, on_demand: Sequence[int], moved: Ints, fetches: npt.NDArray[np.bool_]
) -> FlatGraph:
    """The graph with a stage for each op of an order that is not on demand, and with moves as ops after END.

    `moved` has the value of each move, `fetches` whether the move makes a new instance of it (`Move`).
    """
    end, more = len(given.cost) - 1, (0, len(moved))
    staged = np.ones(end + 1 + len(moved), dtype=np.bool_)
    staged[on_demand] = False
    targets = np.append(order[staged[order]], np.int32(end))
    stage = np.zeros(len(staged), dtype=np.int32)
    stage[targets] = np.arange(len(targets))
    fetched_at = given.fetched_at.copy()
    fetched_at[moved[fetches]] = stage[end + 1 :][fetches]
    return given._replace(
        cost=np.pad(given.cost, more),
        workspace=np.pad(given.workspace, more),
        replay=np.pad(given.replay, more),
        last_stage=_last_stages(given.overwritten, stage),
        once=np.pad(given.once, more, constant_values=1),
        reads_from=np.append(given.reads_from, given.reads_from[-1] + np.cumsum(~fetches, dtype=np.int32)),
        writes_from=np.append(given.writes_from, given.writes_from[-1] + np.cumsum(fetches, dtype=np.int32)),
        fetched_at=fetched_at,
        reads=np.concatenate([given.reads[:-1], moved[~fetches], given.reads[-1:]]),
        writes=np.concatenate([given.writes[:-1], moved[fetches], given.writes[-1:]]),
        targets=targets,
    )


def rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists in compressed sparse rows: the start of each list and the end of the last; all entries, and one unused entry."""
    starts = np.concatenate([[0], np.cumsum([len(entry) for entry in lists])]).astype(np.int32)
    return starts, np.array([entry for part in lists for entry in part] + [0], dtype=np.int32)


def _last_stages(overwritten: Ints, stage: Ints) -> Ints:
    """Last stage in which each op may run: that of the op that overwrites its inputs, because a stage computes its op last."""
    last_stage = np.full(len(stage), NEVER, dtype=np.int32)
    np.minimum.at(last_stage, overwritten[:, 0], stage[overwritten[:, 1]])
    return last_stage
