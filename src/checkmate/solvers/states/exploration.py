"""A best-first search over states, as an object that can be interrupted and continued."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from checkmate.core.result import Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session
from checkmate.solvers.states.kernel import EXPANDED, FOUND, FULL, GOAL, LEAST, LIMIT, QUEUED, begin, expand
from checkmate.solvers.states.packed_problem import PackedProblem


class Exploration:
    """An A* search that is interrupted and continued, on the folded problem of a session.

    It stores at most `max_states` states, of about 100 bytes each, and none that costs as much as the best plan. `ended` is the
    reason why the search cannot be continued, or None.
    """

    def __init__(self, fold: FoldViews, packed: PackedProblem, session: Session, max_states: int) -> None:
        self._fold = fold
        self._packed = packed
        self._session = session
        self._offset = fold.cost_offset
        self._limit = np.iinfo(np.int64).max if session.cost is None else session.cost - self._offset
        self._store = _store(max_states)
        self._counters = np.zeros(8, dtype=np.int64)
        self._chosen = np.zeros(3 * len(packed.size) + 2, dtype=np.int64)
        self._begun = False
        self.ended: Termination | None = None

    def run(self, out_of_time: Callable[[], bool]) -> None:
        """Expand states until the search ends, the session is done, or it is out of time."""
        counters, session = self._counters, self._session
        # A plan may have been found elsewhere since the last run: states at or above its cost are no longer wanted.
        if session.cost is not None:
            self._limit = min(self._limit, session.cost - self._offset)
        if not self._begun:
            begin(self._packed, self._store, counters, self._limit)
            self._begun = True
        counters[LIMIT] = self._limit
        while self.ended is None and not out_of_time():
            # This number of states takes some milliseconds.
            expand(self._packed, self._store, counters, 2000, self._chosen)
            # The estimate is consistent: states are expanded in the order of the least cost of a plan through them, and the
            # others cost no less than the last expanded one. States that were never stored cost the limit or more.
            session.prove(self._offset + float(min(counters[LEAST], self._limit)))
            if counters[GOAL] >= 0:
                session.offer(self._fold.invert(self._order(int(counters[GOAL]))))
                self._end(Reason.OPTIMAL)
            elif counters[FULL]:
                self._end(Reason.NOT_FOUND if session.cost is None else Reason.FEASIBLE)
            elif not counters[QUEUED]:
                # Every state below the limit was expanded, and none was the goal: the best plan is optimal.
                session.prove(math.inf if session.cost is None else self._limit + self._offset)
                self._end(Reason.INFEASIBLE if session.cost is None else Reason.OPTIMAL)
            if session.done:
                break

    def _end(self, reason: Reason) -> None:
        counters = self._counters
        full = ", and the store is full" if counters[FULL] else ""
        self.ended = Termination(reason, detail=f"{counters[EXPANDED]} of {counters[FOUND]} states expanded{full}")

    def _order(self, state: int) -> list[int]:
        """Ops along the cheapest path to a state. The frees between them follow from the order."""
        order: list[int] = []
        while self._store.op[state] >= 0:
            order.append(int(self._store.op[state]))
            state = int(self._store.parent[state])
        return order[::-1]


class _Store(NamedTuple):
    """The reached states, a hash table to find them, and a binary heap of the states to expand."""

    states: Any  # the two words of each state; shape [state, word]
    cost: Any  # least cost at which it was reached
    left: Any  # estimate of the remaining cost
    parent: Any  # state that it was reached from, or -1
    op: Any  # op computed on the way, or -1
    table: Any  # hash table with open addressing: a state plus one, or 0 if free; its length is a power of two
    queue_key: Any  # heap: least cost of a plan through each entry
    queue_left: Any  # heap: estimate of the remaining cost
    queue_state: Any


def _store(max_states: int) -> _Store:
    # A state that is reached again at a lower cost is queued again; its old entry is skipped later.
    queued = 2 * max_states
    return _Store(
        states=np.empty((max_states, 2), dtype=np.uint64),
        cost=np.empty(max_states, dtype=np.int64),
        left=np.empty(max_states, dtype=np.int64),
        parent=np.empty(max_states, dtype=np.int32),
        op=np.empty(max_states, dtype=np.int16),
        table=np.zeros(1 << (2 * max_states).bit_length(), dtype=np.int32),
        queue_key=np.empty(queued, dtype=np.int64),
        queue_left=np.empty(queued, dtype=np.int64),
        queue_state=np.empty(queued, dtype=np.int32),
    )
