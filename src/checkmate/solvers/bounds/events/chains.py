"""Chains of events: which events bind together, and what they prove.

Between two events a plan computes again at least what the minimum cut of that segment says (`min_cut.segment`), and segments
that follow each other share no computation. So for a chain of events the bounds of its segments add up, and the best chain
among some candidates is a longest path. It takes half a second on 350 ops, and its events are those of which a linear program
with all their segments (`event_cuts`) proves most: that one knows in addition that what is live at an event has been live or
computed before. Where memory is tight everywhere, as in ResNet-50 at f = 0.03, one event proves 0.063, the best chain 0.093,
and the programs of its events and a few more 0.107 to 0.123.
"""

# scipy.signal ships no types.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from scipy.signal import find_peaks

from checkmate.solvers.alarm import Flag
from checkmate.solvers.backends.program import Floats
from checkmate.solvers.bounds.events.cut_model import CutModel
from checkmate.solvers.bounds.events.event_cuts import build_cuts
from checkmate.solvers.bounds.events.min_cut import segment, single_event
from checkmate.solvers.bounds.events.refine import longest_chain
from checkmate.solvers.bounds.events.relaxation import relax


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainParameters:
    """Parameters of `EventChains`.

    Attributes:
        tried: Ops that are bounded alone, evenly spread: a cut takes a millisecond on 700 ops.
        candidates: Candidates, of these the ones that prove most and more than their neighbours, on a longest chain or beside it.
        added: Events to add to the program in a round.
        linear_share: Share of the time left that a linear program may take.
        least_gain: Share of the distance to the best plan that more events have to gain, or no more are added.
        least_price: Share of the prices of all events up to which one does not bind and is left out of the next program.
        first_price: The same for integer programs: the first one has no event of a smaller share.
        far: Share of the distance from what is known to the best plan by which a program may fall short of what is known for more
            events to be added.
        enough: Share of what the largest program proves for which fewer events are enough to begin an integer program with.
    """

    tried: int = 800
    candidates: int = 48
    added: int = 3
    linear_share: float = 0.7
    least_gain: float = 0.02
    least_price: float = 0.001
    first_price: float = 0.03
    far: float = 0.1
    enough: float = 0.99


PARAMETERS = ChainParameters()


class Chain(NamedTuple):
    """Events of a chain by how much they are needed.

    Attributes:
        first: Those to begin an integer program with, in the order of the chain.
        peaks: Events that prove more alone than their neighbours, any of which a solution may violate.
        prices: What the bound gains for each share of the budget that an event has less, of those that were tried.
    """

    first: list[int]
    peaks: Sequence[int] = ()
    prices: Mapping[int, float] = MappingProxyType({})


