"""Kernels that turn an eviction code into a sequence of computations, and a sequence into its memory profile.

In all kernels of this package ``g`` is an `Instance`, ``w`` a `Scratch` and ``code`` a `Code`; what a kernel leaves in ``w`` is
said in its docstring.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from typing import Final

import numpy as np

from checkmate.solvers.backends.kernels import kernel

FAR: Final = 1 << 30
"""A stage after all others; fits int32."""

OVERFLOW: Final = -1
"""Returned in place of a length: the sequence is longer than the scratch arrays, which counts as no plan."""
STUCK: Final = -2
"""Returned in place of a length: an op that may not run again would have to."""


@kernel
def seed_random(state, seed):
    """Start an xorshift64 generator (Marsaglia 2003).

    numba has one global generator a process, which a solve in another thread would advance: the same seed would then give
    another plan. The odd constants keep small seeds apart and the state from zero; eight draws mix it.

    Args:
        state: Filled. Shape ``[1]``, uint64.
        seed: Any whole number that fits uint64.
    """
    state[0] = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    for _ in range(8):
        next_random(state)


@kernel
def next_random(state):
    """A number in [0, 1): the upper 53 bits, as many as a float64 holds."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return float(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def random_below(state, count):
    """A whole number in [0, count)."""
    return int(next_random(state) * count)


@kernel
def copy_range(source, start, stop, to, at):
    """Copy the entries from ``start`` up to ``stop`` to another array, from ``at`` on.

    An assignment of slices may need a third array, where the two overlap, and a kernel cannot allocate.
    """
    for k in range(stop - start):
        to[at + k] = source[start + k]


@kernel
def next_gap(low, high, count, stage):
    """First stage at or after ``stage`` at which a value is not held, or `FAR`.

    Args:
        low: First stages of the value's intervals, ascending. Shape ``[slot]``.
        high: Their last stages. Shape ``[slot]``.
        count: Intervals in use.
        stage: The stage.
    """
    for k in range(count):
        if high[k] >= stage:
            return low[k] if low[k] > stage else stage
    return FAR


@kernel
def add_interval(code, value, start, stop):
    """Add the stages ``start`` to ``stop``, both included, to those at which a value is not held.

    Intervals that it overlaps or touches are merged with it, so that a row stays sorted and disjoint, as `next_gap` needs it.

    Returns:
        False if the value's row is full; the interval is then not added.
    """
    if start > stop:
        return True
    row_low, row_high, kept = code.low[value], code.high[value], 0
    for k in range(code.used[value]):
        a, b = row_low[k], row_high[k]
        if b < start - 1 or a > stop + 1:
            row_low[kept] = a
            row_high[kept] = b
            kept += 1
        else:
            start = min(start, a)
            stop = max(stop, b)
    if kept >= row_low.shape[0]:
        code.used[value] = kept
        return False
    k = kept
    while k > 0 and row_low[k - 1] > start:
        row_low[k] = row_low[k - 1]
        row_high[k] = row_high[k - 1]
        k -= 1
    row_low[k] = start
    row_high[k] = stop
    code.used[value] = kept + 1
    return True


