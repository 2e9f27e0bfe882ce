"""Simulated annealing over sequences of computations, which are moved, repeated and left out together.

The eviction search finds recomputations for a fixed order of first computations. That is not enough if a better order pays only
together with other recomputations. Here a state is any sequence of ops that computes each at least once. A read takes the newest
instance of a value, so every sequence is a plan. A step is one of:

- a computation moves to another place, with the same instances read and the same readers;
- one of several computations of an op is left out, with all computations that only it needed: older instances are held longer;
- a value that is live and not read at some place is computed again before its next read, together with ancestors that are no
  longer live.

The energy is the cost plus a price for each byte over the budget in each step. The price rises during the annealing: at first a
sequence may exceed the budget, in the end hardly. FastSA (NeurIPS 2023) also anneals order and recomputations together, on
a segment tree. Here each step is evaluated in one pass over the sequence from its end: ten microseconds on five hundred ops.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from checkmate.core.problem import Problem
from checkmate.solvers.backends.kernels import inner_kernel, kernel
from checkmate.solvers.clocks import Flag, no_alarm
from checkmate.solvers.evict.profile import next_random, seeded
from checkmate.solvers.flat_graph import FlatGraph, Floats, Ints, flatten

_LONGEST_CHAIN: Final = 64
"""Most computations that one step may add. A place or a read of a wanted kind is drawn up to 24 times."""


class Resequenced(NamedTuple):
    """Sequences of an annealing, as orders of computations."""

    best: list[int]  # the cheapest within the budget; empty if none was
    last: list[int]  # the last one, which may exceed the budget


def anneal_sequence(problem: Problem, order: Sequence[int], seed: int, time_up: Flag | None = None) -> Resequenced:
    """Anneal from an order that can run and has each op of a folded graph at least once."""
    g = flatten(problem)
    graph, room = problem.graph, float(problem.budget_bytes - problem.graph.resident_bytes)
    # A view that folding left keeps its base's instance alive. The kernels do not know that rule, so the op of the base is not
    # computed again.
    for o in {graph.producer[graph.root[v]] for v, x in enumerate(graph.values) if x.base is not None}:
        g.evictable[list(graph.ops[o].outputs)] = 0
    random = np.random.default_rng(seed)
    # No price is best on all graphs: low ones find sequences of other kinds, high ones find sequences within a tight budget.
    op_cost = max(1.0, graph.cost / max(1, len(graph.ops)))
    price = float(random.choice([12.0, 25.0, 50.0])) * op_cost / max(1.0, room)
    settings = _Annealing(
        room=room,
        moves=min(300 * len(graph.ops), 100_000_000 // (len(order) + 1)),  # about a second
        hot=0.15 * op_cost,
        cold=0.015 * op_cost,
        low_price=price,
        high_price=price * float(random.choice([1.0, 10.0])),
        shifts=0.45,
        removals=0.25,
    )
    return _annealed(g, settings, order, seed, time_up)


def anneal_order(problem: Problem, order: Sequence[int], room_bytes: float, seed: int, time_up: Flag | None = None) -> list[int]:
    """An order of the same computations of a folded graph with fewer bytes over `room_bytes`, which excludes resident bytes.

    The penalty is the sum over all steps of the bytes over the room: smoother than the peak, which most moves do not change.
    The result depends on the temperature more than on the time: a start at 1e-3 of the cost gained 0.1 % in 23 s, a start at
    1e-4 gained 0.4 % in 5 s.
    """
    hot = 0.02 * max(1.0, room_bytes)
    moves = min(40_000, 25_000_000 // (len(order) + 1))  # a quarter of a second; five times as many gain 2 %
    settings = _Annealing(
        room=float(room_bytes), moves=moves, hot=hot, cold=0.01 * hot, low_price=1.0, high_price=1.0, shifts=1.0, removals=0.0
    )
    return _annealed(flatten(problem), settings, order, seed, time_up).last


def _annealed(g: FlatGraph, settings: _Annealing, order: Sequence[int], seed: int, time_up: Flag | None) -> Resequenced:
    ops, length = len(g.cost) - 1, len(order) + 1
    room = max(length, 8 * ops) + _LONGEST_CHAIN
    counts = (3 * [len(g.size)], 5 * [len(g.cost)], 2 * [room], 3 * [_LONGEST_CHAIN + 1])
    ints = (np.zeros(n, dtype=np.int32) for n in itertools.chain(*counts))
    alarm = no_alarm() if time_up is None else time_up
    work = _Work(*ints, held=np.zeros(room), trial_held=np.zeros(room), time_up=alarm)
    sequence, best = (np.zeros(room, dtype=np.int32) for _ in range(2))
    sequence[:length] = [*order, ops]
    best_length, last_length = _anneal(g, work, settings, sequence, length, best, seeded(seed))
    return Resequenced(best[: max(0, best_length - 1)].tolist(), sequence[: last_length - 1].tolist())


class _Annealing(NamedTuple):
    """How to anneal. Temperature and price of memory change geometrically; fields must have exactly these types."""

    room: float  # bytes at no price
    moves: int
    hot: float
    cold: float
    low_price: float  # of a byte over the room in one step
    high_price: float
    shifts: float  # share of steps that move a computation; the rest, without removals, adds computations
    removals: float  # share of steps that leave computations out


class _Work(NamedTuple):
    """Working arrays of the kernels."""

    live: Ints  # whether each value is live
    touched: Ints  # the last place that touches it
    remade: Ints  # whether it is made again
    first: Ints  # first and last place of each op, and the number of its computations that a pass has seen
    last: Ints
    passed: Ints
    runs: Ints  # computations of each op in the sequence, and in the trial
    trial_runs: Ints
    trial: Ints  # the sequence after a move
    several: Ints  # places whose op is computed more than once
    chain: Ints  # ops of a depth-first search, the next input to visit of each, and computations to add
    next_read: Ints
    added: Ints
    held: Floats  # bytes at each place of the sequence, and of the trial
    trial_held: Floats
    time_up: Flag


@inner_kernel
def _excess(g, w, sequence, length, runs, bytes_at, room, most):
    """Bytes over the room, summed over all places, and whether these are at most ``most`` and the sequence keeps the rules.

    One pass from the end: a value is live before a place if the place reads it, or if it is live after the place, which does
    not make it. Fills the bytes at each place.
    """
    w.live[:] = 0
    w.last[:] = -1
    held = 0.0
    excess = 0.0
    for p in range(length - 1, -1, -1):
        o = sequence[p]
        if w.last[o] < 0:
            w.last[o] = p
            w.passed[o] = 0
            if runs[o] > 1:  # the replay state, held from the first to the last computation
                held += g.replay[o]
        w.first[o] = p
        w.passed[o] += 1
        there = held
        for k in range(g.writes_from[o], g.writes_from[o + 1]):
            v = g.writes[k]
            if w.live[v]:
                held -= g.size[v]
                w.live[v] = 0
            else:
                there += g.size[v]
        for k in range(g.reads_from[o], g.reads_from[o + 1]):
            v = g.reads[k]
            if not w.live[v]:
                there += g.size[v]
                held += g.size[v]
                w.live[v] = 1
        there += g.workspace[o]
        bytes_at[p] = there
        if there > room:
            excess += there - room
            if excess > most:
                return excess, False
        if runs[o] > 1 and w.passed[o] == runs[o]:
            held -= g.replay[o]
    for v in range(len(w.live)):
        if w.live[v]:  # read before it is made
            return excess, False
    for k in range(len(g.ordered)):
        if w.first[g.ordered[k, 0]] > w.first[g.ordered[k, 1]]:
            return excess, False
    for k in range(len(g.overwritten)):
        if w.last[g.overwritten[k, 0]] > w.first[g.overwritten[k, 1]]:
            return excess, False
    return excess, True


@inner_kernel
def _without_unread(g, w, length):
    """Leave out unread computations of the trial whose op has other computations; returns the new length.

    This is `reductions.unread.without_unread` on flat arrays, without the rules on places, which `_excess` checks.
    """
    w.live[:] = 0
    place = len(w.trial)
    for p in range(length - 1, -1, -1):
        o = w.trial[p]
        read = False
        for k in range(g.writes_from[o], g.writes_from[o + 1]):
            read = read or w.live[g.writes[k]] != 0
        if not read and w.trial_runs[o] > 1:
            w.trial_runs[o] -= 1
            continue
        for k in range(g.writes_from[o], g.writes_from[o + 1]):
            w.live[g.writes[k]] = 0
        for k in range(g.reads_from[o], g.reads_from[o + 1]):
            w.live[g.reads[k]] = 1
        place -= 1
        w.trial[place] = o
    count = len(w.trial) - place
    for k in range(count):
        w.trial[k] = w.trial[place + k]
    return count


@inner_kernel
def _reads(g, o, v):
    """Whether an op reads a value."""
    reads = False
    for k in range(g.reads_from[o], g.reads_from[o + 1]):
        reads = reads or g.reads[k] == v
    return reads


@inner_kernel
def _reads_from(g, a, b):
    """Whether an op reads an output of another."""
    reads = False
    for k in range(g.reads_from[a], g.reads_from[a + 1]):
        reads = reads or g.producer[g.reads[k]] == b
    return reads


@inner_kernel
def _shift(g, w, sequence, length, random):
    """Fill the trial with the sequence after one computation has moved; returns whether one has.

    On the way to its new place the computation passes no computation of its op, no producer of its inputs and no reader of its
    outputs. In 30 % of the draws it may pass any number of others, else at most 30.
    """
    source = int(next_random(random) * (length - 1))
    o = sequence[source]
    span = 1 + int(next_random(random) * (length if next_random(random) < 0.3 else 30))
    step = -1 if next_random(random) < 0.5 else 1
    limit = max(0, source - span) if step < 0 else min(length - 2, source + span)
    target = source
    while target != limit:
        other = sequence[target + step]
        if other == o or _reads_from(g, o, other) or _reads_from(g, other, o):
            break
        target += step
    if target == source:
        return False
    if next_random(random) < 0.5:
        target = source + step * (1 + int(next_random(random) * abs(target - source)))
    for p in range(length):
        w.trial[p] = sequence[p]
    for k in range(source, target, step):
        w.trial[k] = sequence[k + step]
    w.trial[target] = o
    return True


@inner_kernel
def _find_read(g, w, sequence, length, room, excess, random):
    """A place at which to free memory, a value that is live and not touched there, and the value's next read.

    The place is over the room if there is any such place, else nearly full. The value is -1 if none is found.
    """
    least = room if excess > 0 else 0.97 * room
    p = 0
    for _ in range(24):
        p = int(next_random(random) * length)
        if w.held[p] > least:
            break
    for _ in range(24):
        at = p + 1 + int(next_random(random) * (length - p))
        if at >= length:
            continue
        o = sequence[at]
        inputs = g.reads_from[o + 1] - g.reads_from[o]
        if inputs == 0:
            continue
        v = g.reads[g.reads_from[o] + int(next_random(random) * inputs)]
        if not g.evictable[v]:
            continue
        q = at - 1
        while q >= p and g.producer[v] != sequence[q] and not _reads(g, sequence[q], v):
            q -= 1
        if q < p:
            return p, v, at
    return p, -1, 0


@inner_kernel
def _chain(g, w, sequence, length, p, value, at, random):
    """Fill ``w.chain`` with the computations that make a value again right before ``at``; returns their number, 0 if too many.

    An ancestor that is not live at ``at`` is held longer or computed again too. Recomputation is more likely if the ancestor was
    no longer live at ``p``, because holding it would take up the bytes to be freed there.
    """
    # For each value: the last place that touches its newest instance before ``at``; -1 if it has none yet.
    w.touched[:] = -1
    w.remade[:] = 0
    for q in range(length):
        o = sequence[q]
        for k in range(g.reads_from[o], g.reads_from[o + 1]):
            if not w.remade[g.reads[k]]:
                w.touched[g.reads[k]] = q
        for k in range(g.writes_from[o], g.writes_from[o + 1]):
            if q < at:
                w.touched[g.writes[k]] = q
            else:
                w.remade[g.writes[k]] = 1
    again = next_random(random)
    w.chain[0] = g.producer[value]
    w.next_read[0] = g.reads_from[w.chain[0]]
    depth, count = 1, 0
    while depth > 0:
        o = w.chain[depth - 1]
        k = w.next_read[depth - 1]
        if k >= g.reads_from[o + 1]:
            depth -= 1
            w.added[count] = o
            count += 1
            continue
        w.next_read[depth - 1] = k + 1
        v = g.reads[k]
        if w.touched[v] >= at or not g.evictable[v]:
            continue
        if next_random(random) >= (again if w.touched[v] < p else 0.2 * again):
            continue
        if depth + count >= len(w.chain) - 1:
            return 0
        made = g.producer[v]
        for j in range(g.writes_from[made], g.writes_from[made + 1]):  # computed once
            w.touched[g.writes[j]] = length
        w.chain[depth] = made
        w.next_read[depth] = g.reads_from[made]
        depth += 1
    return count


@kernel
def _anneal(g, w, settings, sequence, length, best, random):
    """Anneal a sequence in place, and fill ``best`` with the cheapest one seen within the room. Working arrays begin at 0.

    Returns the length of the best, 0 if there is none, and the length of the last.
    """
    ops = len(w.runs)
    cost = 0.0
    for p in range(length):
        w.runs[sequence[p]] += 1
        cost += g.cost[sequence[p]]
    excess, _ = _excess(g, w, sequence, length, w.runs, w.held, settings.room, np.inf)
    best_cost, best_length = np.inf, 0
    if excess <= 0:
        best_cost, best_length = cost, length
        for p in range(length):
            best[p] = sequence[p]
    repeats = -1  # number of places whose op is computed more than once; -1 if they must be counted again
    for move in range(settings.moves):
        if w.time_up[0] != 0 or (settings.shifts == 1.0 and excess <= 0):
            break
        done = move / settings.moves
        temperature = settings.hot * (settings.cold / settings.hot) ** done
        price = settings.low_price * (settings.high_price / settings.low_price) ** done
        if repeats < 0:
            repeats = 0
            for p in range(length):
                if w.runs[sequence[p]] > 1:
                    w.several[repeats] = p
                    repeats += 1
        for o in range(ops):
            w.trial_runs[o] = w.runs[o]
        kind = next_random(random)
        trial_length, trial_cost = length, cost
        if kind < settings.shifts:
            if not _shift(g, w, sequence, length, random):
                continue
        else:
            # ``gone`` computations from ``at`` on are replaced by ``count`` others.
            at, gone, count = 0, 0, 0
            if kind < settings.shifts + settings.removals:
                if repeats == 0:
                    continue
                at, gone = w.several[int(next_random(random) * repeats)], 1
                w.trial_runs[sequence[at]] -= 1
            else:
                p, v, at = _find_read(g, w, sequence, length, settings.room, excess, random)
                if v < 0:
                    continue
                count = _chain(g, w, sequence, length, p, v, at, random)
                if count == 0 or length + count > len(best):
                    continue
                for k in range(count):
                    w.trial_runs[w.added[k]] += 1
            trial_length = length - gone + count
            for p in range(trial_length):
                if p < at:
                    w.trial[p] = sequence[p]
                elif p < at + count:
                    w.trial[p] = w.added[p - at]
                else:
                    w.trial[p] = sequence[p + gone - count]
            trial_length = _without_unread(g, w, trial_length)
            trial_cost = 0.0
            for p in range(trial_length):
                trial_cost += g.cost[w.trial[p]]
        # The largest excess at which the move is accepted; it is drawn first, to let the pass end early.
        most = excess + (cost - trial_cost - temperature * np.log(max(next_random(random), 1e-300))) / price
        if most < 0:
            continue
        trial_excess, kept = _excess(g, w, w.trial, trial_length, w.trial_runs, w.trial_held, settings.room, most)
        if not kept:
            continue
        repeats = -1
        cost, excess, length = trial_cost, trial_excess, trial_length
        for p in range(length):
            sequence[p] = w.trial[p]
            w.held[p] = w.trial_held[p]
        for o in range(ops):
            w.runs[o] = w.trial_runs[o]
        if excess <= 0 and cost < best_cost:
            best_cost, best_length = cost, length
            for p in range(length):
                best[p] = sequence[p]
    return best_length, length
