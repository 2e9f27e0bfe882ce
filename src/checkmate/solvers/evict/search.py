"""The local search over eviction codes, as an object that can be continued.

The greedy part evicts by price (`price`). The rest is ruin and recreate (Schrimpf et al. 2000), a large neighbourhood search:
clear the intervals of a few values, repair, accept by a threshold. Neither part proves anything. Every plan is decoded,
measured and later validated from its sequence alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from random import Random
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.problem import Problem
from checkmate.solvers.clocks import Flag
from checkmate.solvers.evict.price import Repair, evict_at_peak, repair
from checkmate.solvers.evict.profile import build_scratch, encode, profile, seeded
from checkmate.solvers.flat_graph import FlatGraph, Ints, Move, flatten, with_stages

_ATTEMPTS: Final = (
    (0.3, 1.0, math.inf),
    (0.0, 1.0, math.inf),
    (0.6, 1.0, math.inf),
    (1.0, 1.0, math.inf),
    (1.5, 1.0, math.inf),
    (0.6, 0.3, 30_000),
    (1.0, 0.3, 30_000),
    (0.6, 0.0, 3000),
    (1.0, 0.0, 3000),
    (0.0, 0.0, 3000),
)
"""Greedy plans, made one after another: duration exponent, batch fraction, and the largest graph on which a plan is fast.