@kernel
def decode(g, w, code):
    """Sequence of an eviction code: each stage computes its target, and before it, depth first, whatever is missing.

    These are the frontier-advancing stages of Jain et al. (2020), section 4: R is found from the evictions instead of
    being a variable. Within a stage an op is computed at most once, right before its first reader in it: the stack is
    a path of the DAG, so no op is on it twice, and what a stage has made stays live to its end.

    Takes time in proportion to the number of reads in the sequence; looking at all values in each stage would make it
    quadratic. Hence the buckets: a value that is read or made is listed at the next stage at which the code drops it.

    Fills ``w.sequence`` and ``w.stage_of``.

    Returns:
        Length of the sequence, END included; `OVERFLOW` or `STUCK`.
    """
    low, high, used = code.low, code.high, code.used
    # Nothing of an earlier decoding may show: these arrays are read before they are written.
    stages = len(g.targets)
    w.live[:] = 0
    w.bucket_head[:] = -1
    w.touched_at[:] = -1
    w.computed_at[:] = -1
    buckets = 0
    length = 0
    for t in range(stages):
        b = w.bucket_head[t]
        while b >= 0:
            w.live[w.bucket_value[b]] = 0
            b = w.bucket_next[b]
        # A depth-first search with an explicit stack, since chains of missing values are deeper than a call stack. An op stays on
        # it until all its inputs are live; its place in its list of inputs is kept beside it.
        touched = 0
        depth = 1
        w.stack_op[0] = g.targets[t]
        w.stack_read[0] = g.read_start[g.targets[t]]
        while depth > 0:
            o = w.stack_op[depth - 1]
            k = w.stack_read[depth - 1]
            if k < g.read_start[o + 1]:
                w.stack_read[depth - 1] = k + 1
                v = g.reads[k]
                if not w.live[v]:
                    p = g.producer[v]
                    # Its first computation is always allowed: the graph's rules about it hold by the order of the targets.
                    if w.computed_at[p] >= 0 and (g.once[p] or t > g.last_stage[p]):
                        return STUCK
                    if depth >= len(w.stack_op):
                        return OVERFLOW
                    w.stack_op[depth] = p
                    w.stack_read[depth] = g.read_start[p]
                    depth += 1
                elif w.touched_at[v] != t:
                    w.touched_at[v] = t
                    w.touched[touched] = v
                    touched += 1
            else:
                depth -= 1
                if length >= len(w.sequence):
                    return OVERFLOW
                w.sequence[length] = o
                w.stage_of[length] = t
                length += 1
                w.computed_at[o] = t
                for k in range(g.write_start[o], g.write_start[o + 1]):
                    v = g.writes[k]
                    w.live[v] = 1
                    if w.touched_at[v] != t:
                        w.touched_at[v] = t
                        w.touched[touched] = v
                        touched += 1
        # Only what was touched can have a new next drop, so the lists grow with the reads.
        # Whatever the stage touched is live now, also in an interval of absence, where it was computed for this stage alone:
        # the next stage of the interval drops it.
        for k in range(touched):
            v = w.touched[k]
            if used[v]:
                gap = next_gap(low[v], high[v], used[v], t + 1)
                if gap < stages:
                    if buckets >= len(w.bucket_value):
                        return OVERFLOW
                    w.bucket_value[buckets] = v
                    w.bucket_next[buckets] = w.bucket_head[gap]
                    w.bucket_head[gap] = buckets
                    buckets += 1
    return length


@kernel
def encode(g, stage, order, work, code):
    """Fill an empty code with what an order does not hold: from the last touch of an instance to the making of the next.

    Args:
        g: The instance.
        stage: Stage of each op, or -1. Shape ``[op]``.
        order: Ops in the order of their computations, END left out. Shape ``[position]``.
        work: Working space. Shape ``[largest of op, value and position]`` of each of three.
        code: The code.
    """
    first, stages, touched = work
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
        for k in range(g.read_start[o], g.read_start[o + 1]):
            touched[g.reads[k]] = t
        for k in range(g.write_start[o], g.write_start[o + 1]):
            v = g.writes[k]
            # Made again, so it was not held since it was last read or made.
            if touched[v] >= 0:
                add_interval(code, v, touched[v] + 1, t)
            touched[v] = t


@kernel
def _largest_read(g, o, read):
    """Of the values that an op makes, the largest of those that are read, or -1."""
    largest = -1
    for k in range(g.write_start[o], g.write_start[o + 1]):
        v = g.writes[k]
        if read[v] and (largest < 0 or g.size[v] > g.size[largest]):
            largest = v
    return largest


@kernel
def _keeps(g, o, read):
    """Whether a value that an op makes is kept, and not made once more."""
    found = False
    for k in range(g.write_start[o], g.write_start[o + 1]):
        v = g.writes[k]
        found = found or (g.kept[v] and read[v])
    return found


