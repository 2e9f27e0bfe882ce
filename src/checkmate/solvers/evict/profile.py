"""The kernel that turns an eviction code into a sequence of computations with its account of memory.

A plan is coded by its evictions: for each value, disjoint intervals of stages at which it is not held. A stage computes missing
values on demand, and then one target op for the first time. The code is the complement of the retention intervals of
Moccasin (Bartan et al. 2023): there each interval is a variable of a constraint program; here the empty code is the
plan that keeps everything, and every code can be decoded into a plan. A local search therefore never leaves the feasible set.

A code is an array of int32, shape ``[value, interval + 1, 2]``: ``code[v, 0, 0]`` is the number of intervals of value v and
``code[v, k]`` the first and the last stage of the k-th, from 1 on. Intervals ascend and do not touch. A value that an op reads
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

from checkmate.solvers.alarm import Flag, no_alarm
from checkmate.solvers.backends.kernels import inner_kernel, kernel
from checkmate.solvers.flat_graph import FlatGraph

Code = npt.NDArray[np.int32]
Records = npt.NDArray[Any]

FAR = 1 << 30
"""A stage after all others; fits int32."""

_VALUE = np.dtype(
    [
        ("live", "i4"),  # whether the value is held while decoding
        ("touched_at", "i4"),  # stage that last read or made it, or -1
        ("newest", "i4"),  # its newest instance
        ("seen", "i4"),  # stamp of the last price that visited it
    ]
)
_OP = np.dtype(
    [
        ("computed_at", "i4"),  # stage that last computed it, or -1
        ("first_run", "i4"),  # first position of an op with a replay state, or -1
        ("last_run", "i4"),
        ("runs", "i4"),  # start of its positions in `Scratch.runs`
        ("seen", "i4"),  # stamp of the last price that visited it
    ]
)
_POSITION = np.dtype(
    [
        ("held", "f8"),  # bytes held while its op runs, resident ones left out
        ("released", "f8"),  # bytes freed before it
        ("op", "i4"),
        ("stage", "i4"),
        ("reads", "i4"),  # start of its inputs in `Scratch.reads`
        ("makes", "i4"),  # first instance made
        ("over", "i4"),  # number of earlier positions that are over the budget
    ],
    align=True,
)
_INSTANCE = np.dtype(
    [
        ("value", "i4"),
        ("made", "i4"),  # position that makes it
        ("last_read", "i4"),  # last position that reads it; ``made`` if none does
        ("uses", "i4"),  # start of its readers in `Scratch.uses`
    ]
)


class Scratch(NamedTuple):
    """Working arrays of the kernels, allocated once: a search decodes thousands of sequences a second.

    A *position* is an index into the decoded sequence; an *instance* numbers the values made along it.
    """

    values: Records
    ops: Records  # plus one, which ends the last row
    positions: Records
    instances: Records
    reads: Code  # instances read, position after position
    uses: Code  # positions that read each instance, ascending
    runs: Code  # positions at which each op runs, ascending
    first_drop: Code  # first entry in `drops` of the values that are dropped when a stage begins, or -1; shape [stage + 1]
    drops: Records  # value, and the next entry of the same list
    stack: Records  # ops of a depth-first search, and the next input to visit
    listed: Code  # values that a stage has touched; instances that are evicted together
    candidates: Records  # a heap of values that may be evicted
    stamp: Code  # number of the current price, in one entry; it saves clearing ``seen``
    time_up: Flag  # not 0 when kernels must end at once


def build_scratch(g: FlatGraph, time_up: Flag | None = None) -> Scratch:
    """Working arrays for plans of up to eight computations per op, plus 64; longer sequences count as no plan.

    The longest plan in ``benchmarks/solvers.py`` has 8.6 computations per op, for a unit chain of 32 layers at 3 % of its
    range of budgets; the next longest has 4.6. Plans of small graphs have the most per op, hence the 64.
    """
    ops, values = len(g.ops), len(g.values)
    length, reads, instances = (8 * n + 64 for n in (ops, len(g.reads), values))

    def ints(n: int) -> Code:
        return np.zeros(n, dtype=np.int32)

    return Scratch(
        values=np.zeros(values, dtype=_VALUE),
        ops=np.zeros(ops + 1, dtype=_OP),
        positions=np.zeros(length + 3, dtype=_POSITION),
        instances=np.zeros(instances + 2, dtype=_INSTANCE),
        reads=ints(reads),
        uses=ints(reads),
        runs=ints(length + 2),
        first_drop=ints(len(g.targets) + 1),
        drops=np.zeros(reads + instances, dtype=[("value", "i4"), ("next", "i4")]),
        stack=np.zeros(ops + 8, dtype=[("op", "i4"), ("read", "i4")]),
        listed=ints(values + 8),
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
    """First stage from ``stage`` on at which a value is not held, or `FAR`."""
    for k in range(1, code[value, 0, 0] + 1):
        if code[value, k, 1] >= stage:
            return max(code[value, k, 0], stage)
    return FAR


@kernel
def add_interval(code, value, start, stop):
    """Add the stages ``start`` to ``stop`` to those at which a value is not held; False, and nothing added, if its row is full.

    The new interval is merged with those that it overlaps or touches: `next_gap` needs a sorted and disjoint row.
    """
    if start > stop:
        return True
    row = code[value]
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
    """Fill the ops, stages, reads and instances of the positions; returns their number, and the number of instances.

    The number is 0 if the code has no plan: the sequence is longer than the arrays, or an op would have to run again that may
    not. These are the frontier-advancing stages of Jain et al. (2020), section 4: R is found from the evictions instead of
    being a variable. Within a stage an op is computed at most once, right before its first reader in the stage: the stack is
    a path of the DAG and has no op twice, and values that a stage has made stay live to its end.

    The time is proportional to the number of reads in the sequence; visiting all values in each stage would make it quadratic.
    Therefore a value that is read or made is listed at the next stage at which the code drops it.
    """
    stages = len(g.targets)
    for v in range(len(w.values)):
        w.values[v].live = 0
        w.values[v].touched_at = -1
    for o in range(len(w.ops)):
        w.ops[o].computed_at = -1
        w.ops[o].first_run = -1
    w.first_drop[:] = -1
    drops, length, reads, instances = 0, 0, 0, 0
    for t in range(stages):
        d = w.first_drop[t]
        while d >= 0:
            w.values[w.drops[d].value].live = 0
            d = w.drops[d].next
        # A depth-first search with an explicit stack, because chains of missing values are deeper than a call stack. An op stays
        # on the stack, with its place in its list of inputs, until all its inputs are live.
        touched = 0
        depth = 1
        w.stack[0].op = g.targets[t]
        w.stack[0].read = g.ops[g.targets[t]].reads
        while depth > 0:
            o = w.stack[depth - 1].op
            k = w.stack[depth - 1].read
            if k < g.ops[o + 1].reads:
                w.stack[depth - 1].read = k + 1
                v = g.reads[k]
                if not w.values[v].live:
                    p = g.values[v].producer
                    # An op's first computation is always allowed: the order of the targets keeps the graph's rules about it.
                    again = w.ops[p].computed_at >= 0
                    if (again and (g.ops[p].once or t > g.ops[p].last_stage)) or depth >= len(w.stack):
                        return 0, 0
                    w.stack[depth].op = p
                    w.stack[depth].read = g.ops[p].reads
                    depth += 1
                    continue
                if w.values[v].touched_at != t:
                    w.values[v].touched_at = t
                    w.listed[touched] = v
                    touched += 1
                continue
            depth -= 1
            if (
                length + 3 >= len(w.positions)
                or reads + g.ops[o + 1].reads - g.ops[o].reads >= len(w.reads)
                or instances + g.ops[o + 1].writes - g.ops[o].writes + 2 >= len(w.instances)
            ):
                return 0, 0
            w.positions[length].op = o
            w.positions[length].stage = t
            w.positions[length].reads = reads
            w.positions[length].makes = instances
            for k in range(g.ops[o].reads, g.ops[o + 1].reads):
                x = w.values[g.reads[k]].newest
                w.instances[x].last_read = length  # positions ascend: the last one written is the last read
                w.instances[x + 1].uses += 1
                w.reads[reads] = x
                reads += 1
            for k in range(g.ops[o].writes, g.ops[o + 1].writes):
                v = g.writes[k]
                # An output that is never read is freed right after its op; END reads the kept values.
                w.values[v].newest = instances
                w.instances[instances].value = v
                w.instances[instances].made = w.instances[instances].last_read = length
                w.instances[instances + 1].uses = 0
                instances += 1
                w.values[v].live = 1
                if w.values[v].touched_at != t:
                    w.values[v].touched_at = t
                    w.listed[touched] = v
                    touched += 1
            w.ops[o].computed_at = t
            if w.ops[o].first_run < 0:
                w.ops[o].first_run = length
            w.ops[o].last_run = length
            length += 1
        # Only touched values can have a new next drop, so the lists grow with the reads. All values that the stage touched are
        # live now. A value touched in an interval of absence was computed for this stage alone, and the next stage of the
        # interval drops it.
        for k in range(touched):
            v = w.listed[k]
            gap = next_gap(code, v, t + 1)
            if gap < stages:
                if drops >= len(w.drops):
                    return 0, 0
                w.drops[drops].value = v
                w.drops[drops].next = w.first_drop[gap]
                w.first_drop[gap] = drops
                drops += 1
    w.positions[length].reads = reads
    w.positions[length].makes = instances
    return length, instances


@kernel
def profile(g, w, code):
    """Decode a code; returns the length of its sequence, END included, its cost, its peak, and the first position of the peak.

    The length is 0 if the code has no plan. A read takes the newest instance of a value, and an instance is freed after its
    last read, as in `Plan.from_order` and `simulate`. Every plan goes through these before it is offered, therefore an error
    here can only lose plans. Peaks exclude the resident bytes.
    """
    w.instances[0].uses = 0
    length, instances = _decode(g, w, code)
    if length == 0:
        return 0, 0.0, 0.0, 0
    # Readers of each instance in the order of positions, by counting sort: ends first, then rows filled from the back.
    for x in range(instances):
        w.instances[x + 1].uses += w.instances[x].uses
    for p in range(length - 1, -1, -1):
        for k in range(w.positions[p].reads, w.positions[p + 1].reads):
            x = w.reads[k]
            w.instances[x + 1].uses -= 1
            w.uses[w.instances[x + 1].uses] = p
    for x in range(instances):
        w.instances[x].uses = w.instances[x + 1].uses
    w.instances[instances].uses = w.positions[length].reads
    for p in range(length + 2):
        w.positions[p].released = 0.0
    for x in range(instances):
        w.positions[w.instances[x].last_read + 1].released += g.values[w.instances[x].value].size
    cost = 0.0
    held = 0.0
    peak = -1.0
    at = 0
    # While an op runs, its inputs, outputs and workspace are held: the bytes whose last reader ran before are subtracted first,
    # then outputs are added. If an op is computed several times, its replay state is held from the first to the last
    # computation.
    for p in range(length):
        o = w.positions[p].op
        cost += g.ops[o].cost
        held -= w.positions[p].released
        for x in range(w.positions[p].makes, w.positions[p + 1].makes):
            held += g.values[w.instances[x].value].size
        if w.ops[o].last_run > w.ops[o].first_run == p:
            held += g.ops[o].replay
            w.positions[w.ops[o].last_run + 1].released += g.ops[o].replay
        w.positions[p].held = held + g.ops[o].workspace
        if w.positions[p].held > peak:
            peak = w.positions[p].held
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
        for k in range(g.ops[o].reads, g.ops[o + 1].reads):
            touched[g.reads[k]] = t
        for k in range(g.ops[o].writes, g.ops[o + 1].writes):
            v = g.writes[k]
            # Made again: it was not held since it was last read or made.
            if touched[v] >= 0:
                add_interval(code, v, touched[v] + 1, t)
            touched[v] = t