No exponent is best on all graphs. All plans are made, since each takes little time compared with the search. Fast ones come
first: on 10,000 ops they gave a first plan in 0.02 s; evicting one value at a time took 17 s. Batches of 0.3 take a tenth of the
time of single values: 0.05 s on ResNet-152 at f = 0.1, for an overhead of 1.061; evicting all at once gives 1.165.
"""


class Ruin(NamedTuple):
    """How much of a code is cleared."""

    values: int = 12  # most values whose intervals are cleared; a third of the evicted ones on small plans
    window: float = 0.1  # longest window of stages to clear, as a share of all
    # Chance of an interval in the window to survive: without it a repair sees the same prices and makes the same plan.
    keep: float = 0.25


class Search:
    """Greedy plans, and ruin and repair, on one problem whose views are folded.

    `order` has the ops in the order of their stages; the graph's own by default. An op of `on_demand` has no stage, and is
    computed when another needs it. An op that is listed again has another stage: it is computed again there if its later
    readers need a value that is not held. Within a stage no op runs twice, and a value that two ops need is held between them.
    More stages therefore allow more plans: if ops of kept values are listed again at the end, they are computed one after
    another instead of all in the stage of END. In the order, moves are the ops after END.

    `best_cost` is infinite without a plan; `order_bound` is the proven extra cost, as a share, of every plan with these stages.
    """

    def __init__(
        self,
        problem: Problem,
        on_demand: frozenset[int],
        seed: int,
        order: Sequence[int] | None = None,
        time_up: Flag | None = None,
        *,
        moves: Sequence[Move] = (),
        given: FlatGraph | None = None,
    ) -> None:
        self.problem = problem
        self._on_demand = on_demand
        self._time_up = time_up
        self._given = given = flatten(problem) if given is None else given
        listed = np.array(range(len(problem.graph.ops)) if order is None else order, dtype=np.int32)
        self._first_reader = len(problem.graph.ops) + 1 + len(moves)
        stages, self._readers = _list_stages(given, listed, self._first_reader)
        # A stage that only reads a value is coded like a move that does not fetch.
        moved = [*(move.value for move in moves), *(reader.value for reader in self._readers)]
        fetches = np.zeros(len(moved), dtype=np.bool_)
        fetches[: len(moves)] = [move.fetches for move in moves]
        self.flat: Any = with_stages(given, stages, sorted(on_demand), np.array(moved, dtype=np.int32), fetches)
        self.best_cost = math.inf
        self.order_bound = -math.inf
        self._attempts = 0
        self._budget = float(problem.budget_bytes - problem.graph.resident_bytes)
        self._scratch: Any = build_scratch(self.flat, time_up)
        self._best, self._trial = self.empty_code(), self.empty_code()
        self._noise, self._random, self._draws = seeded(seed), Random(seed), np.random.default_rng(seed)

    @cached_property
    def stage(self) -> dict[int, int]:
        """Stage of each op that has one, END included."""
        return {o: t for t, o in enumerate(self.flat.targets.tolist())}

    @property
    def targets(self) -> list[int]:
        """Ops that have a stage, without END, in the order of their first computations."""
        targets = self.flat.targets[:-1]
        return targets[targets < self._first_reader].tolist()

    def empty_code(self) -> Ints:
        """A code that holds everything, with room for 24 intervals of a value."""
        return np.zeros((25, 2, len(self.flat.size)), dtype=np.int32)

    def set_budget(self, budget_bytes: int) -> None:
        """Search for another budget (resident bytes included) from now on, and forget the best plan so far."""
        self._budget = float(budget_bytes - self.problem.graph.resident_bytes)
        self.best_cost = math.inf

    def first(self, tries: int = 40, out_of_time: Callable[[], bool] = lambda: False, *, stop_at_first: bool = False) -> bool:
        """Look for greedy plans from the code that holds everything; as long as there is none, try again with noise.

        A call after the first plan continues where the previous call stopped. Returns whether there is a plan.
        """
        if math.isinf(self.best_cost):
            self._attempts = 0
        attempts = [attempt for attempt in _ATTEMPTS if len(self.problem.graph.ops) <= attempt[2]]
        for k in range(self._attempts, tries):
            if (math.isfinite(self.best_cost) and (stop_at_first or k >= len(attempts))) or out_of_time():
                break
            # Each attempt starts from the code that holds everything, and ends when it costs as much as the best plan.
            exponent, batch, _ = attempts[k % len(attempts)]
            self._trial[:] = 0
            self._attempts = k + 1
            # If near plans fail, look further.
            self._repair(exponent, 0.0 if k < len(attempts) else 0.2 + 0.05 * (k // len(attempts)), batch)
        return math.isfinite(self.best_cost)

    def start_from(self, code: Ints) -> bool:
        """Repair a copy of a code, one value at a time; returns whether it gives a new best plan."""
        self._trial[:] = code
        return self._repair(0.3, 0.0, 0.0)

    def start_from_order(self, order: Sequence[int]) -> bool:
        """`start_from` with the eviction code nearest to the plan of an order."""
        return self.start_from(self.code_of(order))

    def in_order_of(self, order: Sequence[int], seed: int) -> Search:
        """A search that starts from a plan, with the plan's first computations as stages.

        Ops that are listed again have their other stages at the end. Ops on demand get the stage of their first computation in
        the plan, except if ops are listed again: the plan may have computed an op on demand for these, and its stage would
        come before all of theirs.
        """
        again = list(dict.fromkeys(reader.op for reader in self._readers))
        on_demand = self._on_demand if again else frozenset[int]()
        other = Search(self.problem, on_demand, seed, [*dict.fromkeys(order), *again], self._time_up, given=self._given)
        other.start_from_order(order)
        return other

    def improve(self, decodes: int, temperature: float, out_of_time: Callable[[], bool]) -> bool:
        """Ruin and repair from the best plan; returns whether a cheaper one was found.

        The work is counted in decoded sequences, a count that does not depend on the machine: a run can be repeated. An
        iteration may raise the cost by a random share of at most `temperature`, which falls linearly to 0: threshold
        accepting (Dueck and Scheuer 1990) with a random threshold.
        """
        before = self.best_cost
        current, cost, done = self._best.copy(), before, 0
        while done < decodes and 0 < self.best_cost < math.inf and not out_of_time():
            evicted = np.flatnonzero(current[0, 0])
            if not len(evicted):  # the plan computes every op once
                break
            # Clearing intervals gives a plan that costs less and holds more than the current one; the repair starts from it.
            self._trial[:] = current
            self._ruin(self._trial, evicted, Ruin())
            # Each repair has another price: with a fixed one it would return to the plan that was ruined. Half of the repairs
            # are nearly greedy.
            draw = self._random.random
            threshold = self.best_cost * temperature * (1 - done / decodes) * draw()
            settings = Repair(
                self._budget, 0.25 * int(5 * draw()), 0.3 if draw() < 0.5 else 0.05, 0.5 * int(3 * draw()), cost + threshold,
                200 + len(self.flat.size),
            )  # fmt: skip
            found, found_cost, _, decoded = repair(self.flat, self._scratch, self._trial, settings, self._noise)
            done += decoded
            if found:
                current, self._trial, cost = self._trial, current, found_cost
                if cost < self.best_cost:
                    self.best_cost = cost
                    self._best[:] = current
        return self.best_cost < before

    def relieve(
        self, code: Ints, exponent: float, noise: float, batch: float, ruin: Ruin | None = None
    ) -> tuple[float, list[int]]:
        """Evict at the peaks over the budget until only stages exceed it at which nothing can be evicted.

        Returns the least excess on the way (bytes over the budget, summed over all computations) and the ops of its plan. The
        excess is infinite if there is no plan. Works on a copy of the code, some of which is cleared first.
        """
        self._trial[:] = code
        evicted = np.flatnonzero(code[0, 0])
        if ruin is not None and len(evicted):
            self._ruin(self._trial, evicted, ruin)
        settings = self._settings(exponent, noise, batch)
        w, end = self._scratch, len(self.problem.graph.ops)
        stuck = np.zeros(len(self.flat.targets), dtype=np.bool_)
        least, best = math.inf, list[int]()
        for _ in range(settings.rounds + 1):
            length = profile(self.flat, w, self._trial)[0]
            over = w.held[:length] - self._budget
            excess = float(over[(over > 0) & (w.op[:length] < end)].sum())  # END and stages that only read are no computations
            if length and excess < least:
                least, best = excess, self._ops(length)
            over[stuck[w.stage[:length]]] = 0
            at = int(over.argmax()) if length else 0
            if not length or over[at] <= 0 or w.time_up[0]:
                break
            evicted = evict_at_peak(self.flat, w, self._trial, length, at, float(over[at]), settings, self._noise)
            stuck[w.stage[at]] = not evicted
        return least, best

    def order(self) -> list[int]:
        """Ops of the best plan, without END."""
        return self.order_and_peak()[0]

    def order_and_peak(self, code: Ints | None = None) -> tuple[list[int], int]:
        """Ops (without END) and peak (with resident bytes) of the plan of a code, by default the best one.

        There are no ops if an op that may run only once would have to run twice.
        """
        length, _, peak, _ = profile(self.flat, self._scratch, self._best if code is None else code)
        return self._ops(length), int(peak) + self.problem.graph.resident_bytes

    def code_of(self, order: Sequence[int]) -> Ints:
        """The code that drops a value between the last touch of an instance and the computation of the next.

        Exact if the order consists of stages with these targets; else other ops of a stage may be computed at another place in
        the stage, and the repair corrects the bytes.
        """
        code, placed = self.empty_code(), np.array(self._with_readers(list(order)), dtype=np.int32)
        stage = np.full(len(self.flat.cost), -1, dtype=np.int32)
        stage[self.flat.targets] = np.arange(len(self.flat.targets))
        longest = max(len(stage), len(self.flat.size), len(placed))
        encode(self.flat, stage, placed, np.empty((3, longest), dtype=np.int32), code)
        return code

    def _with_readers(self, order: list[int]) -> list[int]:
        """An order with the stages that only read, each after its computation and the stages before it."""
        if not self._readers:
            return order
        places: dict[int, list[int]] = {}
        for place, o in enumerate(order):
            places.setdefault(o, []).append(place)
        placed: list[int] = []
        at, done = -1, 0
        for target in self.flat.targets[:-1].tolist():
            if target < self._first_reader:
                at = max(at, *places.get(target, [-1])[:1])
                continue
            # The plan may compute the op more or less often than it is listed: the last stage takes the last computation.
            reader = self._readers[target - self._first_reader]
            runs = places[reader.op]
            at = max(at, runs[max(0, len(runs) - 1 - reader.later)])
            placed += [*order[done : at + 1], target]
            done = at + 1
        return [*placed, *order[done:]]

    def _ops(self, length: int) -> list[int]:
        """Ops of the decoded sequence, without END and the stages that only read."""
        sequence = self._scratch.op[: max(0, length - 1)]
        return sequence[sequence < self._first_reader].tolist()

    def _ruin(self, code: Ints, evicted: npt.NDArray[np.intp], ruin: Ruin) -> None:
        """Clear some intervals: of values drawn one by one, of neighbours by index, or in a window of stages.

        The first kind mixes unrelated values, the second takes values of one layer, the third replans a part of the step.
        """
        draw, count = self._random.random, len(evicted)
        kind, many = int(3 * draw()), 1 + int(draw() * max(1, min(count // 3, ruin.values)))
        if kind == 0:
            code[0, 0, evicted[[int(count * draw()) for _ in range(many)]]] = 0
        elif kind == 1:
            start = int(count * draw())
            code[0, 0, np.roll(evicted, -start)[:many]] = 0
        else:
            stages = len(self.flat.targets)
            first = int(stages * draw())
            last = first + 1 + int(draw() * max(1, int(stages * ruin.window)))
            most = int(code[0, 0].max())
            begin, end = code[1 : most + 1, 0], code[1 : most + 1, 1]
            unused = np.arange(most)[:, None] >= code[0, 0]
            gone = unused | ((end >= first) & (begin <= last) & (self._draws.random(begin.shape) >= ruin.keep))
            order = np.argsort(gone, axis=0, kind="stable")  # intervals that stay come first
            code[1 : most + 1] = np.take_along_axis(code[1 : most + 1], order[:, None], axis=0)
            code[0, 0] = most - gone.sum(axis=0)

    def _repair(self, exponent: float, noise: float, batch: float) -> bool:
        """Repair the working code; keep it as the best if it is cheaper."""
        settings = self._settings(exponent, noise, batch)
        found, cost, _, _ = repair(self.flat, self._scratch, self._trial, settings, self._noise)
        if found:
            self.best_cost = cost
            self._best[:] = self._trial
        return found

    def _settings(self, exponent: float, noise: float, batch: float) -> Repair:
        """Settings with enough rounds to evict each value a few times; a longer repair is hopeless."""
        return Repair(self._budget, exponent, noise, batch, self.best_cost, 20 * len(self.flat.size))


class _Reader(NamedTuple):
    """A stage that only reads a value of an op that is listed again."""

    op: int
    value: int
    later: int  # how often the op is listed after this stage


def _list_stages(g: FlatGraph, order: Ints, first_reader: int) -> tuple[Ints, list[_Reader]]:
    """Stages of an order in which ops may be listed again; and the reads of the stages that only read, numbered in their order.

    If an op is listed again, a stage that only reads stands for values read from there until the op is listed once more: one
    stage for each kept value at the op's last place, else one for the largest value.
    """
    end = len(g.cost) - 1
    listed = Counter(o for o in order.tolist() if o < end)
    if max(listed.values(), default=1) == 1:
        return order, []
    size, kept = g.size.tolist(), g.kept.astype(np.bool_).tolist()
    read = list(kept)
    reads_from, writes_from = g.reads_from.tolist(), g.writes_from.tolist()
    reads, writes = g.reads.tolist(), g.writes.tolist()
    later: Counter[int] = Counter()
    stages: list[int] = []
    readers: list[_Reader] = []
    for o in reversed(order.tolist()):
        if o >= end or later[o] + 1 == listed[o]:
            stages.append(o)
        else:
            made = [v for v in writes[writes_from[o] : writes_from[o + 1]] if read[v]]
            chosen = [v for v in made if kept[v]] or [max(made, key=lambda v: (size[v], -v))] if made else []
            readers += [_Reader(o, v, later[o]) for v in reversed(chosen)]
            stages += [-1] * len(chosen)
            for v in made:
                read[v] = False
        if o < end:
            later[o] += 1
            for v in reads[reads_from[o] : reads_from[o + 1]]:
                read[v] = True
    numbers = iter(range(first_reader, first_reader + len(readers)))
    return np.array([next(numbers) if o < 0 else o for o in reversed(stages)], dtype=np.int32), readers[::-1]
