"""Simulated annealing over sequences of computations: they are moved, repeated and left out, all at once.

`reorder` changes the order of the computations that are there, and the eviction search what is computed again in an order of
first computations; neither gets far where one needs the other. Here a state is any sequence of ops that computes each at
least once. A read takes the newest instance of a value, so that a sequence is a plan, and a step is one of:

- a computation moves to another place, where it reads the same instances and is read by the same computations;
- one of several computations of an op is left out, and what only it needed with it: older instances are held for longer;
- a value that is live at some place and not read there is computed again before its next read, ancestors that are no longer live
  included.

The energy is the cost and a price for each byte over the budget in each step, which rises from one at which a sequence may well
be over the budget to one at which it hardly can. FastSA (NeurIPS 2023) anneals order and recomputations together too, on
a segment tree. Here each step is evaluated in one pass over the sequence from its end: ten microseconds on five hundred ops.
"""

# numba compiles loops over flat arrays; it has no types for pyright to check.
# pyright: basic

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.problem import Problem
from checkmate.solvers.alarm import Flag, no_alarm
from checkmate.solvers.backends.kernels import kernel
from checkmate.solvers.evict.decode import next_random, random_below, seed_random
from checkmate.solvers.evict.instance import Flags, Floats, Ints, build_instance

_LONGEST_CHAIN: Final = 64
"""Computations that one step may add."""
_TRIES: Final = 24
"""Draws of a place, or of a read, for a step that needs one of a certain kind."""


