"""The flat arrays on which the kernels of the search work.

A plan is coded by what is *not* held: for each value, disjoint intervals of stages. A stage computes one target op for
the first time, and before it, on demand, whatever is missing. This is the complement of the retention intervals of
Moccasin (Bartan et al. 2023): there each interval is a variable of a constraint program; here the empty code is the
plan that keeps everything, and every code can be decoded into a plan, so that a local search never leaves the feasible set.

The kernels are compiled by numba, which takes NamedTuples of arrays but no classes; hence these types.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.solvers.alarm import Flag, no_alarm
from checkmate.solvers.reductions.fold_views import may_run_again

Ints = npt.NDArray[np.int64]
SmallInts = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.uint8]

NEVER = 1 << 40
"""A stage that is never reached."""


class Move(NamedTuple):
    """An op beside those of the graph, which costs nothing and runs once: what a copy to or from the host does to a value.

    Attributes:
        value: The value.
        fetches: Whether it makes a new instance of the value; otherwise it reads the newest, which is held to there.
    """

    value: int
    fetches: bool


class Instance(NamedTuple):
    """A folded graph as flat arrays.

    Ops 0..n-1 are the graph's. Op n is END: the target of the last stage, which reads every kept value, so that no further
    rule is needed for what must be live at the end. Ops after END are moves. Bytes and costs are float64, which is exact
    below 2^53.

    Attributes:
        targets: Op that each stage computes. Shape ``[stage]``.
        once: Whether an op may be computed only once. Shape ``[op]``.
        last_stage: Last stage in which an op may be computed: that of the first op that overwrites its inputs. Shape ``[op]``.
        read_start: Start of each op's inputs in ``reads``. Shape ``[op + 1]``.
        reads: Values read, op after op. Shape ``[read]``.
        write_start: Start of each op's outputs in ``writes``. Shape ``[op + 1]``.
        writes: Values written, op after op. Shape ``[write]``.
        producer: Op that makes each value. Shape ``[value]``.
        slot: Place of each value among its op's outputs. Shape ``[value]``.
        cost: Cost of each op. Shape ``[op]``.
        workspace: Workspace of each op, in bytes. Shape ``[op]``.
        replay: Replay bytes of each op. Shape ``[op]``.
        size: Bytes of each value. Shape ``[value]``.
        evictable: Whether a value may be dropped and made again. Shape ``[value]``.
        kept: Whether a value is kept. Shape ``[value]``.
        overwritten: An op and one that overwrites its inputs, pair by pair. Shape ``[pair, 2]``.
        fetched_at: Stage of the last move that fetches a value, or `NEVER`. Shape ``[value]``.
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
    kept: Flags
    overwritten: Ints
    fetched_at: Ints


class Code(NamedTuple):
    """A plan as intervals of absence: stages ``low[v, k]`` to ``high[v, k]``, both included, at which value v is not held.

    The intervals of a value ascend and do not touch. A value that an op reads within such an interval is computed again for
    that stage alone.

    Attributes:
        low: First stage of each interval. Shape ``[value, slot]``.
        high: Last stage of each interval. Shape ``[value, slot]``.
        used: Number of intervals of each value. Shape ``[value]``.
    """

    low: SmallInts
    high: SmallInts
    used: SmallInts


def build_instance(problem: Problem) -> Instance:
    """Arrays of a problem whose views are folded, with a stage for each op in the graph's own order.

    Args:
        problem: The problem. A view left in its graph counts as a read of its storage's owner too.
    """
    graph = problem.graph
    kept = np.array([value.kept for value in graph.values], dtype=np.uint8)
    reads = [_reads_with_storage(graph, op.inputs) for op in graph.ops]
    reads.append(_reads_with_storage(graph, np.flatnonzero(kept).tolist()))
    read_start, read_values = rows(reads)
    write_start, written_values = rows([*(op.outputs for op in graph.ops), ()])
    once = np.array([*(not may_run_again(problem, o) for o in range(len(graph.ops))), True], dtype=np.uint8)
    # Instances are numbered op run by op run, so the instance of a value is that of the run plus its slot.
    slot = np.zeros(len(graph.values), dtype=np.int64)
    for op in graph.ops:
        for place, v in enumerate(op.outputs):
            slot[v] = place
    size = np.array([v.size_bytes for v in graph.values], dtype=np.float64)
    producer = np.array(graph.producer, dtype=np.int64)
    # A view that folding left is tied to its place by a rule and keeps the instance that it was made from. If the owner were
    # evicted and made again, both instances would be live and the bytes counted here too few.
    viewed = np.zeros(len(graph.values), dtype=np.bool_)
    viewed[[graph.root[v] for v, value in enumerate(graph.values) if value.base is not None]] = True
    clobbers = [(o, c) for o, op in enumerate(graph.ops) for c in op.clobbered_by]
    ops = len(graph.ops) + 1
    given = Instance(
        targets=np.arange(ops),
        once=once,
        last_stage=np.full(ops, NEVER, dtype=np.int64),
        read_start=read_start,
        reads=read_values,
        write_start=write_start,
        writes=written_values,
        producer=producer,
        slot=slot,
        cost=np.array([*(op.cost for op in graph.ops), 0], dtype=np.float64),
        workspace=np.array([*(op.workspace_bytes for op in graph.ops), 0], dtype=np.float64),
        replay=np.array([*(op.replay_bytes for op in graph.ops), 0], dtype=np.float64),
        size=size,
        evictable=((once[producer] == 0) & (size > 0) & ~viewed).astype(np.uint8),
        kept=kept,
        overwritten=np.array(clobbers, dtype=np.int64).reshape(-1, 2),
        fetched_at=np.full(len(graph.values), NEVER, dtype=np.int64),
    )
    return given._replace(last_stage=_last_stages(given, given.targets))


