"""The kernel that turns an eviction code into a sequence of computations with its account of memory.

A plan is coded by its evictions: for each value, disjoint intervals of stages at which it is not held. A stage computes missing
values on demand, and then one target op for the first time. The code is the complement of the retention intervals of
Moccasin (Bartan et al. 2023): there each interval is a variable of a constraint program; here the empty code is the
plan that keeps everything, and every code can be decoded into a plan. A local search therefore never leaves the feasible set.

A code is an array of int32, shape ``[interval + 1, 2, value]``: ``code[0, 0, v]`` is the number of intervals of value v and
``code[k, :, v]`` the first and the last stage of the k-th, from 1 on. Intervals ascend and do not touch. A value that an op reads
within an interval is computed again for that stage alone.

In all kernels of this package ``g`` is a `FlatGraph`, ``w`` a `Scratch` and ``code`` a code. Kernels that Python calls return
plain tuples: numba makes a named tuple by a call of Python code. If a pending Ctrl-C raises in this call, numba reads a result
that does not exist (a segmentation fault, seen in numba 0.68).
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.solvers.backends.kernels import inner_kernel, kernel
from checkmate.solvers.clocks import Flag, no_alarm
from checkmate.solvers.flat_graph import NEVER, FlatGraph, Ints


class Scratch(NamedTuple):
    """Working arrays of the kernels, allocated once: a search decodes thousands of sequences a second.

    A *position* is an index into the decoded sequence; an *instance* numbers the values made along it.
    """

    # Of each value: whether it is held while decoding, the next value that the same stage drops, its newest instance, and the
    # stamp of the last price that visited it.
    live: Ints
    next_drop: Ints
    newest: Ints
    seen_value: Ints
    # Of each op, plus one that ends the last row: its first and last position, first -1 if it has none; the start of its
    # positions in `runs`; and the stamp of the last price that visited it.
    first_run: Ints
    last_run: Ints
    runs_from: Ints
    seen_op: Ints
    # Of each position: its op and stage, the start of its inputs in `reads`, the first instance that it makes, and the number of
    # earlier positions that are over the budget.
    op: Ints
    stage: Ints
    reads_from: Ints
    makes: Ints
    over: Ints
    # Of each instance: its value, the position that makes it, the last position that reads it (`made` if none does), and the
    # start of its readers in `uses`.
    value: Ints
    made: Ints
    last_read: Ints
    uses_from: Ints
    held: npt.NDArray[np.float64]  # bytes held while the op of each position runs, resident ones left out
    released: npt.NDArray[np.float64]  # bytes freed before each position
    reads: Ints  # instances read, position after position
    uses: Ints  # positions that read each instance, ascending
    runs: Ints  # positions at which each op runs, ascending
    first_drop: Ints  # first of the values that are dropped when a stage begins, or -1; shape [stage]
    stack: Ints  # ops of a depth-first search
    next_read: Ints  # next input of each of these ops
    group: Ints  # instances that are evicted together
    candidates: npt.NDArray[Any]  # a heap of values that may be evicted
    stamp: Ints  # number of the current price, in one entry; it saves clearing the stamps
    time_up: Flag  # not 0 when kernels must end at once


def build_scratch(g: FlatGraph, time_up: Flag | None = None) -> Scratch:
    """Working arrays for plans of up to eight computations per op, plus 64; longer sequences count as no plan.

    The longest plan in ``benchmarks/solvers.py`` has 8.6 computations per op, for a unit chain of 32 layers at 3 % of its
    range of budgets; the next longest has 4.6. Plans of small graphs have the most per op, hence the 64.
    """
    ops, values = len(g.reads_from), len(g.size)
    length, reads, instances = (8 * n + 64 for n in (ops, len(g.reads), values))

    def ints(n: int) -> Ints:
        return np.zeros(n, dtype=np.int32)

    return Scratch(
        *(ints(values) for _ in range(4)),
        *(ints(ops) for _ in range(4)),
        *(ints(length + 1) for _ in range(5)),
        *(ints(instances + 1) for _ in range(4)),
        held=np.zeros(length + 1),
        released=np.zeros(length + 1),
        reads=ints(reads),
        uses=ints(reads),
        runs=ints(length),
        first_drop=ints(len(g.targets)),
        stack=ints(ops),
        next_read=ints(ops),
        group=ints(values),
        candidates=np.zeros(values, dtype=[("score", "f8"), ("noise", "f8"), ("value", "i8")]),
        stamp=ints(1),
        time_up=no_alarm() if time_up is None else time_up,
    )


def seeded(seed: int) -> npt.NDArray[np.uint64]:
    """The state of an xorshift64 generator (Marsaglia 2003), in one entry.

    numba has one global generator per process. A solve in another thread would advance it, and the same seed would then give
    another plan. The odd constants separate small seeds and keep the state from being zero; eight draws mix the state.
    """
    mask = (1 << 64) - 1
    state = (seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & mask
    for _ in range(8):
        state ^= (state << 13) & mask
        state ^= state >> 7
        state ^= (state << 17) & mask
    return np.array([state], dtype=np.uint64)


@inner_kernel
def next_random(state):
    """A number in [0, 1) from the upper 53 bits, which a float64 holds exactly."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return float(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@inner_kernel
