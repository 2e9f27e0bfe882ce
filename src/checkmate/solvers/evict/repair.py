"""Evict until the peak fits; ruin some of it and repair again, keeping what is cheaper."""

# The kernels are compiled by numba and written as it wants them: loops over flat arrays.
# pyright: basic

from __future__ import annotations

import numpy as np
from numba import njit

from checkmate.solvers.evict.decode import FAR, add_interval, decode, measure, next_gap, next_random, random_below

IMPOSSIBLE = 1e300

# Places in the array of facts that `repair` fills.
COST, PEAK, LENGTH, DECODES = 0, 1, 2, 3


@njit(cache=True, error_model="numpy")
def _first_from(positions, start, stop, position):
    """Index in the ascending ``positions[start:stop]`` of the first that is not before ``position``."""
    while start < stop:
        middle = (start + stop) >> 1
        if positions[middle] < position:
            start = middle + 1
        else:
            stop = middle
    return start


@njit(cache=True, error_model="numpy")
def _run_before(w, o, position):
    """Last position before ``position`` at which an op is computed, or -1."""
    first = w.run_start[o]
    k = _first_from(w.run_position, first, w.run_start[o + 1], position)
    return w.run_position[k - 1] if k > first else -1


@njit(cache=True, error_model="numpy")
def _remake_cost(g, w, low, high, count, root_op, peak_at, need_at, need_stage):
    """Cost of the ops that must run again at ``need_at`` to remake a value dropped at ``peak_at``.

    Values that are held past the peak anyway are free. Held ones that die before it would have to be
    dropped too and are collected in ``w.group``; what may not be made again and would have to be kept
    longer is charged in ``w.penalty``.
    """
    mark = w.stamp[0]
    total = g.cost[root_op]
    w.penalty[0] = 0.0
    w.stack_op[0] = root_op
    w.seen_op[root_op] = mark
    depth = 1
    while depth > 0:
        depth -= 1
        o = w.stack_op[depth]
        for k in range(g.read_start[o], g.read_start[o + 1]):
            v = g.reads[k]
            if w.seen_value[v] == mark:
                continue
            w.seen_value[v] = mark
            p = g.producer[v]
            made = _run_before(w, p, need_at)
            if made < 0:
                continue
            x = w.first_instance[made] + g.slot[v]
            last = w.last_read[x]
            if last >= need_at:
                continue
            held = next_gap(low[v], high[v], count[v], w.stage_of[last] + 1) > need_stage
            if held and last >= peak_at:
                continue
            if g.once[p] or need_stage > g.last_stage[p]:
                if not held:
                    return IMPOSSIBLE
                if made < peak_at:
                    w.penalty[0] += g.size[v]
                continue
            if held and made < peak_at:
                w.group[w.group_size[0]] = x
                w.group_size[0] += 1
            elif held:
                continue
            if w.seen_op[p] == mark:
                continue
            w.seen_op[p] = mark
            total += g.cost[p]
            w.stack_op[depth] = p
            depth += 1
    return total


@njit(cache=True, error_model="numpy")
def _evict(w, low, high, count, value, last_touch, peak_stage):
    """Drop a value between its last touch before the peak and the peak."""
    stage = w.stage_of[last_touch]
    if stage < peak_stage:
        return add_interval(low, high, count, value, stage + 1, peak_stage)
    return add_interval(low, high, count, value, peak_stage + 1, peak_stage + 1)


@njit(cache=True, error_model="numpy")
def _index_runs(g, w, length, budget):
    """Positions at which each op runs, and the number of positions over the budget before each position."""
    w.run_start[:] = 0
    for p in range(length):
        w.run_start[w.sequence[p] + 1] += 1
    for o in range(len(g.cost)):
        w.run_start[o + 1] += w.run_start[o]
    for p in range(length - 1, -1, -1):
        o = w.sequence[p]
        w.run_start[o + 1] -= 1
        w.run_position[w.run_start[o + 1]] = p
    for o in range(len(g.cost)):
        w.run_start[o] = w.run_start[o + 1]
    w.run_start[len(g.cost)] = length
    w.over[0] = 0
    for p in range(length):
        w.over[p + 1] = w.over[p] + (1 if w.profile[p] > budget else 0)


