"""Kernels that evict at a peak what is cheapest to compute again, until a plan is within the budget.

Each value that is live at the peak and not read there is priced by the cost of computing it again, ancestors that would be
missing included, per byte of excess relieved. Prices may be estimates: every plan is decoded and measured from its sequence.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from checkmate.solvers.backends.kernels import inner_kernel, kernel
from checkmate.solvers.evict.profile import add_interval, next_gap, next_random, profile


class Repair(NamedTuple):
    """How to evict. All fields are of these very types: others would make numba compile another version."""

    budget: float  # bytes above resident ones
    # Exponent of the number of steps over the budget that an eviction relieves, in its benefit. 0 looks at the peak alone; larger
    # ones prefer values that are held through many peaks.
    duration_exponent: float
    noise: float  # prices are multiplied by e to a uniform number within plus and minus this
    # Share of the excess that is evicted before decoding again, one value at least: 0 is the most careful, 1 the fastest.
    batch_fraction: float
    cutoff: float  # cost from which on a plan is not wanted
    rounds: int  # most decodings


@inner_kernel
def _first_from(places, start, stop, position):
    """Index in the ascending ``places[start:stop]`` of the first that is not before ``position``."""
    while start < stop:
        middle = (start + stop) >> 1
        if places[middle] < position:
            start = middle + 1
        else:
            stop = middle
    return start


@inner_kernel
def _newest_before(g, w, v, position):
    """The instance of a value that is the newest before a position, -1 if there is none."""
    o = g.values[v].producer
    first = w.ops[o].runs
    k = _first_from(w.runs, first, w.ops[o + 1].runs, position)
    return w.positions[w.runs[k - 1]].makes + g.values[v].slot if k > first else -1


@inner_kernel
def _remake_cost(g, w, code, root_op, peak_at, need_at, most):
    """The cost of making an output of an op again at position ``need_at``.

    Returns whether that is possible, its cost, the bytes of values that cannot be made again and would have to be held over the
    peak for it, how many instances would be evicted along (the first of ``w.listed``), and whether the walk was ended early: the
    cost is at least that much then.

    Walks up from the op. An input is free if it is live at ``need_at`` anyway, or if the code holds it from before the peak
    until then: it is at the peak in any case. Otherwise its producer has to run again too. One that the code holds but that
    would have died before ``need_at`` is dropped at the peak as well, for otherwise the eviction would only exchange
    one value for its inputs. The walk ends at a cost above ``most``: on random layered graphs it would go through thousands of
    ops for values that are never evicted.
    """
    mark = w.stamp[0]
    need_stage = w.positions[need_at].stage
    total = g.ops[root_op].cost
    pinned = 0.0
    group = 0
    w.stack[0].op = root_op
    w.ops[root_op].seen = mark
    depth = 1
    while depth > 0:
        if total > most:
            return True, total, pinned, group, True
        depth -= 1
        o = w.stack[depth].op
        for k in range(g.ops[o].reads, g.ops[o + 1].reads):
            v = g.reads[k]
            if w.values[v].seen == mark:
                continue
            w.values[v].seen = mark
            # Fetched from the host by then, and held from there on.
            if need_stage >= g.values[v].fetched_at:
                continue
            x = _newest_before(g, w, v, need_at)
            # Not computed before: it is an op on demand, and the plan pays for its first computation in any case.
            if x < 0:
                continue
            made, last = w.instances[x].made, w.instances[x].last_read
            # A later op reads this instance, so it is live at ``need_at``.
            if last >= need_at:
                continue
            # Whether the code holds the value from its last read to the stage that needs it, so that it is there then.
            held = next_gap(code, v, w.positions[last].stage + 1) > need_stage
            # Read after the peak and held from there on: at the peak in any case, so reading it once more is free.
            if held and last >= peak_at:
                continue
            # Cannot be made again, or not any more at that stage. Held by the code, it would only live longer: over the peak
            # if it was made before it, which takes its bytes off the gain. Not held, nothing can bring it back.
            p = g.values[v].producer
            if g.ops[p].once or need_stage > g.ops[p].last_stage:
                if not held:
                    return False, 0.0, 0.0, 0, False
                if made < peak_at:
                    pinned += g.values[v].size
                continue
            # Its last read is before the peak, and the code would hold it over the peak now that the eviction gives it a new
            # reader. Evicted with the value, it is computed again as well: a chain of cheap ops goes as a whole.
            if held and made < peak_at:
                w.listed[group] = x
                group += 1
            # Made between the peak and the read: holding it a little longer costs nothing at the peak.
            elif held:
                continue
            # An op with several outputs is paid once.
            if w.ops[p].seen != mark:
                w.ops[p].seen = mark
                total += g.ops[p].cost
                w.stack[depth].op = p
                depth += 1
    return True, total, pinned, group, False


@inner_kernel
def _price(g, w, code, x, at, excess, exponent, most):
    """Price of evicting an instance that is live at the peak, ``most`` being the score from which on it need not be known.

    Returns whether anything is gained, the score (cost per byte of excess relieved, lower is better), the bytes freed at the
    peak, the last position before it that makes or reads the value, how many instances are evicted along (the first of
    ``w.listed``), and whether the score is only known to be at least that much.
    """
    stage, v = w.positions[at].stage, w.instances[x].value
    first, stop = w.instances[x].uses, w.instances[x + 1].uses
    use = _first_from(w.uses, first, stop, at)
    touch = w.uses[use - 1] if use > first else w.instances[x].made
    # The op at the peak reads it.
    if use >= stop or w.uses[use] == at:
        return False, 0.0, 0.0, 0, 0, False
    need_at = w.uses[use]
    need_stage = w.positions[need_at].stage
    p = g.values[v].producer
    # Within a stage nothing is dropped, so a value touched and read in the stage of the peak stays; and an op whose inputs are
    # overwritten by the next read cannot run again.
    if (w.positions[touch].stage == stage and need_stage == stage) or need_stage > g.ops[p].last_stage:
        return False, 0.0, 0.0, 0, 0, False
    duration = max(1, w.positions[need_at].over - w.positions[touch + 1].over) ** exponent if exponent > 0 else 1.0
    # More than the excess is worth no more: else large values win where a small one would do.
    benefit = min(g.values[v].size, excess) * duration
    w.stamp[0] += 1
    possible, cost, pinned, group, partial = _remake_cost(g, w, code, p, at, need_at, most * benefit)
    gain = g.values[v].size - pinned
    if not possible or (gain <= 0 and not partial):
        return False, 0.0, 0.0, 0, 0, False
    if not partial:
        benefit = min(gain, excess) * duration
    # A little is added to the cost: among ops that cost nothing the larger value is the better eviction.
    return True, (cost + 1e-9) / benefit, gain, touch, group, partial


@inner_kernel
def _evict(w, code, value, last_touch, peak_stage):
    """Drop a value from its last touch before the peak to the peak's stage; False if its row is full.

    Where the touch is in the stage of the peak, it can be dropped only in the next one: within a stage what was made stays.
    """
    start = w.positions[last_touch].stage + 1
    return add_interval(code, value, start, max(start, peak_stage))


@inner_kernel
def _sink(heap, k, count):
    """Restore the order of the heap of candidates, by score and among equals by index, from place ``k`` down."""
    value, score, noise = heap[k].value, heap[k].score, heap[k].noise
    while 2 * k + 1 < count:
        below = 2 * k + 1
        if below + 1 < count:
            left, right = heap[below].score, heap[below + 1].score
            if right < left or (right == left and heap[below + 1].value < heap[below].value):
                below += 1
        if heap[below].score > score or (heap[below].score == score and heap[below].value > value):
            break
        heap[k] = heap[below]
        k = below
    heap[k].value, heap[k].score, heap[k].noise = value, score, noise


@inner_kernel
def _index(g, w, length, budget):
    """Fill the positions at which each op runs, and the number of positions over the budget before each position."""
    ops = len(w.ops)
    for o in range(ops):
        w.ops[o].runs = 0
    w.positions[0].over = 0
    for p in range(length):
        w.ops[w.positions[p].op + 1].runs += 1
        w.positions[p + 1].over = w.positions[p].over + (1 if w.positions[p].held > budget else 0)
    for o in range(1, ops):
        w.ops[o].runs += w.ops[o - 1].runs
    # Filled from the back, which leaves the start of each op in the place of its end.
    for p in range(length - 1, -1, -1):
        o = w.positions[p].op
        w.ops[o + 1].runs -= 1
        w.runs[w.ops[o + 1].runs] = p
    for o in range(ops - 1):
        w.ops[o].runs = w.ops[o + 1].runs
    w.ops[ops - 1].runs = length


@kernel
def evict_at_peak(g, w, code, length, at, excess, settings, random):
    """Evict the cheapest values at a position until they weigh the batch fraction of the excess, and one at least.

    Returns whether there was a candidate, and room for its interval. What was evicted makes others more expensive, as their
    ancestors may now be missing. So the cheapest candidate is priced when its turn comes and goes back among the others if it
    is more expensive than the next: the lazy evaluation of Minoux (1978), which spares pricing all candidates after each
    eviction. It begins with the cost of each value's own op, and no walk goes on for long beyond the next candidate's score:
    prices only rise, so that what is known of one is always a lower bound.
    """
    _index(g, w, length, settings.budget)
    heap = w.candidates
    exponent = settings.duration_exponent
    stage = w.positions[at].stage
    enough = excess * (1.0 - settings.batch_fraction)
    count = 0
    for v in range(len(g.values)):
        x = _newest_before(g, w, v, at)
        # Dead at the peak, or read there for the last time: nothing to gain.
        if g.values[v].evictable and x >= 0 and w.instances[x].last_read > at and w.time_up[0] == 0:
            gains, score, _, _, _, _ = _price(g, w, code, x, at, excess, exponent, 0.0)
            if gains:
                # The noise of a candidate is drawn once: drawn again with each price, the comparison with the stored score would
                # fail at random, and the loop might not end.
                heap[count].value = v
                heap[count].noise = np.exp(settings.noise * (next_random(random) - 0.5) * 2) if settings.noise > 0 else 1.0
                heap[count].score = score * heap[count].noise
                count += 1
    for k in range(count // 2 - 1, -1, -1):
        _sink(heap, k, count)
    first = True
    while count > 0 and (first or excess > enough) and w.time_up[0] == 0:
        v, noise = heap[0].value, heap[0].noise
        following = np.inf
        for k in range(1, min(3, count)):
            following = min(following, heap[k].score)
        # A little further than to the next candidate, so that few walks are repeated.
        most = 1.5 * max(heap[0].score, following) / noise
        x = _newest_before(g, w, v, at)
        gains, price, relieved, touch, group, partial = _price(g, w, code, x, at, excess, exponent, most)
        score = price * noise
        if gains and (partial or score > following * (1 + 1e-9)):  # by more than rounding
            heap[0].score = max(score, heap[0].score)
        else:
            if gains:
                fits = _evict(w, code, v, touch, stage)
                for k in range(group):
                    x = w.listed[k]
                    fits = _evict(w, code, w.instances[x].value, w.instances[x].last_read, stage) and fits
                if not fits:
                    return False
                excess -= relieved
                first = False
            count -= 1
            heap[0] = heap[count]
        _sink(heap, 0, count)
    return not first


@kernel
def repair(g, w, code, settings, random):
    """Evict at the peak, decode again, and so on, until the peak is within the budget.

    Returns whether there is such a plan below the cutoff, its cost, its length, and how many sequences were decoded. Each round
    only adds stages to the intervals, so it ends; `Repair.rounds` ends it earlier where plans grow without coming nearer to the
    budget, as on ResNet-50 at batch 863 with all ops recomputable. The code is changed also where nothing is found.
    """
    decodes = 0
    while decodes <= settings.rounds:
        decodes += 1
        length, cost, peak, at = profile(g, w, code)
        if length == 0:
            return False, 0.0, 0, decodes
        if peak <= settings.budget:
            return cost < settings.cutoff, cost, length, decodes
        # Evictions add computations, so a plan that costs too much already does not come back below the cutoff.
        if cost > settings.cutoff or w.time_up[0] != 0:
            break
        if not evict_at_peak(g, w, code, length, at, peak - settings.budget, settings, random):
            break
    return False, 0.0, 0, decodes
