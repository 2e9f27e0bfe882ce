"""A local search for the plan of the lowest peak.

A greedy repair of the plan that holds everything ends some per cent above the lowest peak, for two reasons. First, no op is
computed twice within a stage, and only first computations have stages, recomputations on the way to them have none. Here every
computation of a plan has a stage, and each plan gives the next step finer stages. Second, kept values, like gradients of
parameters, are held during all later computations. Computed at the end instead, they take a second backward pass, which needs
the memory of the first again, but with fewer gradients held. Which ones to compute at the end depends on the graph.

Many stages of these plans have the same peak, and no step lowers all of them. A step is therefore judged by the bytes above a
level below the peak, summed over all computations. The level is lowered when it is reached, and raised when it is not; finally
the search begins again. Steps are those of ruin and recreate (Schrimpf et al. 2000), and two that move computations: of some
kept values to the end, or of a recomputed value, with the recomputations that it needs, to an earlier place.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from checkmate.core.plan import Compute, Plan
from checkmate.core.problem import Problem
from checkmate.core.simulate import simulate
from checkmate.solvers.clocks import Flag
from checkmate.solvers.evict.search import Ruin, Search
from checkmate.solvers.evict.starts import movable_to_end
from checkmate.solvers.flat_graph import flatten
from checkmate.solvers.reductions.unread import without_unread


class Descent:
    """Steps from a plan to plans of lower peaks, on a problem whose views are folded and whose budget is ignored.

    Walks begin from each of some plans in turn, given as ops in the order of their computations. A plan that holds everything may
    lead further than a plan of a low peak, whose evictions fit only that peak. `order` and `peak_bytes`, resident bytes
    included, describe the plan of the lowest peak so far.
    """

    def __init__(
        self, problem: Problem, orders: Sequence[Sequence[int]], floor_bytes: int, seed: int, time_up: Flag | None = None
    ) -> None:
        self._problem, self._floor, self._time_up = problem, floor_bytes, time_up
        self._given, self._random = flatten(problem), random.Random(seed)
        self._movable = movable_to_end(problem.graph) if problem.reorder else frozenset()
        first = [without_unread(problem, order) for order in orders]
        self._first = itertools.cycle([(order, self._profile(order)) for order in first])
        self.order, self.peak_bytes = self._begin()

    def step(self) -> bool:
        """Make one step; returns whether the peak is lower than before."""
        before, choice = self.peak_bytes, self._random.choice
        order, cleared = self._changed()
        seed = self._random.getrandbits(32)
        search = Search(self._problem, frozenset(), seed, order, self._time_up, given=self._given)
        search.set_budget(self._level)
        exponent, noise, batch = choice((0.0, 0.0, 0.3, 0.6, 1.0, 1.5)), choice((0.05, 0.2, 0.4)), choice((0.0, 0.3, 1.0))
        excess, found = search.relieve(search.code_of(order), exponent, noise, batch, cleared)
        self._failed += 1
        # A plan of the same excess is accepted too: a walk on the plateau.
        if excess <= self._excess:
            self._current = without_unread(self._problem, found)
        if excess < self._excess:
            self._note()
        elif self._failed > 30:
            self._aim /= 2
            if self._aim < 0.2:
                self._begin()
            else:
                self._lower()
        return self.peak_bytes < before

    def _begin(self) -> tuple[list[int], int]:
        """Begin from the next of the given plans; returns it and its peak."""
        # Distance of the level below the peak, as a share of the peak's distance from the floor. It is halved when the level is
        # not reached, and doubled, up to this start, when it is.
        self._aim = 0.5
        self._lowest, self._lowest_profile = next(self._first)
        self._lower()
        return self._lowest, self._lowest_bytes

    @property
    def _lowest_bytes(self) -> int:
        return int(self._lowest_profile.max())

    def _lower(self) -> None:
        """Continue from the lowest plan of this walk, with a level below its peak."""
        lowest = self._lowest_bytes
        self._level = lowest - max(1, int(self._aim * (lowest - self._floor)))
        self._current, self._failed = self._lowest, 0
        self._excess = self._above(self._lowest_profile)

    def _note(self) -> None:
        """Note that the current plan is better than the one before."""
        profile = self._profile(self._current)
        self._excess, self._failed = self._above(profile), 0
        peak = int(profile.max())
        if peak < self._lowest_bytes:
            self._lowest, self._lowest_profile = self._current, profile
        if peak < self.peak_bytes:
            self.order, self.peak_bytes = self._current, peak
        if not self._excess:
            self._aim = min(0.5, 2 * self._aim)
            self._lower()

    def _changed(self) -> tuple[list[int], Ruin | None]:
        """A new order of stages, and how much of its code to clear."""
        draw, choice = self._random.random, self._random.choice
        if self._movable and draw() < 0.4:
            return self._with_some_at_end(), None
        if draw() < 0.6:
            return self._with_one_earlier(), None
        if draw() < 0.3:
            return self._current, None
        return self._current, Ruin(choice((1, 3, 12, 1_000_000)), choice((0.01, 0.05, 0.2)), choice((0.5, 0.25)))

    def _with_some_at_end(self) -> list[int]:
        """The plan with some neighbouring kept values computed only at the end."""
        draw = self._random
        last = {o: place for place, o in enumerate(self._current) if o in self._movable}
        ops = sorted(last, key=lambda o: last[o])
        start, many = draw.randrange(len(ops)), draw.randint(1, max(1, len(ops) // 2))
        chosen = ops[start : start + many]
        if draw.random() < 0.3:
            chosen = [o for o in chosen if draw.random() < 0.5] or chosen[:1]
        left = frozenset(chosen)
        # Recomputations for these alone lose their stages.
        return [*without_unread(self._problem, [o for o in self._current if o not in left]), *chosen]

    def _with_one_earlier(self) -> list[int]:
        """The plan with one recomputation, made above the level or soon after, moved earlier with those that it alone needs."""
        order, draw = self._current, self._random
        first = {o: place for place, o in reversed(list(enumerate(order)))}
        again = [place for place, o in enumerate(order) if first[o] < place]
        readers = self._readers(order)
        above = np.flatnonzero(self._profile(order) > self._level)
        if not again or not len(above):
            return order
        low = bisect_left(again, int(draw.choice(above)))
        last = draw.choice(again[low : low + 30] or again)
        moved = {last}
        for place in reversed(again[: bisect_left(again, last)]):
            if moved.issuperset(readers[place]):
                moved.add(place)
        distance = 1 + int(draw.random() * draw.choice((0.02, 0.1, 0.3)) * len(order))
        to = max(min(moved) - distance, 1 + max(first[order[place]] for place in moved))
        rest = [o for place, o in enumerate(order) if place >= to and place not in moved]
        return [*order[:to], *(order[place] for place in sorted(moved)), *rest]

    def _readers(self, order: Sequence[int]) -> list[set[int]]:
        """Places that read the outputs of each computation; the end counts as a place."""
        graph = self._problem.graph
        made: dict[int, int] = {}
        readers: list[set[int]] = [set() for _ in order]
        for place, o in enumerate(order):
            for v in graph.ops[o].inputs:
                readers[made[v]].add(place)
            made.update(dict.fromkeys(graph.ops[o].outputs, place))
        for v, value in enumerate(graph.values):
            if value.kept:
                readers[made[v]].add(len(order))
        return readers

    def _profile(self, order: Sequence[int]) -> npt.NDArray[np.int64]:
        """Bytes at each computation, resident bytes included."""
        plan = Plan.from_order(self._problem.graph, order)
        computed = [isinstance(step, Compute) for step in plan.steps]
        return simulate(self._problem.graph, plan).bytes[computed]

    def _above(self, profile: npt.NDArray[np.int64]) -> int:
        return int(np.maximum(profile - self._level, 0).sum())