class Schedule(NamedTuple):
    """How temperature and price of memory change, geometrically from the first to the last move.

    Costs are in those of an op, the mean over the graph. The price of memory is the cost of holding one budget more in one step.
    No price is best on all graphs: low ones find sequences of other kinds, high ones such that keep to a tight budget.

    Attributes:
        hot: Temperature at the start.
        cold: Temperature at the end.
        prices: Prices at the start, to draw from.
        rises: Factors by which they rise to the end, to draw from.
    """

    hot: float = 0.15
    cold: float = 0.015
    prices: tuple[float, ...] = (12.0, 25.0, 50.0)
    rises: tuple[float, ...] = (1.0, 10.0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResequenceParameters:
    """Parameters of `Resequencing`. How much each matters: ``docs/benchmarks/solver_parameters.md``.

    Attributes:
        moves: Moves tried, for each op of the graph.
        work: Most places of all sequences evaluated, which limits the moves on larger graphs: about a second.
        most_ops: Largest graph. Beyond it there are too few moves for the number of ops.
        stretch: Longest sequence, as a multiple of the number of ops.
        schedule: How temperature and price change.
        shares: How moves are drawn.
    """

    moves: int = 300
    work: int = 100_000_000
    most_ops: int = 3000
    stretch: int = 8
    schedule: Schedule = field(default_factory=Schedule)
    shares: Moves = field(default_factory=Moves)


PARAMETERS = ResequenceParameters()


class Resequenced(NamedTuple):
    """Sequences of an annealing, as orders of computations.

    Attributes:
        best: The cheapest within the budget; empty if none was.
        last: The one that it ended with, which may be over the budget.
    """

    best: list[int]
    last: list[int]


class Resequencing:
    """Annealing of sequences of one problem.

    Args:
        problem: A problem whose views are folded.
        time_up: Ends kernels when it is raised; by default nothing does.
    """

    def __init__(self, problem: Problem, time_up: Flag | None = None) -> None:
        graph = problem.graph
        instance = build_instance(problem, frozenset())
        # A view that folding left keeps the instance that it was made from, which the kernels do not know: the op of that one is
        # not computed again.
        evictable = instance.evictable.copy()
        viewed = {graph.producer[graph.root[v]] for v, x in enumerate(graph.values) if x.base is not None}
        evictable[[v for o in viewed for v in graph.ops[o].outputs]] = 0
        after = np.array(graph.order, dtype=np.int64).reshape(-1, 2)
        clobbers = [(o, c) for o, op in enumerate(graph.ops) for c in op.clobbered_by]
        overwritten = np.array(clobbers, dtype=np.int64).reshape(-1, 2)
        self._rules = _Rules(
            instance.read_start, instance.reads, instance.write_start, instance.writes, instance.producer, instance.cost,
            instance.workspace, instance.replay, instance.size, evictable, np.ascontiguousarray(after[:, 0]),
            np.ascontiguousarray(after[:, 1]), np.ascontiguousarray(overwritten[:, 0]), np.ascontiguousarray(overwritten[:, 1]),
        )  # fmt: skip
        self._end = len(graph.ops)
        self._room = float(problem.budget_bytes - graph.resident_bytes)
        self._op_cost = graph.cost / max(1, self._end)
        self._time_up = no_alarm() if time_up is None else time_up

    def anneal(self, order: Sequence[int], seed: int) -> Resequenced:
        """Anneal from a sequence.

        Args:
            order: Ops in an order that can run, each at least once.
            seed: Seed of the moves.
        """
        p = PARAMETERS
        length = len(order) + 1
        room = max(length, p.stretch * self._end) + _LONGEST_CHAIN
        sequence, best = np.zeros(room, dtype=np.int64), np.zeros(room, dtype=np.int64)
        sequence[: length - 1], sequence[length - 1] = order, self._end
        random = np.zeros(1, dtype=np.uint64)
        seed_random(random, seed)
        scale = max(1.0, self._op_cost)
        price = self._drawn(p.schedule.prices, random) * scale / max(1.0, self._room)
        settings = _Settings(
            room=self._room,
            moves=min(p.moves * self._end, p.work // length),
            hot=p.schedule.hot * scale,
            cold=p.schedule.cold * scale,
            low_price=price,
            high_price=price * self._drawn(p.schedule.rises, random),
        )
        best_length, last_length = _anneal(self._rules, settings, p.shares, sequence, length, best, random, self._time_up)
        return Resequenced(best[: max(0, best_length - 1)].tolist(), sequence[: last_length - 1].tolist())

    @staticmethod
    def _drawn(choices: Sequence[float], random: npt.NDArray[np.uint64]) -> float:
        return choices[random_below(random, len(choices))]


class _Rules(NamedTuple):
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


class _Settings(NamedTuple):
    """A `Schedule` in costs, costs a byte, and moves. All fields are of these very types."""

    room: float
    moves: int
    hot: float
    cold: float
    low_price: float
    high_price: float


@kernel
def _without_unread(g, sequence, length, runs, live):
    """Leave out computations that nothing reads where their op has others; returns the new length.

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
def _excess(g, sequence, length, runs, room, most, live, first, last, passed, profile):
    """Bytes over the room, summed over all places; infinite if the sequence breaks a rule, or if they are more than ``most``.

    One pass from the end: a value is live before a place if it is read there or, not made there, is live after it.

    Args:
        g: The rules.
        sequence: The sequence, END last.
        length: Its length.
        runs: Computations of each op.
        room: Bytes at no price.
        most: Ends the pass.
        live: Working space. Shape ``[value]``.
        first: Filled with the first place of each op. Shape ``[op]``.
        last: Filled with the last one. Shape ``[op]``.
        passed: Working space. Shape ``[op]``.
        profile: Filled with the bytes at each place. Shape ``[place]``.
    """
    live[:] = 0
    last[:] = -1
    held = 0.0
    excess = 0.0
    for p in range(length - 1, -1, -1):
        o = sequence[p]
        if last[o] < 0:
            last[o] = p
            passed[o] = 0
            if runs[o] > 1:  # the state of a random generator, from the first to the last computation
                held += g.replay[o]
        first[o] = p
        passed[o] += 1
        there = held
        for k in range(g.write_start[o], g.write_start[o + 1]):
            v = g.writes[k]
            if live[v]:
                held -= g.size[v]
                live[v] = 0
            else:
                there += g.size[v]
        for k in range(g.read_start[o], g.read_start[o + 1]):
            v = g.reads[k]
            if not live[v]:
                there += g.size[v]
                held += g.size[v]
                live[v] = 1
        profile[p] = there + g.workspace[o]
        if profile[p] > room:
            excess += profile[p] - room
            if excess > most:
                return np.inf
        if runs[o] > 1 and passed[o] == runs[o]:
            held -= g.replay[o]
    for v in range(len(g.size)):
        if live[v]:  # read before it is made
            return np.inf
    for k in range(len(g.before)):
        if first[g.before[k]] > first[g.after[k]]:
            return np.inf
    for k in range(len(g.disturbed)):
        if last[g.disturbed[k]] > first[g.disturbing[k]]:
            return np.inf
    return excess


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
def _shift(g, shares, sequence, length, trial, random):
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
    trial[:length] = sequence[:length]
    for k in range(source, target, step):
        trial[k] = trial[k + step]
    trial[target] = o
    return True


@kernel
def _remove(sequence, length, runs, several, trial, random):
    """Copy the sequence without one computation of an op that has several, drawn from the places ``several``.

    Returns:
        The op.
    """
    p = several[random_below(random, len(several))]
    trial[:p] = sequence[:p]
    trial[p : length - 1] = sequence[p + 1 : length]
    return sequence[p]


@kernel
def _tight_place(shares, profile, length, room, excess, random):
    """A place at which to free memory: one over the room if there is any, else one that is nearly full."""
    least = room if excess > 0 else shares.tight * room
    p = random_below(random, length)
    for _ in range(_TRIES):
        if profile[p] > least:
            break
        p = random_below(random, length)
    return p


@kernel
def _next_read(g, sequence, length, p, random):
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
def _add(g, shares, sequence, length, p, value, at, trial, touched, remade, work, random):
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
            if depth + count >= _LONGEST_CHAIN:
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
    trial[:at] = sequence[:at]
    trial[at : at + count] = work[2, :count]
    trial[at + count : length + count] = sequence[at:length]
    return count


@kernel
def _anneal(g, settings, shares, sequence, length, best, random, time_up):
    """Anneal a sequence in place, and fill ``best`` with the cheapest one seen within the room.

    Returns:
        Length of the best, 0 if there is none, and length of the last.
    """
    ops, values, places = len(g.cost), len(g.size), len(sequence)
    live, touched, remade = np.zeros(values, np.uint8), np.zeros(values, np.int64), np.zeros(values, np.uint8)
    first, last, passed = np.zeros(ops, np.int64), np.zeros(ops, np.int64), np.zeros(ops, np.int64)
    runs, trial_runs = np.zeros(ops, np.int64), np.zeros(ops, np.int64)
    profile, trial_profile = np.zeros(places), np.zeros(places)
    trial, several = np.zeros(places, np.int64), np.zeros(places, np.int64)
    work = np.zeros((3, _LONGEST_CHAIN + 1), np.int64)
    cost = 0.0
    for p in range(length):
        runs[sequence[p]] += 1
        cost += g.cost[sequence[p]]
    excess = _excess(g, sequence, length, runs, settings.room, np.inf, live, first, last, passed, profile)
    best_cost, best_length = np.inf, 0
    if excess <= 0:
        best_cost, best_length = cost, length
        best[:length] = sequence[:length]
    repeats = -1  # places in ``several``; -1 where they have to be looked up again
    for move in range(settings.moves):
        if time_up[0] != 0:
            break
        done = move / settings.moves
        temperature = settings.hot * (settings.cold / settings.hot) ** done
        price = settings.low_price * (settings.high_price / settings.low_price) ** done
        if repeats < 0:
            repeats = 0
            for p in range(length):
                if runs[sequence[p]] > 1:
                    several[repeats] = p
                    repeats += 1
        kind = next_random(random)
        trial_runs[:] = runs
        trial_length, trial_cost = length, cost
        if kind < shares.shifts:
            if not _shift(g, shares, sequence, length, trial, random):
                continue
        else:
            if kind < shares.shifts + shares.removals:
                if repeats == 0:
                    continue
                trial_runs[_remove(sequence, length, runs, several[:repeats], trial, random)] -= 1
                trial_length -= 1
            else:
                p = _tight_place(shares, profile, length, settings.room, excess, random)
                v, at = _next_read(g, sequence, length, p, random)
                if v < 0:
                    continue
                count = _add(g, shares, sequence, length, p, v, at, trial, touched, remade, work, random)
                if count == 0:
                    continue
                for k in range(count):
                    trial_runs[work[2, k]] += 1
                trial_length += count
            trial_length = _without_unread(g, trial, trial_length, trial_runs, live)
            trial_cost = 0.0
            for p in range(trial_length):
                trial_cost += g.cost[trial[p]]
        # What the excess may be for the move to be made: drawn first, so that the pass can end early.
        most = excess + (cost - trial_cost - temperature * np.log(max(next_random(random), 1e-300))) / price
        if most < 0:
            continue
        trial_excess = _excess(g, trial, trial_length, trial_runs, settings.room, most, live, first, last, passed, trial_profile)
        if trial_excess > most:
            continue
        repeats = -1
        cost, excess, length = trial_cost, trial_excess, trial_length
        sequence[:length] = trial[:length]
        profile[:length] = trial_profile[:length]
        runs[:] = trial_runs
        if excess <= 0 and cost < best_cost:
            best_cost, best_length = cost, length
            best[:length] = sequence[:length]
    return best_length, length