@njit(cache=True, error_model="numpy")
def _price(g, w, low, high, count, v, peak_at, excess, power):
    """Score, bytes relieved and last touch of dropping a value at the peak; lower scores are better.

    The score is the remaking cost per byte of excess relieved. Fills ``w.group``.
    """
    peak_stage = w.stage_of[peak_at]
    p = g.producer[v]
    made = _run_before(w, p, peak_at)
    if made < 0:
        return IMPOSSIBLE, 0.0, 0
    x = w.first_instance[made] + g.slot[v]
    if w.last_read[x] <= peak_at:
        return IMPOSSIBLE, 0.0, 0
    first = w.use_start[x]
    use = _first_from(w.use_position, first, w.use_start[x + 1], peak_at)
    touch = w.use_position[use - 1] if use > first else made
    if use >= w.use_start[x + 1] or w.use_position[use] == peak_at:
        return IMPOSSIBLE, 0.0, 0
    need_at = w.use_position[use]
    need_stage = w.stage_of[need_at]
    if (w.stage_of[touch] == peak_stage and need_stage == peak_stage) or need_stage > g.last_stage[p]:
        return IMPOSSIBLE, 0.0, 0
    w.group_size[0] = 0
    w.stamp[0] += 1
    total = _remake_cost(g, w, low, high, count, p, peak_at, need_at, need_stage)
    gain = g.size[v] - w.penalty[0]
    if total >= IMPOSSIBLE or gain <= 0:
        return IMPOSSIBLE, 0.0, 0
    benefit = min(gain, excess)
    if power > 0:
        benefit *= max(1, w.over[need_at] - w.over[touch + 1]) ** power
    return (total + 1e-9) / benefit, gain, touch


@njit(cache=True, error_model="numpy")
def _evict_at_peak(g, w, low, high, count, length, budget, peak, peak_at, power, noise, haste, random):
    """Evict the cheapest values at the peak until they weigh ``haste`` of the excess, and one at least.

    What was evicted makes others dearer, so a score counts only if it still holds when its turn comes.
    """
    _index_runs(g, w, length, budget)
    peak_stage = w.stage_of[peak_at]
    excess = peak - budget
    candidates = 0
    for v in range(len(g.size)):
        if g.evictable[v]:
            score, _, _ = _price(g, w, low, high, count, v, peak_at, excess, power)
            if score < IMPOSSIBLE:
                w.candidate[candidates] = v
                w.noise[candidates] = np.exp(noise * (next_random(random) - 0.5) * 2) if noise > 0 else 1.0
                w.score[candidates] = score * w.noise[candidates]
                candidates += 1
    fits = candidates > 0
    first = True
    enough = excess * (1.0 - haste)
    while fits and candidates > 0 and (first or excess > enough):
        best = 0
        for k in range(1, candidates):
            if w.score[k] < w.score[best]:
                best = k
        v = w.candidate[best]
        score, gain, touch = _price(g, w, low, high, count, v, peak_at, excess, power)
        score *= w.noise[best]
        if not first and score > w.score[best] * (1 + 1e-9):
            if score >= IMPOSSIBLE:
                candidates -= 1
                w.candidate[best] = w.candidate[candidates]
                w.score[best] = w.score[candidates]
                w.noise[best] = w.noise[candidates]
            else:
                w.score[best] = score
            continue
        fits = _evict(w, low, high, count, v, touch, peak_stage)
        for k in range(w.group_size[0]):
            x = w.group[k]
            fits = _evict(w, low, high, count, w.value_of[x], w.last_read[x], peak_stage) and fits
        excess -= gain
        first = False
        candidates -= 1
        w.candidate[best] = w.candidate[candidates]
        w.score[best] = w.score[candidates]
        w.noise[best] = w.noise[candidates]
    return fits


