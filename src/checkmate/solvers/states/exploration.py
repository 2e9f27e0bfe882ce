"""A best-first search over states, as an object that can go on where it stopped."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews
from checkmate.solvers.session import Session
from checkmate.solvers.states.facts import Facts, facts_of
from checkmate.solvers.states.kernel import EXPANDED, FOUND, FULL, GOAL, LEAST, QUEUED, begin, expand

_CHUNK = 2000
"""States to expand between two looks at the clock."""


class Exploration:
    """A search under way, which can go on where it stopped.

    Attributes:
        bound: Proven: no plan is cheaper.
        ended: Why it will not go on, or None while it can.
    """

    def __init__(self, fold: FoldViews, facts: Facts, session: Session, max_states: int) -> None:
        self._fold = fold
        self._facts = facts
        self._session = session
        self._offset = fold.cost_offset
        self._limit = np.iinfo(np.int64).max if session.cost is None else session.cost - self._offset
        self._store = _store(max_states)
        self._counters = np.zeros(8, dtype=np.int64)
        self._chosen = np.zeros(3 * len(facts.size) + 2, dtype=np.int64)
        self._begun = False
        self.bound = 0.0
        self.ended: Termination | None = None

    def run(self, out_of_time: Callable[[], bool]) -> None:
        """Expand states until the search ends, the session is done, or it is out of time."""
        counters, session = self._counters, self._session
        if session.cost is not None:
            self._limit = min(self._limit, session.cost - self._offset)
        if not self._begun:
            begin(self._facts, self._store, counters, self._limit)
            self._begun = True
        while self.ended is None and not out_of_time():
            expand(self._facts, self._store, counters, self._limit, _CHUNK, self._chosen)
            self.bound = self._offset + float(min(counters[LEAST], self._limit))
            session.prove(self.bound)
            if counters[GOAL] >= 0:
                session.offer(self._fold.invert(self._order(int(counters[GOAL]))))
                self._end(Reason.OPTIMAL)
            elif counters[FULL]:
                self._end(Reason.NOT_FOUND if session.cost is None else Reason.FEASIBLE)
            elif not counters[QUEUED]:
                session.prove(math.inf if session.cost is None else self._limit + self._offset)
                self._end(Reason.INFEASIBLE if session.cost is None else Reason.OPTIMAL)
            if session.done:
                break

    def _end(self, reason: Reason) -> None:
        counters = self._counters
        full = ", and the store is full" if counters[FULL] else ""
        self.ended = Termination(reason, detail=f"{counters[EXPANDED]} of {counters[FOUND]} states expanded{full}")

    def _order(self, state: int) -> list[int]:
        order: list[int] = []
        while self._store.op[state] >= 0:
            order.append(int(self._store.op[state]))
            state = int(self._store.parent[state])
        return order[::-1]


@cache
def load_kernels() -> None:
    """Compile the kernels of the search, which takes seconds once, or load them."""
    problem = Problem(Graph.from_dag(cost=[1, 1], size_bytes=[1, 1], edges=[(0, 1)]), 2)
    facts = facts_of(problem)
    assert not isinstance(facts, str)
    Exploration(FoldViews.of(problem.graph), facts, Session(problem, Limits()), 16).run(lambda: False)


class _Store(NamedTuple):
    states: Any
    cost: Any
    left: Any
    parent: Any
    op: Any
    table: Any
    queue_key: Any
    queue_left: Any
    queue_state: Any


def _store(max_states: int) -> _Store:
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
