"""A* over states: which values are live and which ops were computed, as bits of two words."""

# The kernels are compiled by numba and written as it wants them: loops over flat arrays.
# pyright: basic

from __future__ import annotations

import numpy as np
from numba import njit

FOUND, QUEUED, EXPANDED, GOAL, LEAST, FULL, TRIED = range(7)
"""Counters: states found, entries of the queue, states expanded, the goal's state or -1, least cost of what is not
expanded, whether an array was too small, and sets of values tried since the last look at the clock."""

_MOST_SETS = 1 << 14
"""Sets of values to try when making room for one op; a state with more counts as an array that is too small."""
_TRIED_AT_ONCE = 1 << 20
"""Sets of values to try before the clock is looked at."""

_ZERO = np.uint64(0)
_ONE = np.uint64(1)


@njit(cache=True, error_model="numpy")
def _has(low, high, bit):
    if bit < 64:
        return (low >> np.uint64(bit)) & _ONE != _ZERO
    return (high >> np.uint64(bit - 64)) & _ONE != _ZERO


@njit(cache=True, error_model="numpy")
def _least_left(facts, low, high):
    """Cost of the ops that still have to run, if memory did not matter: consistent, so a state is expanded once."""
    need_low, need_high, total = facts.goal[0] & ~low, facts.goal[1] & ~high, 0
    for o in range(len(facts.cost) - 1, -1, -1):
        if facts.makes[o, 0] & need_low != _ZERO or facts.makes[o, 1] & need_high != _ZERO:
            total += facts.cost[o]
            need_low |= facts.reads[o, 0] & ~low
            need_high |= facts.reads[o, 1] & ~high
    return total


@njit(cache=True, error_model="numpy")
def _place(table, states, low, high):
    """Slot of a state in the hash table: its own, or the free one where it belongs."""
    mask = np.uint64(len(table) - 1)
    mixed = (low ^ (high * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(0xBF58476D1CE4E5B9)
    slot = (mixed ^ (mixed >> np.uint64(29))) & mask
    while True:
        entry = table[slot]
        if entry == 0 or (states[entry - 1, 0] == low and states[entry - 1, 1] == high):
            return slot
        slot = (slot + _ONE) & mask


@njit(cache=True, error_model="numpy")
def _sooner(key, left, other_key, other_left):
    """Among equals, what has least left to do: it is nearest to the goal."""
    return key < other_key or (key == other_key and left < other_left)


@njit(cache=True, error_model="numpy")
def _push(store, counters, key, left, state):
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


@njit(cache=True, error_model="numpy")
def _pop(store, counters):
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


@njit(cache=True, error_model="numpy")
def _reach(facts, store, counters, limit, low, high, cost, parent, op):
    """Take a state that was reached if it is new, or reached at a lower cost."""
    slot = _place(store.table, store.states, low, high)
    entry = store.table[slot]
    if entry != 0:
        state = entry - 1
        if store.cost[state] <= cost:
            return
        left = store.left[state]
    else:
        left = _least_left(facts, low, high)
        if cost + left >= limit:
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
    if cost + left < limit:
        _push(store, counters, cost + left, left, state)


@njit(cache=True, error_model="numpy")
def _compute(facts, store, counters, limit, state, o, chosen):
    """Compute an op in a state, after dropping each least set of values that makes room for it."""
    low, high, cost = store.states[state, 0], store.states[state, 1], store.cost[state] + facts.cost[o]
    count, held = 0, facts.during[o]
    for k in range(len(facts.size)):  # by size, falling
        v = facts.by_size[k]
        if _has(low, high, v):
            held += facts.size[v]
            if facts.size[v] > 0 and not _has(facts.reads[o, 0], facts.reads[o, 1], v):
                chosen[count] = v
                count += 1
    excess = held - facts.budget
    if excess <= 0:
        _reach(facts, store, counters, limit, low | facts.makes[o, 0], high | facts.makes[o, 1], cost, state, o)
        return
    # Depth first, the largest values first: a set is least if it is too little without its last, smallest value.
    picked = chosen[len(facts.size) :]  # stack of positions in ``chosen``
    rest = chosen[2 * len(facts.size) + 1 :]  # bytes of the values from a position on
    rest[count] = 0
    for k in range(count - 1, -1, -1):
        rest[k] = rest[k + 1] + facts.size[chosen[k]]
    depth, k, freed, tried = 0, 0, 0, 0
    while True:
        if k >= count or freed + rest[k] < excess or counters[FULL] != 0:
            if depth == 0:
                break
            depth -= 1
            k = picked[depth]
            freed -= facts.size[chosen[k]]
            low, high = _flip(low, high, chosen[k])
            k += 1
            continue
        tried += 1
        if tried > _MOST_SETS:
            counters[FULL] = 1
        v = chosen[k]
        if freed + facts.size[v] >= excess:
            less_low, less_high = _flip(low, high, v)
            _reach(facts, store, counters, limit, less_low | facts.makes[o, 0], less_high | facts.makes[o, 1], cost, state, o)
        else:
            freed += facts.size[v]
            low, high = _flip(low, high, v)
            picked[depth] = k
            depth += 1
        k += 1
    counters[TRIED] += tried


@njit(cache=True, error_model="numpy")
def _flip(low, high, bit):
    if bit < 64:
        return low ^ (_ONE << np.uint64(bit)), high
    return low, high ^ (_ONE << np.uint64(bit - 64))


@njit(cache=True, error_model="numpy")
def begin(facts, store, counters, limit):
    """Queue the state in which nothing is computed."""
    counters[:] = 0
    counters[GOAL] = -1
    _reach(facts, store, counters, limit, _ZERO, _ZERO, 0, -1, -1)


@njit(cache=True, error_model="numpy")
def expand(facts, store, counters, limit, most, chosen):
    """Expand states in the order of their least cost until the goal, ``most`` states, or an array is full."""
    counters[TRIED] = 0
    for _ in range(most):
        if counters[QUEUED] == 0 or counters[FULL] != 0 or counters[TRIED] > _TRIED_AT_ONCE:
            return
        key = store.queue_key[0]
        state = _pop(store, counters)
        if key != store.cost[state] + store.left[state]:
            continue  # it was reached at a lower cost since
        counters[LEAST] = key
        low, high = store.states[state, 0], store.states[state, 1]
        if facts.goal[0] & ~low == _ZERO and facts.goal[1] & ~high == _ZERO:
            counters[GOAL] = state
            return
        counters[EXPANDED] += 1
        for o in range(len(facts.cost)):
            if facts.reads[o, 0] & ~low != _ZERO or facts.reads[o, 1] & ~high != _ZERO:
                continue
            if facts.makes[o, 0] & ~low == _ZERO and facts.makes[o, 1] & ~high == _ZERO:
                continue
            if facts.never_after[o, 0] & low != _ZERO or facts.never_after[o, 1] & high != _ZERO:
                continue
            if facts.only_after[o, 0] & ~low != _ZERO or facts.only_after[o, 1] & ~high != _ZERO:
                continue
            _compute(facts, store, counters, limit, state, o, chosen)