@kernel
def list_stages(g, order, first_reader, work, stages, readers):
    """Fill the stages of an order in which ops may be listed again.

    Where one is, it has a stage for what is read of it from there on, before it is listed once more: one for each kept
    value at its last place, else one for the largest.

    Args:
        g: An instance without moves.
        order: Ops in the order of their stages; moves are left out of account. Shape ``[place]``.
        first_reader: Number of the first stage that only reads.
        work: Working space: how often each op is listed, how often from a place on, and whether a value is read from there on.
            Shapes ``[op]``, ``[op]`` and ``[value]``.
        stages: Filled from its end: ops, and stages that only read, numbered in their order. Shape ``[place + value]``.
        readers: Filled from its end, for each of those: the op, its value, and how often the op is listed after it.
            Shape ``[3, place + value]``.

    Returns:
        How many stages there are, and how many only read.
    """
    listed, later, read = work
    end = len(g.cost) - 1
    listed[:] = 0
    later[:] = 0
    for v in range(len(read)):
        read[v] = g.kept[v]
    for p in range(len(order)):
        if order[p] < end:
            listed[order[p]] += 1
    room = len(stages)
    at, reading = room, room
    for p in range(len(order) - 1, -1, -1):
        o = order[p]
        if o >= end:
            at -= 1
            stages[at] = o
            continue
        if later[o] + 1 == listed[o]:
            at -= 1
            stages[at] = o
        else:
            largest, kept = _largest_read(g, o, read), _keeps(g, o, read)
            for k in range(g.write_start[o + 1] - 1, g.write_start[o] - 1, -1):
                v = g.writes[k]
                if (g.kept[v] and read[v]) if kept else v == largest:
                    at -= 1
                    reading -= 1
                    stages[at] = -1
                    readers[0, reading], readers[1, reading], readers[2, reading] = o, v, later[o]
                read[v] = 0
        later[o] += 1
        for k in range(g.read_start[o], g.read_start[o + 1]):
            read[g.reads[k]] = 1
    number = first_reader
    for p in range(at, room):
        if stages[p] < 0:
            stages[p] = number
            number += 1
    return room - at, room - reading


@kernel
def sort_by_op(order, length, start, positions):
    """Positions at which each op runs, ascending: a counting sort by op.

    Args:
        order: Ops in the order of their computations. Shape ``[length or more]``.
        length: Positions to sort.
        start: Filled with the start of each op's positions. Shape ``[op + 1]``.
        positions: Filled with the positions. Shape ``[length or more]``.
    """
    ops = len(start) - 1
    start[:] = 0
    for p in range(length):
        start[order[p] + 1] += 1
    for o in range(ops):
        start[o + 1] += start[o]
    # Filled from the back, which leaves the start of each op in the place of its end.
    for p in range(length - 1, -1, -1):
        o = order[p]
        start[o + 1] -= 1
        positions[start[o + 1]] = p
    for o in range(ops):
        start[o] = start[o + 1]
    start[ops] = length


@kernel
def place_readers(g, order, first_reader, readers, work, placed):
    """Fill ``placed`` with an order and the stages that only read, each right after its computation and the stages before it.

    Args:
        g: The instance.
        order: Ops in the order of their computations, END left out. Shape ``[position]``.
        first_reader: Number of the first of those stages.
        readers: The op of each, its value, and how often the op is listed after it. Shape ``[3, reader]``.
        work: Working space: the start of each op's positions, and the positions. Shapes ``[op + 1]`` and ``[position]``.
        placed: Filled. Shape ``[position + reader]``.
    """
    start, positions = work
    sort_by_op(order, len(order), start, positions)
    at, done, filled = -1, 0, 0
    for t in range(len(g.targets) - 1):
        target = g.targets[t]
        reader = target - first_reader
        o = readers[0, reader] if reader >= 0 else target
        low, times = start[o], start[o + 1] - start[o]
        if reader < 0:
            if times:
                at = max(at, positions[low])
            continue
        # The plan may compute the op more often than it is listed, or less often: the last stage has the last run.
        at = max(at, positions[low + max(0, times - 1 - readers[2, reader])])
        while done <= at:
            placed[filled] = order[done]
            filled += 1
            done += 1
        placed[filled] = target
        filled += 1
    while done < len(order):
        placed[filled] = order[done]
        filled += 1
        done += 1


