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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.problem import Problem
from checkmate.solvers.alarm import Flag, no_alarm
from checkmate.solvers.backends.kernels import kernel
from checkmate.solvers.evict.decode import copy_range, next_random, random_below, seed_random
from checkmate.solvers.evict.instance import Flags, Floats, Ints, build_instance
from checkmate.solvers.evict.sequences.moves import (
    LONGEST_CHAIN,
    Moves,
    Rules,
    add,
    leave_out_unread,
    next_read,
    remove,
    shift,
    tight_place,
)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ResequenceParameters:
    """Parameters of `Resequencing`.

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
        instance = build_instance(problem)
        # A view that folding left keeps the instance that it was made from, which the kernels do not know: the op of that one is
        # not computed again.
        evictable = instance.evictable.copy()
        viewed = {graph.producer[graph.root[v]] for v, x in enumerate(graph.values) if x.base is not None}
        evictable[[v for o in viewed for v in graph.ops[o].outputs]] = 0
        after = np.array(graph.order, dtype=np.int64).reshape(-1, 2)
        overwritten = instance.overwritten
        self._rules = Rules(
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
        room = max(length, p.stretch * self._end) + LONGEST_CHAIN
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
        work = _Work.of(self._rules, room)
        best_length, last_length = _anneal(self._rules, work, settings, p.shares, sequence, length, best, random, self._time_up)
        return Resequenced(best[: max(0, best_length - 1)].tolist(), sequence[: last_length - 1].tolist())

    @staticmethod
    def _drawn(choices: Sequence[float], random: npt.NDArray[np.uint64]) -> float:
        return choices[random_below(random, len(choices))]


class _Settings(NamedTuple):
    """A `Schedule` in costs, costs a byte, and moves. All fields are of these very types."""

    room: float
    moves: int
    hot: float
    cold: float
    low_price: float
    high_price: float


class _Work(NamedTuple):
    """Working arrays of the kernels.

    Attributes:
        live: Whether a value is held. Shape ``[value]``.
        touched: Last place that touches each value. Shape ``[value]``.
        remade: Whether a value is computed again. Shape ``[value]``.
        first: First place of each op. Shape ``[op]``.
        last: Its last place. Shape ``[op]``.
        passed: How many computations of each op a pass has come by. Shape ``[op]``.
        runs: Computations of each op in the sequence. Shape ``[op]``.
        trial_runs: The same in the trial. Shape ``[op]``.
        profile: Bytes at each place of the sequence. Shape ``[place]``.
        trial_profile: The same of the trial. Shape ``[place]``.
        trial: The sequence after a move. Shape ``[place]``.
        several: Places whose op is computed more than once. Shape ``[place]``.
        chain: Stack, next input, and computations to add. Shape ``[3, place]``.
    """

    live: Flags
    touched: Ints
    remade: Flags
    first: Ints
    last: Ints
    passed: Ints
    runs: Ints
    trial_runs: Ints
    profile: Floats
    trial_profile: Floats
    trial: Ints
    several: Ints
    chain: Ints

    @classmethod
    def of(cls, rules: Rules, places: int) -> _Work:
        ops, values = len(rules.cost), len(rules.size)

        def ints(*shape: int) -> Ints:
            return np.zeros(shape, dtype=np.int64)

        return cls(
            live=np.zeros(values, dtype=np.uint8),
            touched=ints(values),
            remade=np.zeros(values, dtype=np.uint8),
            first=ints(ops),
            last=ints(ops),
            passed=ints(ops),
            runs=ints(ops),
            trial_runs=ints(ops),
            profile=np.zeros(places),
            trial_profile=np.zeros(places),
            trial=ints(places),
            several=ints(places),
            chain=ints(3, LONGEST_CHAIN + 1),
        )


@kernel
def _excess(g, w, sequence, length, runs, room, most, profile):
    """Bytes over the room, summed over all places; infinite if the sequence breaks a rule, or if they are more than ``most``.

    One pass from the end: a value is live before a place if it is read there or, not made there, is live after it.

    Args:
        g: The rules.
        w: Working arrays; ``first`` and ``last`` are filled.
        sequence: The sequence, END last.
        length: Its length.
        runs: Computations of each op.
        room: Bytes at no price.
        most: Ends the pass.
        profile: Filled with the bytes at each place. Shape ``[place]``.
    """
    live, first, last, passed = w.live, w.first, w.last, w.passed
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
def _anneal(g, w, settings, shares, sequence, length, best, random, time_up):
    """Anneal a sequence in place, and fill ``best`` with the cheapest one seen within the room. Working arrays ``w`` begin at 0.

    Returns:
        Length of the best, 0 if there is none, and length of the last.
    """
    runs, trial, trial_runs, several, chain = w.runs, w.trial, w.trial_runs, w.several, w.chain
    cost = 0.0
    for p in range(length):
        runs[sequence[p]] += 1
        cost += g.cost[sequence[p]]
    excess = _excess(g, w, sequence, length, runs, settings.room, np.inf, w.profile)
    best_cost, best_length = np.inf, 0
    if excess <= 0:
        best_cost, best_length = cost, length
        copy_range(sequence, 0, length, best, 0)
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
        copy_range(runs, 0, len(runs), trial_runs, 0)
        trial_length, trial_cost = length, cost
        if kind < shares.shifts:
            if not shift(g, shares, sequence, length, trial, random):
                continue
        else:
            if kind < shares.shifts + shares.removals:
                if repeats == 0:
                    continue
                trial_runs[remove(sequence, length, several[:repeats], trial, random)] -= 1
                trial_length -= 1
            else:
                p = tight_place(shares, w.profile, length, settings.room, excess, random)
                v, at = next_read(g, sequence, length, p, random)
                if v < 0:
                    continue
                count = add(g, shares, sequence, length, p, v, at, trial, w.touched, w.remade, chain, random)
                if count == 0:
                    continue
                for k in range(count):
                    trial_runs[chain[2, k]] += 1
                trial_length += count
            trial_length = leave_out_unread(g, trial, trial_length, trial_runs, w.live)
            trial_cost = 0.0
            for p in range(trial_length):
                trial_cost += g.cost[trial[p]]
        # What the excess may be for the move to be made: drawn first, so that the pass can end early.
        most = excess + (cost - trial_cost - temperature * np.log(max(next_random(random), 1e-300))) / price
        if most < 0:
            continue
        trial_excess = _excess(g, w, trial, trial_length, trial_runs, settings.room, most, w.trial_profile)
        if trial_excess > most:
            continue
        repeats = -1
        cost, excess, length = trial_cost, trial_excess, trial_length
        copy_range(trial, 0, length, sequence, 0)
        copy_range(w.trial_profile, 0, length, w.profile, 0)
        copy_range(trial_runs, 0, len(runs), runs, 0)
        if excess <= 0 and cost < best_cost:
            best_cost, best_length = cost, length
            copy_range(sequence, 0, length, best, 0)
    return best_length, length
