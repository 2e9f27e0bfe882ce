"""A folded graph as flat arrays, which all compiled searches read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.problem import Problem
from checkmate.solvers.reductions.fold_views import may_run_again, reads_with_storage

Ints = npt.NDArray[np.int32]

NEVER: Final = 1 << 30
"""A stage after all others, or one that is never reached; fits int32."""

OP = np.dtype(
    [
        ("cost", "f8"),
        ("workspace", "f8"),
        ("replay", "f8"),
        ("reads", "i4"),  # start of its values in `FlatGraph.reads`; they end where those of the next op start
        ("writes", "i4"),
        ("last_stage", "i4"),  # last stage in which it may run: the stage of the first op that overwrites its inputs
        ("once", "i4"),  # whether it may run only once
    ]
)
VALUE = np.dtype(
    [
        ("size", "f8"),
        ("producer", "i4"),
        ("slot", "i4"),  # place among the outputs of its op
        ("fetched_at", "i4"),  # stage of the last move that fetches it from the host, or `NEVER`
        ("evictable", "i4"),  # whether it may be dropped and made again
        ("kept", "i4"),
    ]
)


class FlatGraph(NamedTuple):
    """A folded graph for numba: records of ops and values, and the values that ops read and write, op after op.

    Ops 0..n-1 are the graph's. Op n is END: the target of the last stage, which reads every kept value. Therefore no other rule
    is needed to keep values live to the end. Ops after END are moves (`with_stages`); one more record ends the last row.
    Bytes and costs are float64, which is exact below 2^53.
    """

    ops: npt.NDArray[Any]  # of OP; shape [op + 1]
    values: npt.NDArray[Any]  # of VALUE; shape [value]
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
    count = len(graph.ops)
    kept = [value.kept for value in graph.values]
    reads = [reads_with_storage(graph, op.inputs) for op in graph.ops]
    reads.append(reads_with_storage(graph, np.flatnonzero(kept).tolist()))
    ops = np.zeros(count + 2, dtype=OP)
    ops["cost"][:count] = [op.cost for op in graph.ops]
    ops["workspace"][:count] = [op.workspace_bytes for op in graph.ops]
    ops["replay"][:count] = [op.replay_bytes for op in graph.ops]
    ops["once"][:count] = [not may_run_again(problem, o) for o in range(count)]
    ops["once"][count] = True
    ops["reads"], read = rows(reads)
    ops["writes"], written = rows([*(op.outputs for op in graph.ops), ()])
    values = np.zeros(len(graph.values), dtype=VALUE)
    values["size"] = [v.size_bytes for v in graph.values]
    values["producer"] = graph.producer
    values["kept"] = kept
    values["fetched_at"] = NEVER
    for op in graph.ops:
        values["slot"][list(op.outputs)] = range(len(op.outputs))
    # If folding left a view, a rule ties the view to its place, and the view keeps its owner's instance. If the owner were
    # evicted and made again, both instances would be live, and the bytes counted here would be too few.
    viewed = np.zeros(len(values), dtype=np.bool_)
    viewed[[graph.root[v] for v, value in enumerate(graph.values) if value.base is not None]] = True
    values["evictable"] = (ops["once"][values["producer"]] == 0) & (values["size"] > 0) & ~viewed
    clobbers = [(o, c) for o, op in enumerate(graph.ops) for c in op.clobbered_by]
    ordered = np.array(graph.order, dtype=np.int32).reshape(-1, 2)
    overwritten = np.array(clobbers, dtype=np.int32).reshape(-1, 2)
    targets = np.arange(count + 1, dtype=np.int32)
    ops["last_stage"][:-1] = _last_stages(overwritten, targets)
    return FlatGraph(ops, values, read, written, targets, ordered, overwritten)


def with_stages(
    given: FlatGraph, order: Ints, on_demand: Sequence[int], moved: Ints, fetches: npt.NDArray[np.bool_]
) -> FlatGraph:
    """The graph with a stage for each op of an order that is not on demand, and with moves as ops after END.

    `moved` has the value of each move, `fetches` whether the move makes a new instance of it (`Move`).
    """
    end = len(given.ops) - 2
    staged = np.ones(end + 1 + len(moved), dtype=np.bool_)
    staged[on_demand] = False
    targets = np.append(order[staged[order]], np.int32(end))
    stage = np.zeros(len(staged), dtype=np.int32)
    stage[targets] = np.arange(len(targets))
    ops = np.zeros(len(staged) + 1, dtype=OP)
    ops[: end + 2] = given.ops
    ops["once"][end + 1 : -1] = 1
    ops["last_stage"][:-1] = _last_stages(given.overwritten, stage)
    ops["reads"][end + 2 :] = given.ops["reads"][-1] + np.cumsum(~fetches)
    ops["writes"][end + 2 :] = given.ops["writes"][-1] + np.cumsum(fetches)
    values = given.values.copy()
    values["fetched_at"][moved[fetches]] = stage[end + 1 :][fetches]
    reads = np.concatenate([given.reads[:-1], moved[~fetches], given.reads[-1:]])
    writes = np.concatenate([given.writes[:-1], moved[fetches], given.writes[-1:]])
    return given._replace(ops=ops, values=values, reads=reads, writes=writes, targets=targets)


def rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists in compressed sparse rows: the start of each list and the end of the last; all entries, and one unused entry."""
    starts = np.concatenate([[0], np.cumsum([len(entry) for entry in lists])]).astype(np.int32)
    return starts, np.array([entry for part in lists for entry in part] + [0], dtype=np.int32)


def _last_stages(overwritten: Ints, stage: Ints) -> Ints:
    """Last stage in which each op may run: that of the op that overwrites its inputs, because a stage computes its op last."""
    last_stage = np.full(len(stage), NEVER, dtype=np.int32)
    np.minimum.at(last_stage, overwritten[:, 0], stage[overwritten[:, 1]])
    return last_stage