def next_gap(code, value, stage):
    """First stage from ``stage`` on at which a value is not held, or `NEVER`."""
    for k in range(1, code[0, 0, value] + 1):
        if code[k, 1, value] >= stage:
            return max(code[k, 0, value], stage)
    return NEVER


@kernel
def add_interval(code, value, start, stop):
    """Add the stages ``start`` to ``stop`` to those at which a value is not held; False, and nothing added, if its row is full.

    The new interval is merged with those that it overlaps or touches: `next_gap` needs a sorted and disjoint row.
    """
    if start > stop:
        return True
    row = code[:, :, value]
    kept = 0
    for k in range(1, row[0, 0] + 1):
        a, b = row[k, 0], row[k, 1]
        if b < start - 1 or a > stop + 1:
            kept += 1
            row[kept, 0], row[kept, 1] = a, b
        else:
            start, stop = min(start, a), max(stop, b)
    row[0, 0] = kept
    if kept + 1 >= len(row):
        return False
    k = kept + 1
    while k > 1 and row[k - 1, 0] > start:
        row[k, 0], row[k, 1] = row[k - 1, 0], row[k - 1, 1]
        k -= 1
    row[k, 0], row[k, 1] = start, stop
    row[0, 0] = kept + 1
    return True


@inner_kernel
def _decode(g, w, code):
    """Fill the ops and stages of the positions; returns their number.

    The number is 0 if the code has no plan: the sequence is longer than the arrays, or an op would have to run again that may
    not. These are the frontier-advancing stages of Jain et al. (2020), section 4: R is found from the evictions instead of
    being a variable. Within a stage an op is computed at most once, right before its first reader in the stage: the stack is
    a path of the DAG and has no op twice, and values that a stage has made stay live to its end.

    The time is proportional to the number of reads in the sequence, because a value that is made is listed at the next stage at
    which the code drops it. If it is made in an interval of absence, this is the next stage: it is made for one stage alone.
    """
    stages = len(g.targets)
    w.live[:] = 0
    w.first_run[:] = -1
    w.first_drop[:] = -1
    length = 0
    for t in range(stages):
        v = w.first_drop[t]
        while v >= 0:
            w.live[v] = 0
            v = w.next_drop[v]
        # A depth-first search with an explicit stack, because chains of missing values are deeper than a call stack. An op stays
        # on the stack, with its place in its list of inputs, until all its inputs are live.
        depth = 1
        w.stack[0] = g.targets[t]
        w.next_read[0] = g.reads_from[g.targets[t]]
        while depth > 0:
            o = w.stack[depth - 1]
            k = w.next_read[depth - 1]
            stop = g.reads_from[o + 1]
            while k < stop and w.live[g.reads[k]]:
                k += 1
            if k < stop:
                p = g.producer[g.reads[k]]
                # An op's first computation is always allowed: the order of the targets keeps the graph's rules about it.
                if w.first_run[p] >= 0 and (g.once[p] or t > g.last_stage[p]):
                    return 0
                w.next_read[depth - 1] = k + 1
                w.stack[depth] = p
                w.next_read[depth] = g.reads_from[p]
                depth += 1
                continue
            depth -= 1
            if length + 1 >= len(w.op):
                return 0
            w.op[length] = o
            w.stage[length] = t
            if w.first_run[o] < 0:
                w.first_run[o] = length
            w.last_run[o] = length
            length += 1
            for k in range(g.writes_from[o], g.writes_from[o + 1]):
                v = g.writes[k]
                if not w.live[v]:
                    w.live[v] = 1
                    gap = next_gap(code, v, t + 1)
                    if gap < stages:
                        w.next_drop[v] = w.first_drop[gap]
                        w.first_drop[gap] = v
    return length