@njit(cache=True, error_model="numpy")
def repair(g, w, low, high, count, budget, power, noise, haste, cutoff, rounds, random, facts):
    """Evict until the peak is within the budget; False if that fails or costs ``cutoff`` or more.

    Every round decodes and measures, then evicts at the peak: one value with ``haste`` 0, as many as
    weigh the whole excess with 1. On success ``w.sequence`` holds the plan; ``facts`` its cost, peak
    and length.
    """
    done = 0
    while True:
        length = decode(g, w, low, high, count)
        if length < 0:
            return False
        cost, peak, peak_at = measure(g, w, length)
        if cost < 0:
            return False
        facts[COST] = cost
        facts[PEAK] = peak
        facts[LENGTH] = length
        facts[DECODES] += 1
        if peak <= budget:
            return cost < cutoff
        done += 1
        if cost > cutoff or done > rounds:
            return False
        if not _evict_at_peak(g, w, low, high, count, length, budget, peak, peak_at, power, noise, haste, random):
            return False


@njit(cache=True, error_model="numpy")
def _copy(low, high, count, to_low, to_high, to_count):
    for v in range(len(count)):
        k = count[v]
        to_count[v] = k
        for q in range(k):
            to_low[v, q] = low[v, q]
            to_high[v, q] = high[v, q]


@njit(cache=True, error_model="numpy")
def ruin_and_repair(
    g, w, low, high, count, best_low, best_high, best_count, try_low, try_high, try_count,
    budget, iterations, heat, random, costs, facts, work_limit,
):  # fmt: skip
    """Clear some intervals at random, repair, keep the result if it is cheaper or nearly so.

    Updates the current code, the best code and ``costs``, which holds their two costs. A result may be
    worse than the current one by ``heat`` and still be kept. Stops after ``iterations``, or once
    ``work_limit`` sequences have been decoded.
    """
    values = len(count)
    stages = len(g.targets)
    evicted = np.empty(values, np.int32)
    for iteration in range(iterations):
        if facts[DECODES] >= work_limit:
            break
        n = 0
        for v in range(values):
            if count[v]:
                evicted[n] = v
                n += 1
        if n == 0:
            break
        _copy(low, high, count, try_low, try_high, try_count)
        mode = random_below(random, 3)
        many = 1 + random_below(random, max(1, min(n // 3, 12)))
        if mode == 0:
            for _ in range(many):
                try_count[evicted[random_below(random, n)]] = 0
        elif mode == 1:
            start = random_below(random, n)
            for k in range(many):
                try_count[evicted[(start + k) % n]] = 0
        else:
            first = random_below(random, stages)
            last = first + 1 + random_below(random, max(1, stages // 10))
            for k in range(n):
                v = evicted[k]
                kept = 0
                for q in range(try_count[v]):
                    outside = try_high[v, q] < first or try_low[v, q] > last
                    if outside or random_below(random, 4) == 0:
                        try_low[v, kept] = try_low[v, q]
                        try_high[v, kept] = try_high[v, q]
                        kept += 1
                try_count[v] = kept
        power = random_below(random, 5) * 0.25
        noise = 0.3 if random_below(random, 2) else 0.05
        haste = random_below(random, 3) * 0.5
        limit = costs[0] + heat * next_random(random) * 3
        if repair(g, w, try_low, try_high, try_count, budget, power, noise, haste, limit, 200 + values, random, facts):
            costs[0] = facts[COST]
            _copy(try_low, try_high, try_count, low, high, count)
            if costs[0] < costs[1]:
                costs[1] = costs[0]
                _copy(try_low, try_high, try_count, best_low, best_high, best_count)
        if iteration % 200 == 199 and costs[0] > costs[1] * 1.003:
            costs[0] = costs[1]
            _copy(best_low, best_high, best_count, low, high, count)


__all__ = ["COST", "DECODES", "FAR", "IMPOSSIBLE", "LENGTH", "PEAK", "repair", "ruin_and_repair"]
