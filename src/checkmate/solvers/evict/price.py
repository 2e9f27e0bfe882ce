"""Kernels that evict at a peak what is cheapest to compute again.

Each value that is live at the peak and not read there is priced by the cost of computing it again, ancestors that would be
missing included, per byte of excess relieved. Prices may be estimates: every plan is decoded and measured from its sequence.

In all kernels ``g`` is an `Instance`, ``w`` a `Scratch` and ``code`` a `Code`.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from checkmate.solvers.backends.kernels import kernel
from checkmate.solvers.evict.decode import add_interval, next_gap, next_random, sort_by_op

IMPOSSIBLE: Final = 1e300
"""Price of an eviction that cannot be undone in time: larger than any sum of costs."""

# Added to a cost before it is divided by bytes: among ops that cost nothing the larger value is the better eviction.
_LEAST_COST: Final = 1e-9
# Share by which a price may be above the next candidate's: rounding only.
_SAME_PRICE: Final = 1e-9
# Multiple of the next candidate's score at which a walk ends: a little further than needed, so that few are repeated.
_FURTHER: Final = 1.5


class Excess(NamedTuple):
    """The moment at which to evict.

    Attributes:
        position: Position of the peak.
        stage: Its stage.
        excess: Bytes over the budget there.
    """

    position: int
    stage: int
    excess: float


class _Remake(NamedTuple):
    """Effort to make an evicted value again.

    Attributes:
        cost: Cost of the ops that have to run again, or `IMPOSSIBLE`.
        pinned: Bytes of values that cannot be made again and would have to be held over the peak for it.
        group: How many instances would be evicted along; they are the first of ``w.group``.
        partial: Whether the walk was ended early: the cost is at least that much.
    """

    cost: float
    pinned: float
    group: int
    partial: bool


class _Price(NamedTuple):
    """Price of an eviction.

    Attributes:
        score: Cost per byte of excess relieved, or `IMPOSSIBLE`; lower is better.
        relieved: Bytes freed at the peak.
        last_touch: Last position before the peak that makes or reads the value.
        group: As in `_Remake`.
        partial: Whether the score is only known to be at least that much.
    """

    score: float
    relieved: float
    last_touch: int
    group: int
    partial: bool


@kernel
def _first_from(positions, start, stop, position):
    """Index in the ascending ``positions[start:stop]`` of the first that is not before ``position``."""
    while start < stop:
        middle = (start + stop) >> 1
        if positions[middle] < position:
            start = middle + 1
        else:
            stop = middle
    return start


@kernel
def _run_before(w, o, position):
    """Last position before ``position`` at which an op is computed, or -1."""
    first = w.run_start[o]
    k = _first_from(w.run_position, first, w.run_start[o + 1], position)
    return w.run_position[k - 1] if k > first else -1


@kernel
def _remake_cost(g, w, code, root_op, peak_at, need_at, need_stage, most):
    """Cost of the ops that must run again at position ``need_at`` to make an output of ``root_op`` again.

    Walks up from the op. An input is free if it is live at ``need_at`` anyway, or if the code holds it from before the peak
    until then: it is at the peak in any case. Otherwise its producer has to run again too. One that the code holds but that
    would have died before ``need_at`` is dropped at the peak as well, for otherwise the eviction would only exchange
    one value for its inputs: those instances go to ``w.group``. An input that cannot be made again has to be held
    instead, and its bytes are subtracted from what the eviction gains. The walk ends at a cost above ``most``: on random layered
    graphs it would go through thousands of ops for values that are never evicted.
    """
    mark = w.stamp[0]
    total = g.cost[root_op]
    pinned = 0.0
    group = 0
    w.stack_op[0] = root_op
    w.seen_op[root_op] = mark
    depth = 1
    while depth > 0:
        if total > most:
            return _Remake(total, pinned, group, True)
        depth -= 1
        o = w.stack_op[depth]
        for k in range(g.read_start[o], g.read_start[o + 1]):
            v = g.reads[k]
            if w.seen_value[v] == mark:
                continue
            w.seen_value[v] = mark
            # Fetched from the host by then, and held from there on.
            if need_stage >= g.fetched_at[v]:
                continue
            p = g.producer[v]
            made = _run_before(w, p, need_at)
            # Not computed before: it is an op on demand, and the plan pays for its first computation in any case.
            if made < 0:
                continue
            x = w.first_instance[made] + g.slot[v]
            last = w.last_read[x]
            # A later op reads this instance, so it is live at ``need_at``.
            if last >= need_at:
                continue
            # Whether the code holds the value from its last read to the stage that needs it, so that it is there then.
            held = next_gap(code.low[v], code.high[v], code.used[v], w.stage_of[last] + 1) > need_stage
            # Read after the peak and held from there on: at the peak in any case, so reading it once more is free.
            if held and last >= peak_at:
                continue
            # Cannot be made again, or not any more at that stage. Held by the code, it would only live longer: over the peak
            # if it was made before it, which takes its bytes off the gain. Not held, nothing can bring it back.
            if g.once[p] or need_stage > g.last_stage[p]:
                if not held:
                    return _Remake(IMPOSSIBLE, 0.0, 0, False)
                if made < peak_at:
                    pinned += g.size[v]
                continue
            # Its last read is before the peak, and the code would hold it over the peak now that the eviction gives it a new
            # reader. Evicted with the value, it is computed again as well: a chain of cheap ops goes as a whole.
            if held and made < peak_at:
                w.group[group] = x
                group += 1
            # Made between the peak and the read: holding it a little longer costs nothing at the peak.
            elif held:
                continue
            # An op with several outputs is paid once.
            if w.seen_op[p] == mark:
                continue
            w.seen_op[p] = mark
            total += g.cost[p]
            w.stack_op[depth] = p
            depth += 1
    return _Remake(total, pinned, group, False)


@kernel
def _evict(w, code, value, last_touch, peak_stage):
    """Drop a value from its last touch before the peak to the peak's stage; False if its row is full.

    Where the touch is in the stage of the peak, it can be dropped only in the next one: within a stage what was made stays.
    """
    stage = w.stage_of[last_touch]
    if stage < peak_stage:
        return add_interval(code, value, stage + 1, peak_stage)
    return add_interval(code, value, peak_stage + 1, peak_stage + 1)


@kernel
def _index_runs(g, w, length, budget):
    """Positions at which each op runs, and the number of positions over the budget before each position."""
    # `_run_before` finds the instance that a position reads by bisection.
    sort_by_op(w.sequence, length, w.run_start, w.run_position)
    w.over[0] = 0
    for p in range(length):
        w.over[p + 1] = w.over[p] + (1 if w.profile[p] > budget else 0)


@kernel
def _price(g, w, code, v, peak, exponent, most):
    """Price of evicting a value at the peak, partial if its score is above ``most``. Fills ``w.group`` unless it is partial."""
    nothing = _Price(IMPOSSIBLE, 0.0, 0, 0, False)
    p = g.producer[v]
    made = _run_before(w, p, peak.position)
    if made < 0:
        return nothing
    x = w.first_instance[made] + g.slot[v]
    # Dead at the peak, or read there for the last time: nothing to gain.
    if w.last_read[x] <= peak.position:
        return nothing
    first = w.use_start[x]
    use = _first_from(w.use_position, first, w.use_start[x + 1], peak.position)
    touch = w.use_position[use - 1] if use > first else made
    # The op at the peak reads it.
    if use >= w.use_start[x + 1] or w.use_position[use] == peak.position:
        return nothing
    need_at = w.use_position[use]
    need_stage = w.stage_of[need_at]
    # Within a stage nothing is dropped, so a value touched and read in the stage of the peak stays; and an op whose inputs are
    # overwritten by the next read cannot run again.
    if (w.stage_of[touch] == peak.stage and need_stage == peak.stage) or need_stage > g.last_stage[p]:
        return nothing
    duration = max(1, w.over[need_at] - w.over[touch + 1]) ** exponent if exponent > 0 else 1.0
    # More than the excess is worth no more: else large values win where a small one would do.
    benefit = min(g.size[v], peak.excess) * duration
    w.stamp[0] += 1
    remake = _remake_cost(g, w, code, p, peak.position, need_at, need_stage, most * benefit)
    if remake.partial:
        return _Price((remake.cost + _LEAST_COST) / benefit, 0.0, 0, 0, True)
    gain = g.size[v] - remake.pinned
    if remake.cost >= IMPOSSIBLE or gain <= 0:
        return nothing
    benefit = min(gain, peak.excess) * duration
    return _Price((remake.cost + _LEAST_COST) / benefit, gain, int(touch), remake.group, False)


@kernel
def _sink(w, k, count):
    """Restore the order of the heap of candidates, by score and among equals by index, from place ``k`` down."""
    v, score, noise = w.candidate[k], w.score[k], w.noise[k]
    while 2 * k + 1 < count:
        below = 2 * k + 1
        if below + 1 < count:
            left, right = w.score[below], w.score[below + 1]
            if right < left or (right == left and w.candidate[below + 1] < w.candidate[below]):
                below += 1
        if w.score[below] > score or (w.score[below] == score and w.candidate[below] > v):
            break
        w.candidate[k], w.score[k], w.noise[k] = w.candidate[below], w.score[below], w.noise[below]
        k = below
    w.candidate[k], w.score[k], w.noise[k] = v, score, noise


@kernel
def _drop_first(w, count):
    """Take the first of ``count`` candidates off the heap; returns how many are left."""
    count -= 1
    w.candidate[0], w.score[0], w.noise[0] = w.candidate[count], w.score[count], w.noise[count]
    _sink(w, 0, count)
    return count


@kernel
def evict_at_peak(g, w, code, length, peak, settings, random):
    """Evict the cheapest values at the peak until they weigh the batch fraction of the excess, and one at least.

    What was evicted makes others more expensive, as their ancestors may now be missing. So the cheapest candidate is priced
    when its turn comes and goes back among the others if it is more expensive than the next: the lazy evaluation of Minoux
    (1978), which spares pricing all candidates after each eviction. It begins with the cost of each value's own op, and no walk
    goes on for long beyond the next candidate's score: prices only rise, so that what is known of one is always a lower bound.

    Returns:
        False if there is no candidate, or no room for its interval.
    """
    _index_runs(g, w, length, settings.budget)
    candidates = 0
    for v in range(len(g.size)):
        if g.evictable[v] and w.time_up[0] == 0:
            price = _price(g, w, code, v, peak, settings.duration_exponent, 0.0)
            if price.score < IMPOSSIBLE:
                w.candidate[candidates] = v
                w.noise[candidates] = np.exp(settings.noise * (next_random(random) - 0.5) * 2) if settings.noise > 0 else 1.0
                w.score[candidates] = price.score * w.noise[candidates]
                candidates += 1
    # The noise of a candidate is drawn once: drawn again with each price, the comparison with the stored score would fail
    # at random, and the loop might not end.
    for k in range(candidates // 2 - 1, -1, -1):
        _sink(w, k, candidates)
    fits = candidates > 0
    first = True
    excess = peak.excess
    enough = excess * (1.0 - settings.batch_fraction)
    while fits and candidates > 0 and (first or excess > enough) and w.time_up[0] == 0:
        v = w.candidate[0]
        following = IMPOSSIBLE
        for k in range(1, min(3, candidates)):
            following = min(following, w.score[k])
        most = _FURTHER * max(w.score[0], following) / w.noise[0]
        price = _price(g, w, code, v, Excess(peak.position, peak.stage, excess), settings.duration_exponent, most)
        score = price.score * w.noise[0]
        if price.score >= IMPOSSIBLE:
            candidates = _drop_first(w, candidates)
            fits = candidates > 0 or not first
            continue
        if price.partial or score > following * (1 + _SAME_PRICE):
            w.score[0] = max(score, w.score[0])
            _sink(w, 0, candidates)
            continue
        fits = _evict(w, code, v, price.last_touch, peak.stage)
        for k in range(price.group):
            x = w.group[k]
            fits = _evict(w, code, w.value_of[x], w.last_read[x], peak.stage) and fits
        excess -= price.relieved
        first = False
        candidates = _drop_first(w, candidates)
    return fits