@inner_kernel
def _link(g, w, length):
    """Fill the reads, uses and instances of the positions; returns the number of instances, or -1 if the arrays are too short."""
    reads, instances = 0, 0
    w.uses_from[0] = 0
    for p in range(length):
        o = w.op[p]
        w.reads_from[p] = reads
        w.makes[p] = instances
        if reads + g.reads_from[o + 1] - g.reads_from[o] > len(w.reads) or instances + g.writes_from[o + 1] - g.writes_from[
            o
        ] >= len(w.value):
            return -1
        for k in range(g.reads_from[o], g.reads_from[o + 1]):
            x = w.newest[g.reads[k]]
            w.last_read[x] = p  # positions ascend: the last one written is the last read
            w.uses_from[x + 1] += 1
            w.reads[reads] = x
            reads += 1
        for k in range(g.writes_from[o], g.writes_from[o + 1]):
            # An output that is never read is freed right after its op; END reads the kept values.
            w.newest[g.writes[k]] = instances
            w.value[instances] = g.writes[k]
            w.made[instances] = w.last_read[instances] = p
            w.uses_from[instances + 1] = 0
            instances += 1
    w.reads_from[length] = reads
    w.makes[length] = instances
    # Readers of each instance in the order of positions, by counting sort: ends first, then rows filled from the back.
    for x in range(instances):
        w.uses_from[x + 1] += w.uses_from[x]
    for p in range(length - 1, -1, -1):
        for k in range(w.reads_from[p], w.reads_from[p + 1]):
            x = w.reads[k]
            w.uses_from[x + 1] -= 1
            w.uses[w.uses_from[x + 1]] = p
    for x in range(instances):
        w.uses_from[x] = w.uses_from[x + 1]
    w.uses_from[instances] = reads
    return instances


@kernel
def profile(g, w, code):
    """Decode a code; returns the length of its sequence, END included, its cost, its peak, and the first position of the peak.

    The length is 0 if the code has no plan. A read takes the newest instance of a value, and an instance is freed after its
    last read, as in `Plan.from_order` and `simulate`. Every plan goes through these before it is offered, therefore an error
    here can only lose plans. Peaks exclude the resident bytes.
    """
    length = _decode(g, w, code)
    instances = _link(g, w, length)
    if length == 0 or instances < 0:
        return 0, 0.0, 0.0, 0
    for p in range(length + 1):
        w.released[p] = 0.0
    for x in range(instances):
        w.released[w.last_read[x] + 1] += g.size[w.value[x]]
    cost = 0.0
    held = 0.0
    peak = -1.0
    at = 0
    # While an op runs, its inputs, outputs and workspace are held: the bytes whose last reader ran before are subtracted first,
    # then outputs are added. If an op is computed several times, its replay state is held from the first to the last
    # computation.
    for p in range(length):
        o = w.op[p]
        cost += g.cost[o]
        held -= w.released[p]
        for x in range(w.makes[p], w.makes[p + 1]):
            held += g.size[w.value[x]]
        if w.last_run[o] > w.first_run[o] == p:
            held += g.replay[o]
            w.released[w.last_run[o] + 1] += g.replay[o]
        w.held[p] = held + g.workspace[o]
        if w.held[p] > peak:
            peak = w.held[p]
            at = p
    return length, cost, peak, at


@kernel
def encode(g, stage, order, work, code):
    """Fill an empty code with the absences in an order: from the last touch of an instance to the computation of the next.

    `stage` has the stage of each op, or -1; `order` has the ops as they are computed, without END; `work` has three rows, each
    with room for as many entries as there are ops, values or positions.
    """
    first, stages, touched = work[0], work[1], work[2]
    first[:] = -1
    touched[:] = -1
    for p in range(len(order) - 1, -1, -1):
        first[order[p]] = p
    # A computation belongs to the stage of the next target that is computed for the first time, itself included.
    t = len(g.targets) - 1
    for p in range(len(order) - 1, -1, -1):
        if first[order[p]] == p and stage[order[p]] >= 0:
            t = stage[order[p]]
        stages[p] = t
    for p in range(len(order)):
        o, t = order[p], stages[p]
        for k in range(g.reads_from[o], g.reads_from[o + 1]):
            touched[g.reads[k]] = t
        for k in range(g.writes_from[o], g.writes_from[o + 1]):
            v = g.writes[k]
            # Made again: it was not held since it was last read or made.
            if touched[v] >= 0:
                add_interval(code, v, touched[v] + 1, t)
            touched[v] = t
