"""Chains of events: the events that bind together, and the bounds that they prove.

The minimum cut of a segment (`min_cut.segment`) bounds the recomputation between two events, and consecutive segments share no
computation. Therefore the bounds of a chain's segments add up, and the best chain among some candidates is a longest path.
Finding it takes half a second on 350 ops. A linear program with all segments (`event_cuts`) proves most from the events of this
chain: the program also knows that a value that is live at an event has been live or computed before. If memory is tight
everywhere, as in ResNet-50 at f = 0.03, one event proves 0.063, the best chain 0.093, and the programs of its events and a few
more 0.107 to 0.123.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from checkmate.solvers.backends.program import Floats
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import build_cuts
from checkmate.solvers.bounds.events.min_cut import segment, single_event
from checkmate.solvers.bounds.events.refine import Chain, longest_chain
from checkmate.solvers.bounds.events.relaxation import relax
from checkmate.solvers.clocks import Flag


def peaks(heights: Floats) -> dict[int, float]:
    """The prominence of each local maximum, a plateau's by its middle: its height above the dips towards higher ones.

    It is `scipy.signal.find_peaks`, whose import takes a second.
    """
    starts = np.flatnonzero(np.append(True, heights[1:] != heights[:-1]))
    levels, found = heights[starts], dict[int, float]()
    for j in range(1, len(levels) - 1):
        if levels[j - 1] < levels[j] > levels[j + 1]:
            before, after = np.flatnonzero(levels[:j] > levels[j]), np.flatnonzero(levels[j:] > levels[j])
            dips = levels[(before[-1] if len(before) else 0) : j].min(), levels[j : j + after[0] if len(after) else None].min()
            found[int(starts[j] + starts[j + 1] - 1) // 2] = float(levels[j] - max(dips))
    return found


class EventChains:
    """Chains among the candidates of a model: events with the best bounds, better than their neighbours'."""

    def __init__(self, model: CutModel, time_up: Flag, out_of_time: Callable[[], bool] = lambda: False) -> None:
        self._model = model
        self._time_up = time_up
        step = max(1, -(-model.end // 800))  # a cut takes a millisecond on 700 ops
        chain = longest_chain(model)
        others = sorted(set(range(model.end)).difference(chain))
        self._alone: dict[int, float] = {}
        self._prominence: dict[int, float] = {}
        # If many ops float, the events that prove most are seldom on one longest chain: 0.009 instead of 0.006 on a layered
        # graph of 500 ops, 0.164 instead of 0.154 on a captured ResNet-50 at 40 % of its memory. Otherwise events off the
        # chain only displace others that prove more together.
        for ops in (chain[::step], others[::step]):
            alone = np.array([0.0, *(0.0 if out_of_time() else single_event(model, o, time_up) for o in ops), 0.0])
            if alone.max() <= max(self._alone.values(), default=-1.0):
                break
            for k, prominence in peaks(alone).items():
                self._alone[ops[k - 1]], self._prominence[ops[k - 1]] = float(alone[k]), prominence
        best = sorted(self._alone, key=lambda o: (-self._alone[o], o))[:48]
        self.candidates = sorted(best)  # in the order of the graph

    def longest(self, out_of_time: Callable[[], bool]) -> tuple[float, list[int]]:
        """The best sum of segment bounds of a chain, as a share of computing every op once, and the events of this chain."""
        # From the last event back: the bound that the segments from there on prove.
        best: dict[int, tuple[float, int | None]] = {}
        for a in reversed(self.candidates):
            if out_of_time():
                break
            after = [b for b in best if self._model.comparable(a, b)]
            ends = [(self._alone[a], None), *((segment(self._model, a, b, self._time_up) + best[b][0], b) for b in after)]
            best[a] = max(ends, key=lambda end: end[0])
        event = max(best, key=lambda o: best[o][0], default=None)
        bound = max([best[event][0] if event is not None else 0.0, *self._alone.values()])
        events: list[int] = []
        while event is not None:
            events.append(event)
            event = best[event][1]
        return bound, events

    def sharpen(
        self,
        events: Sequence[int],
        prove: Callable[[float], None],
        best_share: Callable[[], float],
        left_s: Callable[[], float],
        known: Callable[[], float] = lambda: -math.inf,
    ) -> Chain:
        """Prove bounds by the linear programs of a chain with more and more events.

        Returns events of the program that proved most, ranked by the prices of their memory in its relaxation: as many of the
        most expensive as prove nearly as much.
        """
        most, prices = 0.0, dict.fromkeys(events, 0.0)
        chain, tried = list(events), set(events)
        took_s = 0.0  # a program with more events takes longer than the one before
        while chain and 0.7 * left_s() > took_s:
            before, begin = most, time.monotonic()
            cut = build_cuts(self._model, chain, all_segments=True)
            solved = relax(cut, time_s=0.7 * left_s(), enough=best_share())
            took_s = time.monotonic() - begin
            if solved.row_prices is not None and solved.bound > most:
                most, prices = solved.bound, dict(zip(chain, cut.memory_prices(solved.row_prices), strict=True))
            prove(solved.bound)
            far, distance = (x if math.isfinite(x) else 0.0 for x in (best_share() - known(), best_share() - before))
            # More events do not help so far below the known bound, or if they gain so little of the distance to the best plan.
            weak = most < known() - 0.1 * far or most - before < 0.02 * distance
            if not solved.finished or weak or most >= best_share():
                break
            # An event that does not bind makes the program larger for nothing.
            needed = [o for o in prices if prices[o] > 0.001 * sum(prices.values())]
            added = self._next(needed, tried) if needed else []
            tried.update(added)
            chain = sorted({*needed, *added}) if added else []
        return self._fewest(prices, most, left_s) if most > 0 else Chain(list(events), self.candidates)

    def _fewest(self, prices: dict[int, float], most: float, left_s: Callable[[], float]) -> Chain:
        """As many of the most expensive events as prove nearly ``most``, the bound of all events."""
        total = sum(prices.values())
        ranked = sorted((o for o in prices if prices[o] > 0), key=lambda o: (-prices[o], o))
        few, dear = 1, sum(prices[o] > 0.03 * total for o in ranked)
        while few < dear and left_s() > 0:
            cut = build_cuts(self._model, sorted(ranked[:few]), all_segments=True)
            if relax(cut, time_s=left_s(), enough=most).bound >= 0.99 * most:
                break
            few += 1
        return Chain(sorted(ranked[:few]), self.candidates, prices)

    def _next(self, chain: list[int], tried: set[int]) -> list[int]:
        """The most prominent candidates that were not tried.

        In a training step, events before the chain's first event mirror later ones and are left out.
        """
        added: list[int] = []
        trained = any(op.phase == "backward" for op in self._model.problem.graph.ops)
        among = self.candidates[self.candidates.index(chain[0]) :] if trained else self.candidates
        for o in sorted(set(among).difference(tried), key=lambda o: (-self._prominence[o], o)):
            if len(added) < 3 and all(self._model.comparable(o, c) for c in (*chain, *added)):
                added.append(o)
        return added
