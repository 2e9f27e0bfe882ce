"""The exact optimum, or a bound, by best-first search over sets of live values.

Rematerialisation is a pebble game (Sethi 1975): a state is the set of pebbled values, a move computes one op. A plain search
would also have a move for every value that could be dropped, at every step. Three rules make the search small enough:

- values are dropped only when an op needs their room, and then a minimal set of them: holding more costs nothing;
- a state that cannot lead to a plan cheaper than the best one is not stored;
- the estimate of the remaining cost is the cost of the ops that would have to run if memory did not matter.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from checkmate.core.errors import OptionError
from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews, may_run_again
from checkmate.solvers.session import Session


@dataclass(frozen=True, slots=True)
class AStar:
    """Exact for any order and any number of recomputations, if few states can be reached.

    A* (Hart, Nilsson and Raphael, 1968) over sets of live values. A move computes one op, after
    dropping one of the minimal sets of values that make room for it; the estimate is the cost of the ops
    that must still run. States that cannot beat the best plan are never stored. It solves small graphs, and
    long chains with room for few values; when the time or ``max_states`` ends the search, the least cost
    of the states not yet expanded is a proven bound.

    Attributes:
        max_states: Most states to store, of about 400 bytes.
    """

    max_states: int = 1 << 20

    def __post_init__(self) -> None:
        if self.max_states < 1:
            raise OptionError(f"max_states={self.max_states!r} must be one or more")

    def run(self, problem: Problem, session: Session) -> Termination:
        """Expand states in the order of the least cost of a plan through them.

        A graph with more than 128 bits of state, views tied to a place or replay bytes is refused.
        """
        fold = FoldViews.of(problem.graph, priced=problem.reorder)
        exploration = Exploration(fold, fold.apply(problem), session, self.max_states)
        exploration.run(lambda: session.left_s() <= 0)
        reason = Reason.NOT_FOUND if session.cost is None else Reason.FEASIBLE
        return exploration.ended or Termination(reason, limit="time")


class _Move(NamedTuple):
    """An op as sets of bits. Bit v means that value v is live; further bits mean that ops were computed."""

    op: int
    reads: int  # values it reads
    makes: int  # values it makes, and its own bit if it has one
    only_after: int  # ops whose first computation precedes its own
    never_after: int  # ops after which it cannot be computed: those that overwrite its inputs, itself if it may run only once
    during: int  # bytes of its outputs and workspace
    cost: int


class _Reached(NamedTuple):
    """A state: the least cost at which it was reached, an estimate of the remaining cost, and the last move to it."""

    cost: int
    left: int
    parent: int
    op: int


class Exploration:
    """An A* search on the folded problem of a session that can be interrupted and continued.

    It stores at most `max_states` states, and none that costs as much as the best plan. `ended` is the reason why the search
    cannot be continued, or None.
    """

    def __init__(self, fold: FoldViews, folded: Problem, session: Session, max_states: int) -> None:
        self._fold, self._session, self._max_states = fold, session, max_states
        self._offset = fold.cost_offset
        graph = folded.graph
        values, ops = len(graph.values), len(graph.ops)
        once = [not may_run_again(folded, o) for o in range(ops)]
        before = [*graph.order, *(() if folded.reorder else pairwise(range(ops)))]
        sinks = [o for o, op in enumerate(graph.ops) if not any(graph.readers[v] or graph.values[v].kept for v in op.outputs)]
        # The live values do not show whether an op was computed, and only in these cases does it matter. A bit for each op would
        # distinguish states with the same future, and there would be exponentially more of them. An op whose outputs are
        # neither read nor kept still has a bit, because every plan computes every op.
        tracked = {o for o in range(ops) if once[o]} | {a for a, _ in before} | {c for op in graph.ops for c in op.clobbered_by}
        bit = {o: values + k for k, o in enumerate(sorted(tracked | set(sinks)))}
        self.ended: Termination | None = None
        if any(value.base is not None for value in graph.values) or any(op.replay_bytes for op in graph.ops):
            why = "the graph has views with a fixed place or ops with replay bytes, which the search over states does not model"
            self.ended = Termination(Reason.NOT_FOUND, detail=why)
            return
        if values + len(bit) > 128:  # the number of states grows exponentially
            self.ended = Termination(Reason.NOT_FOUND, detail=f"{values + len(bit)} bits of state are over 128")
            return
        own = [[bit[o]] if o in bit else [] for o in range(ops)]
        self._moves = [
            _Move(
                op=o,
                reads=_bits(op.inputs),
                makes=_bits((*op.outputs, *own[o])),
                only_after=_bits(bit[a] for a, b in before if b == o),
                never_after=_bits([*(bit[c] for c in op.clobbered_by), *(own[o] if once[o] else ())]),
                during=op.workspace_bytes + sum(graph.values[v].size_bytes for v in op.outputs),
                cost=op.cost,
            )
            for o, op in enumerate(graph.ops)
        ]
        self._goal = _bits([*(v for v, value in enumerate(graph.values) if value.kept), *(bit[o] for o in sinks)])
        # Values by size, descending. Empty values need no room and are never dropped.
        self._sizes = sorted(((x.size_bytes, 1 << v) for v, x in enumerate(graph.values) if x.size_bytes), reverse=True)
        self._room = folded.budget_bytes - graph.resident_bytes
        self._reached: dict[int, _Reached] = {}
        # Least cost of a plan through a state, the part still to come, and the state.
        self._queue: list[tuple[int, int, int]] = []
        self._expanded, self._least = 0, 0
        self._full = False
        self._limit: float = math.inf
        self._reach(0, 0, -1, -1)

    def run(self, out_of_time: Callable[[], bool]) -> None:
        """Expand states until the search ends, the session is done, or it is out of time."""
        session = self._session
        while self.ended is None and not out_of_time():
            # A plan may have been found elsewhere since the last run: states at or above its cost are no longer wanted.
            if session.cost is not None:
                self._limit = min(self._limit, session.cost - self._offset)
            goal = self._expand(100, out_of_time)
            # The estimate is consistent: states are expanded in the order of the least cost of a plan through them, and the
            # others cost no less than the last expanded one. States that were never stored cost the limit or more.
            session.prove(self._offset + float(min(self._least, self._limit)))
            if goal is not None:
                session.offer(self._fold.invert(self._order(goal)))
                self._end(Reason.OPTIMAL)
            elif self._full:
                self._end(Reason.NOT_FOUND if session.cost is None else Reason.FEASIBLE)
            elif not self._queue:
                # Every state below the limit was expanded, and none was the goal: the best plan is optimal.
                session.prove(math.inf if session.cost is None else self._limit + self._offset)
                self._end(Reason.INFEASIBLE if session.cost is None else Reason.OPTIMAL)
            if session.done:
                break

    def _expand(self, most: int, out_of_time: Callable[[], bool]) -> int | None:
        """Expand some states in the order of their least cost; returns the goal's state once it is reached."""
        for _ in range(most):
            if not self._queue or self._full or out_of_time():  # a state can take a tenth of a second
                break
            key, _, state = heapq.heappop(self._queue)
            reached = self._reached[state]
            if key != reached.cost + reached.left:
                continue  # reached at a lower cost after this entry was queued; there is another entry
            # The estimate is consistent, so keys never fall from one expansion to the next: a key is a bound on every plan.
            self._least = key
            if not self._goal & ~state:
                return state
            self._expanded += 1
            live = [(size, bit) for size, bit in self._sizes if state & bit]
            held = sum(size for size, _ in live)
            for move in self._moves:
                # An op can run if its inputs are live and the rules about its place hold. If all its outputs are live, computing
                # it would add cost and change nothing.
                if (move.reads | move.only_after) & ~state or move.never_after & state or not move.makes & ~state:
                    continue
                if self._full:
                    return None
                droppable = [(size, bit) for size, bit in live if not move.reads & bit]
                for rest in self._with_room(state, droppable, held + move.during - self._room):
                    self._reach(rest | move.makes, reached.cost + move.cost, state, move.op)
        return None

    def _with_room(self, state: int, droppable: list[tuple[int, int]], excess: int) -> Iterator[int]:
        """The state after dropping each minimal set of values that frees an excess.

        A set is minimal if none of its values could stay. Other sets need no try: values that stay can be dropped later, so every
        move that is possible with fewer live values is possible with more, at the same cost. Depth first over subsets, the
        largest values first: a set that frees enough is minimal if it frees too little without the value added last.
        """
        if excess <= 0:
            yield state
            return
        rest = [*accumulate((size for size, _ in reversed(droppable)), initial=0)][::-1]  # bytes of the values from a place on
        stack = [(0, excess, state)]
        for _ in range(1 << 14):
            while stack and rest[stack[-1][0]] < stack[-1][1]:  # all values left would free too little
                stack.pop()
            if not stack:
                return
            k, needed, left = stack.pop()
            size, bit = droppable[k]
            stack.append((k + 1, needed, left))
            if size >= needed:
                yield left & ~bit
            else:
                stack.append((k + 1, needed - size, left & ~bit))
        # With many small values there are exponentially many minimal sets. A state with too many ends the search, as a full
        # store does: leaving some out would make the bound wrong.
        self._full = True

    def _reach(self, state: int, cost: int, parent: int, op: int) -> None:
        """Store and queue a state if it is new or was reached at a lower cost, and can lead to a plan below the limit."""
        known = self._reached.get(state)
        if known is not None and known.cost <= cost:
            return
        left = self._least_left(state) if known is None else known.left
        if cost + left >= self._limit:  # most states of a graph are too expensive, and memory limits this search
            return
        if known is None and len(self._reached) >= self._max_states:
            self._full = True
            return
        self._reached[state] = _Reached(cost, left, parent, op)
        heapq.heappush(self._queue, (cost + left, left, state))

    def _least_left(self, state: int) -> int:
        """Cost of the ops that would still have to run if memory did not matter.

        A move costs its op, and lowers the estimate by at most this cost. The estimate is therefore consistent: a state has its
        least cost when it is expanded, and is expanded once.
        """
        need, total = self._goal & ~state, 0
        for move in reversed(self._moves):  # ops are in topological order
            if move.makes & need:
                total += move.cost
                need |= move.reads & ~state
        return total

    def _end(self, reason: Reason) -> None:
        full = ", and the store is full" if self._full else ""
        self.ended = Termination(reason, detail=f"{self._expanded} of {len(self._reached)} states expanded{full}")

    def _order(self, state: int) -> list[int]:
        """Ops along the cheapest path to a state. The frees between them follow from the order."""
        order: list[int] = []
        while self._reached[state].op >= 0:
            order.append(self._reached[state].op)
            state = self._reached[state].parent
        return order[::-1]


def _bits(places: Iterable[int]) -> int:
    """A set of places as the bits of a number."""
    return sum(1 << place for place in {*places})