class EventChains:
    """Chains among the candidates of a model.

    Attributes:
        candidates: The candidates, in the order of the graph.
    """

    def __init__(self, model: CutModel, time_up: Flag, out_of_time: Callable[[], bool] = lambda: False) -> None:
        self._model = model
        self._time_up = time_up
        step = max(1, -(-model.end // PARAMETERS.tried))
        chain = longest_chain(model)
        others = sorted(set(range(model.end)).difference(chain))
        self._alone: dict[int, float] = {}
        self._prominence: dict[int, float] = {}
        # Where ops float much, the events that prove most are seldom on one longest chain: 0.009 in place of 0.006 on a layered
        # graph of 500 ops, 0.164 in place of 0.154 on a captured ResNet-50 at 40 % of its memory. Elsewhere those beside the
        # chain only take the place of others that prove more together.
        for ops in (chain[::step], others[::step]):
            alone = np.array([0.0, *(0.0 if out_of_time() else single_event(model, o, time_up) for o in ops), 0.0])
            if alone.max() <= max(self._alone.values(), default=-1.0):
                break
            peaks, prominences = _peaks(alone)
            self._alone |= {ops[k - 1]: float(alone[k]) for k in peaks}
            self._prominence |= {ops[k - 1]: p for k, p in zip(peaks, prominences, strict=True)}
        best = sorted(self._alone, key=lambda o: (-self._alone[o], o))[: PARAMETERS.candidates]
        self.candidates = sorted(best)

    def longest(self, out_of_time: Callable[[], bool]) -> tuple[float, list[int]]:
        """The chain whose segments prove most in all.

        Returns:
            The bound, as a share of computing every op once, and the events.
        """
        # From the last event back: what the segments from there on prove.
        best: dict[int, tuple[float, int | None]] = {}
        for a in reversed(self.candidates):
            if out_of_time():
                break
            after = [b for b in best if self._model.comparable(a, b)]
            ends = [(self._between(a, self._model.end), None), *((self._between(a, b) + best[b][0], b) for b in after)]
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
        """Prove by the linear programs of a chain and of more and more events.

        Returns:
            The events of the program that proved most, by the prices of their memory in its relaxation: as many of the dearest as
            prove nearly as much, and the candidates.
        """
        most, prices = 0.0, dict.fromkeys(events, 0.0)
        chain, tried = list(events), set(events)
        took_s = 0.0  # a program of more events takes longer than the one before
        while chain and PARAMETERS.linear_share * left_s() > took_s:
            before, begin = most, time.monotonic()
            cut = build_cuts(self._model, chain, segments="all")
            solved = relax(cut, time_s=PARAMETERS.linear_share * left_s(), enough=best_share())
            took_s = time.monotonic() - begin
            if solved.row_prices is not None and solved.bound > most:
                most, prices = solved.bound, dict(zip(chain, cut.memory_prices(solved.row_prices), strict=True))
            prove(solved.bound)
            far, distance = (x if math.isfinite(x) else 0.0 for x in (best_share() - known(), best_share() - before))
            weak = most < known() - PARAMETERS.far * far or most - before < PARAMETERS.least_gain * distance
            if not solved.finished or weak or most >= best_share():
                break
            # An event that does not bind makes the program larger for nothing.
            needed = [o for o in prices if prices[o] > PARAMETERS.least_price * sum(prices.values())]
            added = self._next(needed, tried) if needed else []
            tried.update(added)
            chain = self._in_order({*needed, *added}) if added else []
        return self._fewest(prices, most, left_s) if most > 0 else Chain(list(events), self.candidates)

    def _fewest(self, prices: dict[int, float], most: float, left_s: Callable[[], float]) -> Chain:
        """As many of the dearest events as prove nearly as much as all.

        Args:
            prices: Event -> what the bound gains for each share of the budget that the event has less.
            most: Bound of all of them.
            left_s: Seconds left.
        """
        total = sum(prices.values())
        ranked = sorted((o for o in prices if prices[o] > 0), key=lambda o: (-prices[o], o))
        few, dear = 1, sum(prices[o] > PARAMETERS.first_price * total for o in ranked)
        while few < dear and left_s() > 0:
            cut = build_cuts(self._model, self._in_order(ranked[:few]), segments="all")
            if relax(cut, time_s=left_s(), enough=most).bound >= PARAMETERS.enough * most:
                break
            few += 1
        return Chain(self._in_order(ranked[:few]), self.candidates, prices)

    def _in_order(self, events: Iterable[int]) -> list[int]:
        return sorted(events, key=self.candidates.index)

    def _between(self, event: int, until: int) -> float:
        return segment(self._model, event, until, self._time_up)

    def _next(self, chain: list[int], tried: set[int]) -> list[int]:
        """The most prominent candidates that were not tried.

        In a training step those before the chain's first mirror later ones and are left out.
        """
        added: list[int] = []
        trained = any(op.phase == "backward" for op in self._model.problem.graph.ops)
        among = self.candidates[self.candidates.index(chain[0]) :] if trained else self.candidates
        for o in sorted(set(among).difference(tried), key=lambda o: (-self._prominence[o], o)):
            if len(added) < PARAMETERS.added and all(self._model.comparable(o, c) for c in (*chain, *added)):
                added.append(o)
        return added


def _peaks(heights: Floats) -> tuple[list[int], list[float]]:
    """Places that are higher than their neighbours, and how far each stands out from the dips on both sides of it."""
    places, properties = find_peaks(heights, prominence=0.0)
    return [int(k) for k in places], [float(p) for p in properties["prominences"]]