def with_stages(
    given: Instance, order: Ints, on_demand: Collection[int], moved: Ints, fetches: npt.NDArray[np.bool_]
) -> Instance:
    """An instance with a stage for each op of an order.

    Args:
        given: The instance of the problem, without moves (`build_instance`).
        order: Ops in the order of their stages, moves as ops from that after END on. Shape ``[stage]``.
        on_demand: Ops of the order that have no stage all the same: computed when another op needs them.
        moved: Value of each move. Shape ``[move]``.
        fetches: Whether it makes a new instance of it (`Move`). Shape ``[move]``.
    """
    end, ops = len(given.cost) - 1, len(given.cost) + len(moved)
    staged = np.ones(ops, dtype=np.bool_)
    staged[list(on_demand)] = False
    targets = np.append(order[staged[order]], end)
    stage = np.zeros(ops, dtype=np.int64)
    stage[targets] = np.arange(len(targets))
    fetched_at = given.fetched_at.copy()
    fetched_at[moved[fetches]] = stage[end + 1 :][fetches]
    read_start, reads = _with_rows(given.read_start, given.reads, moved, ~fetches)
    write_start, writes = _with_rows(given.write_start, given.writes, moved, fetches)
    free = np.zeros(len(moved))
    return given._replace(
        targets=targets,
        once=np.append(given.once, np.ones(len(moved), dtype=np.uint8)),
        last_stage=_last_stages(given, stage),
        read_start=read_start,
        reads=reads,
        write_start=write_start,
        writes=writes,
        cost=np.append(given.cost, free),
        workspace=np.append(given.workspace, free),
        replay=np.append(given.replay, free),
        fetched_at=fetched_at,
    )


def first_computations(order: Sequence[int]) -> list[int]:
    """Each op of an order once, where it is computed first."""
    return list(dict.fromkeys(order))