@kernel
def measure(g, w, length):
    """Cost of ``w.sequence``, and the bytes at each position of it.

    A read takes the newest instance of a value, and an instance is freed after its last read: what `Plan.from_order` and
    `simulate` do, which every plan offered goes through, so that an error here can only lose plans.

    Fills the instances, their readers and ``w.profile``.

    Args:
        g: The instance.
        w: The scratch arrays.
        length: Length of the sequence.

    Returns:
        Cost, peak in bytes above the resident ones, and the position of the peak; a cost of -1 if an array is too small.
    """
    cost = 0.0
    reads = 0
    instances = 0
    w.released[: length + 2] = 0.0
    w.first_run[:] = -1
    w.use_start[0] = 0
    for p in range(length):
        o = w.sequence[p]
        cost += g.cost[o]
        w.read_offset[p] = reads
        w.first_instance[p] = instances
        # Checked before each op instead of in every loop below.
        if reads + g.read_start[o + 1] - g.read_start[o] >= len(w.read_instance):
            return -1.0, 0.0, 0
        if instances + g.write_start[o + 1] - g.write_start[o] >= len(w.value_of):
            return -1.0, 0.0, 0
        for k in range(g.read_start[o], g.read_start[o + 1]):
            x = w.newest[g.reads[k]]
            # Positions ascend, so the last one written is the last read.
            w.last_read[x] = p
            w.read_instance[reads] = x
            reads += 1
            w.use_start[x + 1] += 1
        for k in range(g.write_start[o], g.write_start[o + 1]):
            # An output that is never read is freed right after its op; END reads what is kept, so that this is all.
            w.newest[g.writes[k]] = instances
            w.value_of[instances] = g.writes[k]
            w.last_read[instances] = p
            w.use_start[instances + 1] = 0
            instances += 1
        if g.replay[o] > 0:
            if w.first_run[o] < 0:
                w.first_run[o] = p
            w.last_run[o] = p
    w.read_offset[length] = reads
    w.first_instance[length] = instances
    # Readers of each instance in the order of positions, by counting sort: ends first, then filled from the back.
    for x in range(instances):
        w.use_start[x + 1] += w.use_start[x]
    for p in range(length - 1, -1, -1):
        for k in range(w.read_offset[p], w.read_offset[p + 1]):
            x = w.read_instance[k]
            w.use_start[x + 1] -= 1
            w.use_position[w.use_start[x + 1]] = p
    for x in range(instances):
        w.use_start[x] = w.use_start[x + 1]
    w.use_start[instances] = reads
    for x in range(instances):
        w.released[w.last_read[x] + 1] += g.size[w.value_of[x]]
    # The state of a random generator is held from the first to the last computation of its op, if there are several.
    for o in range(len(g.cost)):
        if g.replay[o] > 0 and w.first_run[o] >= 0 and w.last_run[o] > w.first_run[o]:
            w.released[w.last_run[o] + 1] += g.replay[o]
    # While an op runs its inputs, its outputs and its workspace are there: bytes whose last reader ran before are subtracted
    # first, and outputs added. Among equal peaks the first counts.
    held = 0.0
    peak = -1.0
    at = 0
    for p in range(length):
        held -= w.released[p]
        o = w.sequence[p]
        for x in range(w.first_instance[p], w.first_instance[p + 1]):
            held += g.size[w.value_of[x]]
        if g.replay[o] > 0 and w.first_run[o] == p and w.last_run[o] > p:
            held += g.replay[o]
        w.profile[p] = held + g.workspace[o]
        if w.profile[p] > peak:
            peak = w.profile[p]
            at = p
    return cost, peak, at
