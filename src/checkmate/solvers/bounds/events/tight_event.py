"""Branch and bound on what is live at the tightest event.

At the event where memory is scarcest, such as the loss of a language model whose logits fill most of the budget, few of the
larger values can be live. The linear programs of `event_cuts` keep a part of each, as if every layer were half there: the
bound is then that of computing each layer again once, though a plan that holds one value at the event computes the layers
before it again for its gradient, and has as little room for what it has computed again as for the rest.

So the bound is taken for each choice by itself. Let L be the values of at least some size that may be live at the event, in the
order of their producers, and let at most n of them fit there at once. A *branch* is a list of intervals of L: the plans in
which exactly so many values of L are live at the event, one from each interval. The branches of 0 to n intervals that are
all of L hold all plans. One with an interval of several values is the union of two, each with one half of that interval.
In a branch the S of all other values of L are 0 at the event, and

- an op of before the event whose value is outside of the intervals is surely computed again before an op after the event that
  reads it, and so on along the DAG. Where such an op cannot run again, or where the values of the intervals and the replay
  states of such ops exceed the room, the branch holds no plan;
- the linear program of the event and a few others bounds its plans. Which others: one for each time at which more is
  computed again, since the memory at that time limits how much of it can be kept.

The least bound over branches that hold all plans is a bound on all of them. The weakest branch is divided first (Land and
Doig 1960; by intervals as in the special ordered sets of Beale and Tomlin 1970). ``docs/explanation/event_cuts.md`` has
the proof.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from checkmate.solvers.alarm import Flag, no_alarm
from checkmate.solvers.backends.program import Floats, Ints
from checkmate.solvers.bounds.events.cut_model import CutModel, Mask
from checkmate.solvers.bounds.events.event_cuts import CutProgram, NoColumn, build_cuts
from checkmate.solvers.bounds.events.min_cut import single_event
from checkmate.solvers.bounds.events.refine import longest_chain


@dataclass(frozen=True, slots=True, kw_only=True)
class TightEventParameters:
    """Parameters of `TightEvent`.

    Attributes:
        most_live: Most of the larger values that may be live at once: their least size is chosen so. The number of branches
            grows with its power.
        parts: Parts of the chain after the event, each with one candidate for further events.
        tried: Ops of a part, those with the largest own needs, of which the one that proves most alone is the candidate.
        wide_share: Share of the values from which an interval is divided without a program, which would prove little there and
            takes longest.
        most_events: Most events of a program beside the tight one. Those of three events take 0.05 s on 700 ops.
        linear_time_s: Seconds for a linear program.
        least_gain: Share of the distance from the bound to the best plan that the branch with nothing live has to gain at least:
            no branch gains more, so that below it the rest is not tried.
    """

    most_live: int = 2
    parts: int = 48
    tried: int = 4
    wide_share: float = 0.125
    most_events: int = 4
    linear_time_s: float = 5.0
    least_gain: float = 0.1


PARAMETERS = TightEventParameters()


@dataclass(frozen=True, slots=True, order=True)
class Branch:
    """Plans in which given values are live at the tight event.

    Attributes:
        bound: Extra cost of every such plan, as a share of computing every op once.
        intervals: First and last place, the last not included, in `TightEvent.values`; one value of each is live.
        events: Further events of its program.
    """

    bound: float
    intervals: tuple[tuple[int, int], ...]
    events: tuple[int, ...] = field(compare=False)

    @property
    def widest(self) -> int | None:
        """Place of the widest interval, None if none has several values."""
        wide = [(stop - start, -k) for k, (start, stop) in enumerate(self.intervals) if stop - start > 1]
        return -max(wide)[1] if wide else None


class TightEvent:
    """The branches of one event.

    Args:
        model: The problem's model.
        event: The event.
        time_up: Ends a minimum cut when it is raised; by default nothing does.
        out_of_time: Called between cuts. Parts for which no time is left have no candidate.

    Attributes:
        values: The larger values that may be live at the event, by producer.
        most: Most of them that are live at once.
    """

    def __init__(
        self,
        model: CutModel,
        event: int,
        time_up: Flag | None = None,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._event = event
        self._time_up = no_alarm() if time_up is None else time_up
        self._programs: dict[tuple[int, ...], CutProgram] = {}
        self._above = model.sides(event)[0]
        program = self._program(())
        live = program.live[0]
        own = model.workspace[event] + int(model.size[model.outputs[event]].sum())
        own += int(model.size[live == NoColumn.ALWAYS_LIVE].sum())
        self._room = model.problem.budget_bytes - model.problem.graph.resident_bytes - own
        free = np.flatnonzero(live >= 0)
        large = free[model.size[free] * (PARAMETERS.most_live + 1) > self._room]
        fits = model.size[large] <= self._room
        self._too_large = large[~fits]
        fitting = large[fits]
        self.values: Ints = fitting[np.argsort(model.producer[fitting], kind="stable")]
        least = int(model.size[self.values].min()) if len(self.values) else 0
        self.most = self._room // least if least else 0
        self._single: dict[int, float] = {}
        self._later = self._candidates(out_of_time) if self._tight else []
        self._due = self._first_runs()
        self._branches: list[Branch] = []
        self._more: list[int] = []
        self._proven = -math.inf

    @property
    def divides(self) -> bool:
        """Whether there is anything to branch on: large values that do not all fit."""
        return self._tight and bool(self._later)

    @property
    def _tight(self) -> bool:
        return self._room >= 0 and self.most < len(self.values) + len(self._too_large)

    def bound(
        self,
        prove: Callable[[float], None],
        best_share: Callable[[], float],
        left_s: Callable[[], float],
        more: Sequence[int] = (),
    ) -> list[Branch]:
        """Divide the weakest branch until its bound meets the best plan, it cannot be improved, or time is up.

        Args:
            prove: Takes every bound, as a share, that is better than those before it.
            best_share: Extra cost of the best plan so far, as a share.
            left_s: Seconds left.
            more: Events to add to a branch that can be divided no further, the best first.

        Returns:
            Branches that hold all plans, the weakest first.
        """
        self._more = [o for o in more if self._model.sides(self._event)[1][o] and o != self._model.end]
        known = single_event(self._model, self._event, self._time_up)
        branches: list[Branch] = []
        for count in range(self.most + 1):
            branch = self._evaluated(known, ((0, len(self.values)),) * count, (), left_s)
            if count == 0 and branch.bound < known + PARAMETERS.least_gain * (best_share() - known):
                return []
            heapq.heappush(branches, branch)
        self._branches, self._proven = branches, known
        self.resume(prove, best_share, left_s)
        return sorted(self._branches)

    def resume(self, prove: Callable[[float], None], best_share: Callable[[], float], left_s: Callable[[], float]) -> None:
        """Go on with `bound`, with its arguments, if it ended as its time was up."""
        while self._branches:
            if self._branches[0].bound > self._proven:
                self._proven = self._branches[0].bound
                prove(self._proven)
            if left_s() <= 0 or self._proven >= best_share():
                break
            parts = self._divided(self._branches[0], self._more, left_s)
            # Parts without time for their programs prove no more than the branch, and could not be told from weak ones later.
            if not parts or left_s() <= 0:
                break
            heapq.heappop(self._branches)
            for part in parts:
                heapq.heappush(self._branches, part)

    def solution(self, branch: Branch) -> tuple[CutProgram, Floats]:
        """The program of the event alone, and its point at which just the values of a branch's intervals are live."""
        cut = self._program(())
        point = np.zeros(len(cut.program.cost))
        for start, stop in branch.intervals:
            point[cut.live[0, self.values[start:stop]]] = 1.0
        return cut, point

    def _divided(self, branch: Branch, more: Sequence[int], left_s: Callable[[], float]) -> list[Branch]:
        """Branches that hold the plans of one; itself with one more event if its intervals are single values."""
        k = branch.widest
        if k is None:
            events = [o for o in more if o not in branch.events and all(self._model.comparable(o, e) for e in branch.events)]
            if not events:
                return []
            return [self._evaluated(branch.bound, branch.intervals, tuple(sorted((*branch.events, events[0]))), left_s)]
        start, stop = branch.intervals[k]
        middle = (start + stop) // 2
        rest = (*branch.intervals[:k], *branch.intervals[k + 1 :])
        halves = {tuple(sorted((*rest, half))) for half in ((start, middle), (middle, stop))}
        return [self._evaluated(branch.bound, intervals, (), left_s) for intervals in sorted(halves)]

    def _evaluated(
        self, least: float, intervals: tuple[tuple[int, int], ...], events: tuple[int, ...], left_s: Callable[[], float]
    ) -> Branch:
        """A branch with its bound.

        Args:
            least: A bound that is known.
            intervals: Its intervals.
            events: Further events of its program; chosen here if there are none.
            left_s: Seconds left.
        """
        from checkmate.solvers.backends.highs import solve_linear

        m = self._model
        dead = np.zeros(len(m.size), dtype=np.bool_)
        dead[self._too_large] = dead[self.values] = True
        for start, stop in intervals:
            dead[self.values[start:stop]] = False
        due = self._reruns(dead)
        again = due <= len(self._later)
        held = sum(int(m.size[self.values[start:stop]].min()) for start, stop in intervals)
        if (again & ~m.again).any() or held + int(m.replay[again].sum()) > self._room:
            return Branch(math.inf, intervals, events)
        if any(stop - start > PARAMETERS.wide_share * len(self.values) for start, stop in intervals):
            return Branch(least, intervals, events)
        events = events or self._events(due)
        cut = self._program(events)
        columns = cut.live[0]
        high = cut.program.high.copy()
        high[columns[(columns >= 0) & dead]] = 0.0
        solved = solve_linear(replace(cut.program, high=high), time_s=min(PARAMETERS.linear_time_s, left_s()))
        return Branch(max(least, solved.bound), intervals, events)

    def _program(self, events: tuple[int, ...]) -> CutProgram:
        if events not in self._programs:
            self._programs[events] = build_cuts(self._model, [self._event, *events], segments="first")
        return self._programs[events]

    def _candidates(self, out_of_time: Callable[[], bool]) -> list[int]:
        """Ops of the longest chain that come after the event: of each part of it the one that proves most alone."""
        m = self._model
        below = m.sides(self._event)[1]
        chain = [o for o in longest_chain(m) if below[o]]
        size = max(1, -(-len(chain) // PARAMETERS.parts))

        def own(o: int) -> int:
            return m.workspace[o] + int(m.size[list({*m.inputs[o], *m.outputs[o]})].sum())

        later: list[int] = []
        for k in range(0, len(chain), size):
            if out_of_time():
                break
            tried = sorted(chain[k : k + size], key=lambda o: (-own(o), o))[: PARAMETERS.tried]
            self._single.update({o: single_event(m, o, self._time_up) for o in tried})
            later.append(max(tried, key=self._single.__getitem__))
        return later

    def _first_runs(self) -> Ints:
        """Before which candidate each op that comes after the event is surely computed, END included.

        Returns:
            The first candidate that the op is or precedes; their number where there is none, and one more for ops that do not
            surely come after the event. Shape ``[op + 1]``.
        """
        m, count = self._model, len(self._later)
        due = np.full(m.end + 1, count + 1, dtype=np.int64)
        below = m.sides(self._event)[1]
        due[below] = count
        due[m.end] = count
        for j in range(count - 1, -1, -1):
            due[m.sides(self._later[j])[0] & below] = j
            due[self._later[j]] = j
        return due

    def _reruns(self, dead: Mask) -> Ints:
        """As `_first_runs` for ops of before the event, which are surely computed again by then, given what is not live at it."""
        m = self._model
        due = self._due.copy()
        none = len(self._later) + 1
        for o in range(m.end, -1, -1):
            if due[o] < none:
                for v in m.inputs[o]:
                    p = m.producer[v]
                    if dead[v] and self._above[p] and due[o] < due[p]:
                        due[p] = due[o]
        due[~self._above] = none
        return due

    def _events(self, due: Ints) -> tuple[int, ...]:
        """One event for each time at which more is computed again: of the candidates up to the next the one that proves most."""
        times = [*np.unique(due[due < len(self._later)]).tolist(), len(self._later)]
        best = [max(self._later[a:b], key=self._single.__getitem__) for a, b in pairwise(times)]
        return tuple(sorted(sorted(best, key=lambda o: -self._single[o])[: PARAMETERS.most_events]))
