"""Kernels of the moves of an annealing over sequences: a computation moves, is left out, or is added.

A move copies the sequence to another array; `resequence` evaluates the copy. In all kernels ``g`` are the `Rules` of a problem.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from typing import Final, NamedTuple

from checkmate.solvers.backends.kernels import kernel
from checkmate.solvers.evict.decode import copy_range, next_random, random_below
from checkmate.solvers.evict.instance import Flags, Floats, Ints

LONGEST_CHAIN: Final = 64
"""Computations that one step may add."""
_TRIES: Final = 24
"""Draws of a place, or of a read, for a step that needs one of a certain kind."""


class Moves(NamedTuple):
    """Shares of the kinds of moves, and how they are drawn. What moves leave is for adding computations.

    Attributes:
        shifts: Share of moves of a computation to another place.
        removals: Share of computations left out.
        near: Most places that a shift passes, in all but some of them.
        far_share: Share of shifts that may pass any number.
        tight: Share of the budget from which a place is a good one to free memory at, where none is over it.
        still_live: Chance to compute an ancestor again that was still live after the place where memory is to be freed, as a
            share of that for the others; it is held for longer otherwise.
    """

    shifts: float = 0.45
    removals: float = 0.25
    near: int = 30
    far_share: float = 0.3
    tight: float = 0.97
    still_live: float = 0.2


class Rules(NamedTuple):
    """A problem as the kernels take it: arrays of an `Instance`, and the pairs of ops that are ordered.

    Attributes:
        read_start: As in `Instance`, like the next nine.
        before: First op of each pair whose first computations are ordered. Shape ``[pair]``.
        after: Second op of each. Shape ``[pair]``.
        disturbed: Op none of whose computations may follow the first of the one below. Shape ``[clobber]``.
        disturbing: That op. Shape ``[clobber]``.
    """

    read_start: Ints
    reads: Ints
    write_start: Ints
    writes: Ints
    producer: Ints
    cost: Floats
    workspace: Floats
    replay: Floats
    size: Floats
    evictable: Flags
    before: Ints
    after: Ints
    disturbed: Ints
    disturbing: Ints


@kernel
def leave_out_unread(g, sequence, length, runs, live):
    """Leave out computations that nothing reads where their op has others; returns the new length.

    `reductions.unread.without_unread` on flat arrays, without the prescribed places, which the evaluation sees to.

    Args:
        g: The rules.
        sequence: Changed in place.
        length: Its length.
        runs: Computations of each op; kept up to date.
        live: Working space. Shape ``[value]``.
    """
    live[:] = 0
    place = len(sequence)
    for p in range(length - 1, -1, -1):
        o = sequence[p]
        read = False
        for k in range(g.write_start[o], g.write_start[o + 1]):
            read = read or live[g.writes[k]] != 0
        if not read and runs[o] > 1:
            runs[o] -= 1
            continue
        for k in range(g.write_start[o], g.write_start[o + 1]):
            live[g.writes[k]] = 0
        for k in range(g.read_start[o], g.read_start[o + 1]):
            live[g.reads[k]] = 1
        place -= 1
        sequence[place] = o
    count = len(sequence) - place
    for k in range(count):
        sequence[k] = sequence[place + k]
    return count


@kernel
def _tied(g, a, b):
    """Whether one of two ops makes what the other reads, or they are the same."""
    tied = a == b
    for k in range(g.read_start[a], g.read_start[a + 1]):
        tied = tied or g.producer[g.reads[k]] == b
    for k in range(g.read_start[b], g.read_start[b + 1]):
        tied = tied or g.producer[g.reads[k]] == a
    return tied


@kernel
def shift(g, shares, sequence, length, trial, random):
    """Copy the sequence with one computation at another place, up to which it passes none that it is tied to.

    Returns:
        Whether one was moved.
    """
    source = random_below(random, length - 1)
    o = sequence[source]
    span = 1 + random_below(random, length if next_random(random) < shares.far_share else shares.near)
    step = -1 if next_random(random) < 0.5 else 1
    limit = max(0, source - span) if step < 0 else min(length - 2, source + span)
    target = source
    while target != limit and not _tied(g, o, sequence[target + step]):
        target += step
    if target == source:
        return False
    if next_random(random) < 0.5:
        target = source + step * (1 + random_below(random, abs(target - source)))
    copy_range(sequence, 0, length, trial, 0)
    for k in range(source, target, step):
        trial[k] = trial[k + step]
    trial[target] = o
    return True


@kernel
def remove(sequence, length, several, trial, random):
    """Copy the sequence without one computation of an op that has several, drawn from the places ``several``.

    Returns:
        The op.
    """
    p = several[random_below(random, len(several))]
    copy_range(sequence, 0, p, trial, 0)
    copy_range(sequence, p + 1, length, trial, p)
    return sequence[p]


@kernel
def tight_place(shares, profile, length, room, excess, random):
    """A place at which to free memory: one over the room if there is any, else one that is nearly full."""
    least = room if excess > 0 else shares.tight * room
    p = random_below(random, length)
    for _ in range(_TRIES):
        if profile[p] > least:
            break
        p = random_below(random, length)
    return p


@kernel
def next_read(g, sequence, length, p, random):
    """A value that is live at a place and not touched there, and its next read; -1 if none is found."""
    for _ in range(_TRIES):
        at = p + 1 + random_below(random, length - p)
        if at >= length:
            continue
        o = sequence[at]
        inputs = g.read_start[o + 1] - g.read_start[o]
        if inputs == 0:
            continue
        v = g.reads[g.read_start[o] + random_below(random, inputs)]
        if not g.evictable[v]:
            continue
        q = at - 1
        while q >= p and not _touches(g, sequence[q], v):
            q -= 1
        if q < p:
            return v, at
    return -1, -1


@kernel
def _touches(g, o, v):
    """Whether an op reads or makes a value."""
    touches = g.producer[v] == o
    for k in range(g.read_start[o], g.read_start[o + 1]):
        touches = touches or g.reads[k] == v
    return touches


@kernel
def _last_touches(g, sequence, length, at, touched, remade):
    """Last place that touches the instance of each value that is the newest before ``at``; -1 if there is none yet."""
    touched[:] = -1
    remade[:] = 0
    for p in range(length):
        o = sequence[p]
        for k in range(g.read_start[o], g.read_start[o + 1]):
            if not remade[g.reads[k]]:
                touched[g.reads[k]] = p
        for k in range(g.write_start[o], g.write_start[o + 1]):
            if p < at:
                touched[g.writes[k]] = p
            else:
                remade[g.writes[k]] = 1


@kernel
def add(g, shares, sequence, length, p, value, at, trial, touched, remade, work, random):
    """Copy the sequence with a value computed again right before ``at``, as it was held at ``p``.

    An ancestor that is not live at ``at`` is held for longer, or computed again as well: more likely so if it was no longer
    live at ``p``, where holding it would take what is to be freed.

    Args:
        g: The rules.
        shares: Chances.
        sequence: The sequence.
        length: Its length.
        p: Where memory is to be freed.
        value: The value.
        at: Its next read.
        trial: Filled with the new sequence.
        touched: Working space. Shape ``[value]``.
        remade: Working space. Shape ``[value]``.
        work: Working space: stack, next input, and computations to add, whose number is returned. Shape ``[3, place]``.
        random: State of the random numbers.

    Returns:
        Computations added, in ``work[2]``; 0 if they are too many.
    """
    _last_touches(g, sequence, length, at, touched, remade)
    again = next_random(random)
    o = g.producer[value]
    work[0, 0], work[1, 0] = o, g.read_start[o]
    depth, count = 1, 0
    while depth > 0:
        o = work[0, depth - 1]
        k = work[1, depth - 1]
        if k < g.read_start[o + 1]:
            work[1, depth - 1] = k + 1
            v = g.reads[k]
            if touched[v] >= at or not g.evictable[v]:
                continue
            if next_random(random) >= (again if touched[v] < p else shares.still_live * again):
                continue
            if depth + count >= LONGEST_CHAIN:
                return 0
            made = g.producer[v]
            for j in range(g.write_start[made], g.write_start[made + 1]):  # computed once
                touched[g.writes[j]] = length
            work[0, depth], work[1, depth] = made, g.read_start[made]
            depth += 1
        else:
            depth -= 1
            work[2, count] = o
            count += 1
    if length + count > len(trial):
        return 0
    copy_range(sequence, 0, at, trial, 0)
    copy_range(work[2], 0, count, trial, at)
    copy_range(sequence, at, length, trial, at + count)
    return count
