"""Kernels that evict the values at a peak that are cheapest to compute again, until a plan is within the budget.

The price of a value that is live and not read at the peak is the cost of computing it and missing ancestors again, per byte of
excess relieved. Prices may be estimates: every plan is decoded and measured from its sequence.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from checkmate.solvers.backends.kernels import inner_kernel, kernel
from checkmate.solvers.evict.profile import add_interval, next_gap, next_random, profile


class Repair(NamedTuple):
    """How to evict. Fields must have exactly these types: for others numba would compile another version."""

    budget: float  # bytes above resident ones
    # Exponent, in the benefit of an eviction, of the number of steps over the budget that it relieves. At 0 only the peak counts;
    # larger exponents prefer values that are held through many peaks.
    duration_exponent: float
    noise: float  # prices are multiplied by e to a uniform number within plus and minus this
    # Share of the excess to evict before decoding again, at least one value: 0 is the most careful, 1 the fastest.
    batch_fraction: float
    cutoff: float  # plans of this cost or more are not wanted
    rounds: int  # most decodings


@inner_kernel
def _first_from(places, start, stop, position):
    """Index of the first entry of the ascending ``places[start:stop]`` that is not before ``position``."""
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
    o = g.producer[v]
    first = w.runs_from[o]
    k = _first_from(w.runs, first, w.runs_from[o + 1], position)
    return w.makes[w.runs[k - 1]] + g.slot[v] if k > first else -1


@inner_kernel
def _remake_cost(g, w, code, root_op, peak_at, need_at, most):
    """The cost of making an output of an op again at position ``need_at``.

    Returns whether that is possible, the cost, the bytes of values that cannot be made again and would have to be held over the
    peak instead, the number of instances evicted together (the first of ``w.group``), and whether the walk ended early: the
    cost is then a lower bound.

    The kernel walks up from the op. An input is free if it is live at ``need_at`` anyway, or if the code holds it from before
    the peak until then: it is live at the peak in any case. Otherwise its producer has to run again too. An input that the code
    would hold, but that would die before ``need_at`` without the eviction, is dropped at the peak too: else the eviction would
    only exchange a value for its inputs. The walk ends at a cost above ``most``: on random layered graphs it would visit
    thousands of ops for values that are never evicted.
    """
    mark = w.stamp[0]
    need_stage = w.stage[need_at]
    total = g.cost[root_op]
    pinned = 0.0
    group = 0
    w.stack[0] = root_op
    w.seen_op[root_op] = mark
    depth = 1
    while depth > 0:
        if total > most:
            return True, total, pinned, group, True
        depth -= 1
        o = w.stack[depth]
        for k in range(g.reads_from[o], g.reads_from[o + 1]):
            v = g.reads[k]
            if w.seen_value[v] == mark:
                continue
            w.seen_value[v] = mark
            # Fetched from the host by then, and held afterwards.
            if need_stage >= g.fetched_at[v]:
                continue
            x = _newest_before(g, w, v, need_at)
            # Not computed before: the op is on demand, and the plan pays for its first computation in any case.
            if x < 0:
                continue
            made, last = w.made[x], w.last_read[x]
            # A later op reads this instance: it is live at ``need_at``.
            if last >= need_at:
                continue
            # Whether the code holds the value from its last read to the stage that needs it.
            held = next_gap(code, v, w.stage[last] + 1) > need_stage
            # Read after the peak and held afterwards: it is live at the peak in any case, and one more read is free.
            if held and last >= peak_at:
                continue
            # Cannot be made again, at least at that stage. If the code holds the value, it only lives longer; if that is over
            # the peak, its bytes are subtracted from the gain. If the code does not hold it, nothing can bring it back.
            p = g.producer[v]
            if g.once[p] or need_stage > g.last_stage[p]:
                if not held:
                    return False, 0.0, 0.0, 0, False
                if made < peak_at:
                    pinned += g.size[v]
                continue
            # Its last read is before the peak, but the eviction gives it a new reader, for which the code would hold it over the
            # peak. It is evicted with the value and computed again too: a chain of cheap ops is evicted as a whole.
            if held and made < peak_at:
                w.group[group] = x
                group += 1
            # Made between the peak and the read: holding it longer costs nothing at the peak.
            elif held:
                continue
            # An op with several outputs is paid once.
            if w.seen_op[p] != mark:
                w.seen_op[p] = mark
                total += g.cost[p]
                w.stack[depth] = p
                depth += 1
    return True, total, pinned, group, False


@inner_kernel
def _price(g, w, code, x, at, excess, exponent, most):
    """Price of evicting an instance that is live at the peak; scores of ``most`` or more need not be exact.

    Returns whether anything is gained, the score (cost per byte of excess relieved, lower is better), the bytes freed at the
    peak, the last position before it that makes or reads the value, the number of instances evicted together (the first of
    ``w.group``), and whether the score is only a lower bound.
    """
    stage, v = w.stage[at], w.value[x]
    first, stop = w.uses_from[x], w.uses_from[x + 1]
    use = _first_from(w.uses, first, stop, at)
    touch = w.uses[use - 1] if use > first else w.made[x]
    # The op at the peak reads it.
    if use >= stop or w.uses[use] == at:
        return False, 0.0, 0.0, 0, 0, False
    need_at = w.uses[use]
    need_stage = w.stage[need_at]
    p = g.producer[v]
    # Within a stage nothing is dropped: a value touched and read in the stage of the peak stays. An op whose inputs are
    # overwritten by the next read cannot run again.
    if (w.stage[touch] == stage and need_stage == stage) or need_stage > g.last_stage[p]:
        return False, 0.0, 0.0, 0, 0, False
    duration = max(1, w.over[need_at] - w.over[touch + 1]) ** exponent if exponent > 0 else 1.0
    # Bytes beyond the excess count nothing: otherwise large values would win although a small one is enough.
    benefit = min(g.size[v], excess) * duration
    w.stamp[0] += 1
    possible, cost, pinned, group, partial = _remake_cost(g, w, code, p, at, need_at, most * benefit)
    gain = g.size[v] - pinned
    if not possible or (gain <= 0 and not partial):
        return False, 0.0, 0.0, 0, 0, False
    if not partial:
        benefit = min(gain, excess) * duration
    # A little is added to the cost: among values that cost nothing, the larger one is the better eviction.
    return True, (cost + 1e-9) / benefit, gain, touch, group, partial


@inner_kernel
def _evict(w, code, value, last_touch, peak_stage):
    """Drop a value from its last touch before the peak to the peak's stage; False if its row is full.

    If the touch is in the stage of the peak, the value is dropped in the next stage: within a stage no value is dropped.
    """
    start = w.stage[last_touch] + 1
    return add_interval(code, value, start, max(start, peak_stage))


@inner_kernel
def _sink(heap, k, count):
    """Restore the order of the heap of candidates (by score, then by index) from place ``k`` down."""
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
    ops = len(w.runs_from)
    for o in range(ops):
        w.runs_from[o] = 0
    w.over[0] = 0
    for p in range(length):
        w.runs_from[w.op[p] + 1] += 1
        w.over[p + 1] = w.over[p] + (1 if w.held[p] > budget else 0)
    for o in range(1, ops):
        w.runs_from[o] += w.runs_from[o - 1]
    # Filled from the back: afterwards the entry after each op is the start of the op's row, not the end.
    for p in range(length - 1, -1, -1):
        o = w.op[p]
        w.runs_from[o + 1] -= 1
        w.runs[w.runs_from[o + 1]] = p
    for o in range(ops - 1):
        w.runs_from[o] = w.runs_from[o + 1]
    w.runs_from[ops - 1] = length


@kernel
def evict_at_peak(g, w, code, length, at, excess, settings, random):
    """Evict the cheapest values at a position until their bytes reach the batch fraction of the excess; at least one value.

    Returns whether there was a candidate, and room for its interval. An eviction makes other candidates more expensive, because
    their ancestors may be missing afterwards. The kernel prices the cheapest candidate when its turn comes, and puts it back if
    it is more expensive than the next: the lazy evaluation of Minoux (1978) avoids pricing all candidates after each eviction.
    The first price is the cost of each value's own op, and walks end soon beyond the score of the next candidate. Prices only
    rise, so a known price is always a lower bound.
    """
    _index(g, w, length, settings.budget)
    heap = w.candidates
    exponent = settings.duration_exponent
    stage = w.stage[at]
    enough = excess * (1.0 - settings.batch_fraction)
    count = 0
    for v in range(len(g.size)):
        x = _newest_before(g, w, v, at)
        # Dead at the peak, or read there for the last time: an eviction gains nothing.
        if g.evictable[v] and x >= 0 and w.last_read[x] > at and w.time_up[0] == 0:
            gains, score, _, _, _, _ = _price(g, w, code, x, at, excess, exponent, 0.0)
            if gains:
                # The noise of a candidate is drawn once: if each price had new noise, the comparison with the stored score would
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
        # A little beyond the next candidate's score, to repeat fewer walks.
        most = 1.5 * max(heap[0].score, following) / noise
        x = _newest_before(g, w, v, at)
        gains, price, relieved, touch, group, partial = _price(g, w, code, x, at, excess, exponent, most)
        score = price * noise
        if gains and (partial or score > following * (1 + 1e-9)):  # more than rounding errors
            heap[0].score = max(score, heap[0].score)
        else:
            if gains:
                fits = _evict(w, code, v, touch, stage)
                for k in range(group):
                    x = w.group[k]
                    fits = _evict(w, code, w.value[x], w.last_read[x], stage) and fits
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
    """Evict at the peak and decode again, in turns, until the peak is within the budget.

    Returns whether a plan below the cutoff was found, its cost, its length, and the number of decoded sequences. Each round only
    adds stages to the intervals, so the loop ends; `Repair.rounds` ends it earlier if plans grow without approaching the
    budget, as on ResNet-50 at batch 863 with all ops recomputable. The code is changed even if no plan is found.
    """
    decodes = 0
    while decodes <= settings.rounds:
        decodes += 1
        length, cost, peak, at = profile(g, w, code)
        if length == 0:
            return False, 0.0, 0, decodes
        if peak <= settings.budget:
            return cost < settings.cutoff, cost, length, decodes
        # Evictions add computations: a plan above the cutoff never falls below it again.
        if cost > settings.cutoff or w.time_up[0] != 0:
            break
        if not evict_at_peak(g, w, code, length, at, peak - settings.budget, settings, random):
            break
    return False, 0.0, 0, decodes