def rows(lists: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Lists in compressed sparse row form.

    Args:
        lists: A list of indices for each row.

    Returns:
        Start of each row, shape ``[row + 1]``, and all entries one row after another, with one unused entry at the end
        because numba refuses to type an empty list.
    """
    starts = np.concatenate([[0], np.cumsum([len(entry) for entry in lists])]).astype(np.int64)
    return starts, np.array([entry for part in lists for entry in part] + [0], dtype=np.int64)


class Scratch(NamedTuple):
    """Working arrays of the kernels, allocated once: a search decodes thousands of sequences a second.

    *Position* is an index into the decoded sequence; *instance* numbers the values made along it.

    Attributes:
        sequence: Op at each position. Shape ``[position]``.
        stage_of: Stage of each position. Shape ``[position]``.
        live: Whether a value is held while decoding. Shape ``[value]``.
        bucket_head: First entry of the list of values to drop when a stage begins, or -1. Shape ``[stage + 1]``.
        bucket_next: Next entry of the same list, or -1. Shape ``[entry]``.
        bucket_value: Value of an entry. Shape ``[entry]``.
        touched_at: Stage that last read or made a value, or -1. Shape ``[value]``.
        computed_at: Stage that last computed an op, or -1. Shape ``[op]``.
        stack_op: Ops of a depth-first search. Shape ``[depth]``.
        stack_read: Next input to look at for each of them. Shape ``[depth]``.
        touched: Values that a stage has read or made. Shape ``[value]``.
        newest: Newest instance of each value. Shape ``[value]``.
        first_instance: First instance made at each position. Shape ``[position + 1]``.
        value_of: Value of each instance. Shape ``[instance]``.
        last_read: Last position that reads an instance, its own if none does. Shape ``[instance]``.
        read_offset: Start of each position's reads in ``read_instance``. Shape ``[position + 1]``.
        read_instance: Instances read, position after position. Shape ``[read]``.
        use_start: Start of each instance's readers in ``use_position``. Shape ``[instance + 1]``.
        use_position: Positions that read each instance, ascending. Shape ``[read]``.
        released: Bytes freed before each position. Shape ``[position + 1]``.
        profile: Bytes held at each position, resident ones left out. Shape ``[position]``.
        first_run: First position of an op with a replay state, or -1. Shape ``[op]``.
        last_run: Its last position. Shape ``[op]``.
        run_start: Start of each op's positions in ``run_position``. Shape ``[op + 1]``.
        run_position: Positions at which each op runs, ascending. Shape ``[position]``.
        over: How many positions before each are over the budget. Shape ``[position + 1]``.
        seen_op: Stamp of the last price that looked at an op. Shape ``[op]``.
        seen_value: Stamp of the last price that looked at a value. Shape ``[value]``.
        stamp: Number of the current price, in one entry, which saves clearing the two arrays above. Shape ``[1]``.
        group: Instances that would have to be evicted together with the one that is priced. Shape ``[value]``.
        candidate: Values that may be evicted at the peak. Shape ``[value]``.
        score: Score of each candidate, lower is better. Shape ``[value]``.
        noise: Factor of noise of each candidate. Shape ``[value]``.
        evicted: Values that have intervals. Shape ``[value]``.
        stuck: Whether nothing can be evicted at the peak of a stage. Shape ``[stage]``.
        time_up: Not 0 when kernels have to end, whatever they are at. Shape ``[1]``.
    """

    sequence: SmallInts
    stage_of: SmallInts
    live: Flags
    bucket_head: SmallInts
    bucket_next: SmallInts
    bucket_value: SmallInts
    touched_at: SmallInts
    computed_at: SmallInts
    stack_op: SmallInts
    stack_read: Ints
    touched: SmallInts
    newest: SmallInts
    first_instance: SmallInts
    value_of: SmallInts
    last_read: SmallInts
    read_offset: SmallInts
    read_instance: SmallInts
    use_start: SmallInts
    use_position: SmallInts
    released: Floats
    profile: Floats
    first_run: SmallInts
    last_run: SmallInts
    run_start: SmallInts
    run_position: SmallInts
    over: SmallInts
    seen_op: SmallInts
    seen_value: SmallInts
    stamp: SmallInts
    group: SmallInts
    candidate: SmallInts
    score: Floats
    noise: Floats
    evicted: SmallInts
    stuck: Flags
    time_up: Flag


_SMALL_GRAPH: Final = 64
"""Room for computations beside the multiple of the number of ops: plans of small graphs have the largest multiples."""


def build_scratch(instance: Instance, stretch: int, time_up: Flag | None = None) -> Scratch:
    """Working arrays for an instance.

    Args:
        instance: The instance.
        stretch: Longest sequence for which there is room, as a multiple of the number of ops.
        time_up: Ends kernels when it is raised; by default nothing does.
    """
    ops, values, stages = len(instance.cost), len(instance.size), len(instance.targets)
    length = stretch * ops + _SMALL_GRAPH
    reads = stretch * len(instance.reads) + _SMALL_GRAPH
    instances = stretch * values + _SMALL_GRAPH

    def ints(n: int) -> SmallInts:
        return np.zeros(n, dtype=np.int32)

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
        stack_read=np.zeros(ops + 8, dtype=np.int64),
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
        evicted=ints(values),
        stuck=np.zeros(stages, dtype=np.uint8),
        time_up=no_alarm() if time_up is None else time_up,
    )


def _reads_with_storage(graph: Graph, inputs: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(u for v in inputs for u in (v, graph.root[v])))


def _last_stages(given: Instance, stage: Ints) -> Ints:
    """Last stage in which each op may be computed, from the stage of each op.

    It may run in the stage of the op that overwrites its inputs, which is computed last in it, but not after.
    """
    last_stage = np.full(len(stage), NEVER, dtype=np.int64)
    np.minimum.at(last_stage, given.overwritten[:, 0], stage[given.overwritten[:, 1]])
    return last_stage


def _with_rows(start: Ints, entries: Ints, more: Ints, filled: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Lists in compressed sparse row form (`rows`) and a row for each of some more entries, which has it if it is filled."""
    starts = np.append(start, start[-1] + np.cumsum(filled))
    return starts, np.concatenate([entries[:-1], more[filled], entries[-1:]])
