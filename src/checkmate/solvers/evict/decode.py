"""From eviction intervals to a sequence of computations, and from a sequence to its profile."""

# The kernels are compiled by numba and written as it wants them: loops over flat arrays.
# pyright: basic

from __future__ import annotations

import numpy as np
from numba import njit

FAR = 1 << 30

OVERFLOW = -1
"""The sequence outgrew the arrays: as good as no plan."""
STUCK = -2
"""An op that may not run again would have to."""


@njit(cache=True, error_model="numpy")
def seed_random(state, seed):
    """Start a xorshift generator of our own: numba's global one is shared by the whole process."""
    state[0] = np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x632BE59BD9B4E019)
    for _ in range(8):
        next_random(state)


@njit(cache=True, error_model="numpy")
def next_random(state):
    """A number in [0, 1)."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return float(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@njit(cache=True, error_model="numpy")
def random_below(state, count):
    """A whole number in [0, count)."""
    return int(next_random(state) * count)


@njit(cache=True, error_model="numpy")
def next_gap(low, high, count, stage):
    """First stage at or after ``stage`` at which a value is not held."""
    for k in range(count):
        if high[k] >= stage:
            return low[k] if low[k] > stage else stage
    return FAR


@njit(cache=True, error_model="numpy")
def add_interval(low, high, count, value, start, stop):
    """Add [start, stop] to the stages at which a value is not held; False if its row is full."""
    if start > stop:
        return True
    row_low, row_high, kept = low[value], high[value], 0
    for k in range(count[value]):
        a, b = row_low[k], row_high[k]
        if b < start - 1 or a > stop + 1:
            row_low[kept] = a
            row_high[kept] = b
            kept += 1
        else:
            start = min(start, a)
            stop = max(stop, b)
    if kept >= row_low.shape[0]:
        count[value] = kept
        return False
    k = kept
    while k > 0 and row_low[k - 1] > start:
        row_low[k] = row_low[k - 1]
        row_high[k] = row_high[k - 1]
        k -= 1
    row_low[k] = start
    row_high[k] = stop
    count[value] = kept + 1
    return True


@njit(cache=True, error_model="numpy")
def decode(g, w, low, high, count):
    """Sequence of an eviction code: each stage computes its target, and first, depth first, what is missing.

    Fills ``w.sequence`` and ``w.stage_of``. Returns the length, OVERFLOW or STUCK.
    """
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
            v = w.bucket_value[b]
            if w.live[v]:
                for k in range(count[v]):
                    if low[v, k] <= t and t <= high[v, k]:
                        w.live[v] = 0
                        break
            b = w.bucket_next[b]
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
                if w.computed_at[o] == t:
                    continue
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
        for k in range(touched):
            v = w.touched[k]
            if count[v]:
                gap = next_gap(low[v], high[v], count[v], t + 1)
                if gap < stages:
                    if buckets >= len(w.bucket_value):
                        return OVERFLOW
                    w.bucket_value[buckets] = v
                    w.bucket_next[buckets] = w.bucket_head[gap]
                    w.bucket_head[gap] = buckets
                    buckets += 1
    return length


@njit(cache=True, error_model="numpy")
def measure(g, w, length):
    """Instances, their reads and the bytes at each position of ``w.sequence``.

    A read binds to the newest instance, which dies after its last read. Returns cost, peak and the
    position of the peak; the cost is -1 if the arrays are too small.
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
        if reads + g.read_start[o + 1] - g.read_start[o] >= len(w.read_instance):
            return -1.0, 0.0, 0
        if instances + g.write_start[o + 1] - g.write_start[o] >= len(w.value_of):
            return -1.0, 0.0, 0
        for k in range(g.read_start[o], g.read_start[o + 1]):
            x = w.newest[g.reads[k]]
            w.last_read[x] = p
            w.read_instance[reads] = x
            reads += 1
            w.use_start[x + 1] += 1
        for k in range(g.write_start[o], g.write_start[o + 1]):
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
    for o in range(len(g.cost)):
        if g.replay[o] > 0 and w.first_run[o] >= 0 and w.last_run[o] > w.first_run[o]:
            w.released[w.last_run[o] + 1] += g.replay[o]
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
