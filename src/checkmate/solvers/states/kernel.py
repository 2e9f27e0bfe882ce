"""Kernels of A* (Hart, Nilsson and Raphael 1968) over states: which values are live and which ops were computed.

Rematerialisation is a pebble game (Sethi 1975): a state is the set of pebbled values, a move computes one op. A plain search
would also have a move for every value that could be dropped, at every step. Three rules make the search small enough:

- values are dropped only when an op needs their room, and then a minimal set of them: holding more costs nothing;
- a state that cannot lead to a plan cheaper than the best one is not stored;
- the estimate of the remaining cost is the cost of the ops that would have to run if memory did not matter.

In all kernels ``p`` is a `PackedProblem`, ``store`` the `_Store` of `exploration`, ``low`` and ``high`` are the two words of a
state.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from typing import Final

import numpy as np

from checkmate.solvers.backends.kernels import inner_kernel, kernel

FOUND, QUEUED, EXPANDED, GOAL, LEAST, FULL, TRIED, LIMIT = range(8)
"""Places in the array of counters: states found, entries of the queue, states expanded, the goal's state or -1, least
cost of states not expanded, whether an array was too small, sets of values
tried in this call of `expand`, and the limit: plans of that cost or more are not wanted."""

_ZERO: Final = np.uint64(0)
_ONE: Final = np.uint64(1)


@inner_kernel
def _has(low, high, bit):
    """Whether a bit of two words is set."""
    if bit < 64:
        return (low >> np.uint64(bit)) & _ONE != _ZERO
    return (high >> np.uint64(bit - 64)) & _ONE != _ZERO


@inner_kernel
def _least_left(p, low, high):
    """Cost of the ops that would still have to run if memory did not matter.

    Ops are in topological order: one pass from the last to the first finds all that are needed. A move costs its op, and lowers
    the estimate by at most this cost. The estimate is therefore consistent: a state has its least cost when it is expanded, and
    is expanded once.
    """
    need_low, need_high, total = p.goal[0] & ~low, p.goal[1] & ~high, 0
    for o in range(len(p.cost) - 1, -1, -1):
        if p.makes[o, 0] & need_low != _ZERO or p.makes[o, 1] & need_high != _ZERO:
            total += p.cost[o]
            need_low |= p.reads[o, 0] & ~low
            need_high |= p.reads[o, 1] & ~high
    return total


@inner_kernel
def _place(table, states, low, high):
    """Slot of a state in the hash table: its own, or the free one for it.

    Linear probing; the table has at least twice as many entries as there can be states, so a free entry is always near. The
    constants of splitmix64 spread states that differ in few bits.
    """
    mask = np.uint64(len(table) - 1)
    mixed = (low ^ (high * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    slot = (mixed ^ (mixed >> np.uint64(29))) & mask
    while True:
        entry = table[slot]
        if entry == 0 or (states[entry - 1, 0] == low and states[entry - 1, 1] == high):
            return slot
        slot = (slot + _ONE) & mask


@inner_kernel
def _sooner(key, left, other_key, other_left):
    """Order of the queue: by key, then by remaining cost, because states with the least are nearest to the goal."""
    return key < other_key or (key == other_key and left < other_left)


@inner_kernel
def _push(store, counters, key, left, state):
    """Add a state to the heap."""
    keys, lefts, states = store.queue_key, store.queue_left, store.queue_state
    k = counters[QUEUED]
    if k >= len(keys):
        counters[FULL] = 1
        return
    counters[QUEUED] = k + 1
    while k > 0:
        above = (k - 1) >> 1
        if not _sooner(key, left, keys[above], lefts[above]):
            break
        keys[k], lefts[k], states[k] = keys[above], lefts[above], states[above]
        k = above
    keys[k], lefts[k], states[k] = key, left, state


@inner_kernel
def _pop(store, counters):
    """Take the first state off the heap."""
    keys, lefts, states = store.queue_key, store.queue_left, store.queue_state
    state = states[0]
    last = counters[QUEUED] - 1
    counters[QUEUED] = last
    key, left, moved = keys[last], lefts[last], states[last]
    k = 0
    while True:
        below = 2 * k + 1
        if below >= last:
            break
        if below + 1 < last and _sooner(keys[below + 1], lefts[below + 1], keys[below], lefts[below]):
            below += 1
        if not _sooner(keys[below], lefts[below], key, left):
            break
        keys[k], lefts[k], states[k] = keys[below], lefts[below], states[below]
        k = below
    keys[k], lefts[k], states[k] = key, left, moved
    return state


@inner_kernel
def _reach(p, store, counters, low, high, cost, parent, op):
    """Store and queue a state if it is new or was reached at a lower cost, and can lead to a plan below the limit."""
    # A state is stored at most once, with the least cost known; its outdated queue entries are skipped when they are taken.
    slot = _place(store.table, store.states, low, high)
    entry = store.table[slot]
    if entry != 0:
        state = entry - 1
        if store.cost[state] <= cost:
            return
        left = store.left[state]
    else:
        left = _least_left(p, low, high)
        # Not even stored: most states of a graph are too expensive, and memory limits this search.
        if cost + left >= counters[LIMIT]:
            return
        state = counters[FOUND]
        if state >= len(store.cost):
            counters[FULL] = 1
            return
        counters[FOUND] = state + 1
        store.table[slot] = state + 1
        store.states[state, 0], store.states[state, 1] = low, high
        store.left[state] = left
    store.cost[state] = cost
    store.parent[state] = parent
    store.op[state] = op
    if cost + left < counters[LIMIT]:
        _push(store, counters, cost + left, left, state)


@inner_kernel
def _compute(p, store, counters, state, o, chosen):
    """Compute an op in a state, after dropping each minimal set of values that makes room for it.

    A set is minimal if none of its values could stay. Other sets need no try: values that stay can be dropped later, so every
    move that is possible with fewer live values is possible with more, at the same cost.
    """
    low, high, cost = store.states[state, 0], store.states[state, 1], store.cost[state] + p.cost[o]
    count, held = 0, p.during[o]
    for k in range(len(p.size)):  # by size, descending
        v = p.by_size[k]
        # Empty values need no room and are never dropped. The inputs stay while the op runs.
        if _has(low, high, v):
            held += p.size[v]
            if p.size[v] > 0 and not _has(p.reads[o, 0], p.reads[o, 1], v):
                chosen[count] = v
                count += 1
    # If an op is too large even alone, no set frees enough, and no state follows.
    excess = held - p.budget
    if excess <= 0:
        _reach(p, store, counters, low | p.makes[o, 0], high | p.makes[o, 1], cost, state, o)
        return
    # Depth first over subsets, the largest values first: a set that frees enough is minimal if it frees too little without its
    # smallest value, the one added last. A branch ends if all values left would free too little.
    # The walk changes and restores the stack of picked values, their state words and the bytes freed; no set is copied.
    picked = chosen[len(p.size) :]  # stack of positions in ``chosen``
    rest = chosen[2 * len(p.size) + 1 :]  # bytes of the values from a position on
    rest[count] = 0
    for k in range(count - 1, -1, -1):
        rest[k] = rest[k + 1] + p.size[chosen[k]]
    depth, k, freed, tried = 0, 0, 0, 0
    while True:
        if k >= count or freed + rest[k] < excess or counters[FULL] != 0:
            if depth == 0:
                break
            depth -= 1
            k = picked[depth]
            freed -= p.size[chosen[k]]
            low, high = _flip(low, high, chosen[k])
            k += 1
            continue
        tried += 1
        # With many small values there are exponentially many minimal sets. A state with too many ends the search, as a full
        # array does: leaving some out would make the bound wrong.
        if tried > 1 << 14:
            counters[FULL] = 1
        v = chosen[k]
        if freed + p.size[v] >= excess:
            less_low, less_high = _flip(low, high, v)
            _reach(p, store, counters, less_low | p.makes[o, 0], less_high | p.makes[o, 1], cost, state, o)
        else:
            freed += p.size[v]
            low, high = _flip(low, high, v)
            picked[depth] = k
            depth += 1
        k += 1
    counters[TRIED] += tried


@inner_kernel
def _flip(low, high, bit):
    """The two words with one bit changed."""
    if bit < 64:
        return low ^ (_ONE << np.uint64(bit)), high
    return low, high ^ (_ONE << np.uint64(bit - 64))


@kernel
def begin(p, store, counters, limit):
    """Set the counters and queue the state in which nothing is computed."""
    counters[:] = 0
    counters[GOAL] = -1
    counters[LIMIT] = limit
    _reach(p, store, counters, _ZERO, _ZERO, 0, -1, -1)


@kernel
def expand(p, store, counters, most, chosen):
    """Expand states in the order of their least cost, until the goal, ``most`` states, a full array, or a look at the clock."""
    counters[TRIED] = 0
    for _ in range(most):
        # The clock is read after this number of sets, which takes some tens of milliseconds.
        if counters[QUEUED] == 0 or counters[FULL] != 0 or counters[TRIED] > 1 << 20:
            return
        key = store.queue_key[0]
        state = _pop(store, counters)
        if key != store.cost[state] + store.left[state]:
            continue  # reached at a lower cost after this entry was queued; there is another entry
        # The estimate is consistent, so keys never fall from one expansion to the next: a key is a bound on every plan.
        counters[LEAST] = key
        low, high = store.states[state, 0], store.states[state, 1]
        if p.goal[0] & ~low == _ZERO and p.goal[1] & ~high == _ZERO:
            counters[GOAL] = state
            return
        # An op can run if its inputs are live and the rules about its place hold.
        counters[EXPANDED] += 1
        for o in range(len(p.cost)):
            if p.reads[o, 0] & ~low != _ZERO or p.reads[o, 1] & ~high != _ZERO:
                continue
            # All its outputs are live: computing it would add cost and change nothing.
            if p.makes[o, 0] & ~low == _ZERO and p.makes[o, 1] & ~high == _ZERO:
                continue
            if p.never_after[o, 0] & low != _ZERO or p.never_after[o, 1] & high != _ZERO:
                continue
            if p.only_after[o, 0] & ~low != _ZERO or p.only_after[o, 1] & ~high != _ZERO:
                continue
            _compute(p, store, counters, state, o, chosen)
