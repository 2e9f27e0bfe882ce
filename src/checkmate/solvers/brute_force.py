"""A search of every schedule of a tiny graph: the oracle of the tests."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.session import Session


class _State(NamedTuple):
    computed: int  # ops computed so far, as bits
    storage: tuple[int, ...]  # storage instance that each value's newest instance shares, or -1; numbered by first use
    replaying: int  # ops whose replay state is held, as bits


@dataclass(frozen=True, slots=True)
class BruteForce:
    """Exact for any order and any number of recomputations, by Dijkstra's algorithm over sets of computed ops and live values.

    It knows every rule of a graph, views and random states included, and shares no code with other solvers.

    Attributes:
        max_ops: Larger graphs are refused.
    """

    max_ops: int = 7

    def run(self, problem: Problem, session: Session) -> Termination:
        """Search every schedule."""
        graph = problem.graph
        if len(graph.ops) > self.max_ops:
            return Termination(Reason.NOT_FOUND, detail=f"{len(graph.ops)} ops, and brute force stops at {self.max_ops}")
        found = _Exhaustive(problem).search(session)
        if found is None:
            if session.left_s() <= 0:
                return Termination(Reason.NOT_FOUND, limit="time")
            session.prove(float("inf"))
            return Termination(Reason.INFEASIBLE, detail="every schedule was tried")
        cost, order = found
        session.offer(order)
        session.prove(float(cost))
        return Termination(Reason.OPTIMAL)


class _Exhaustive:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = graph = problem.graph
        self.budget = problem.budget_bytes - graph.resident_bytes
        self.before: list[int] = [0] * len(graph.ops)
        for a, b in graph.order:
            self.before[b] |= 1 << a
        if not problem.reorder:
            own = [o for o in range(len(graph.ops)) if o not in graph.view_ops]
            for a, b in pairwise(own):
                self.before[b] |= 1 << a
        self.clobbers: list[int] = [sum(1 << c for c in set(op.clobbered_by)) for op in graph.ops]
        self.once = [
            not op.recomputable or (problem.recompute == "forward" and op.phase != "forward" and o not in graph.view_ops)
            for o, op in enumerate(graph.ops)
        ]
        self.everything = (1 << len(graph.ops)) - 1

    def search(self, session: Session) -> tuple[int, list[int]] | None:
        start = _State(0, (-1,) * len(self.graph.values), 0)
        best = {start: 0}
        came: dict[_State, tuple[_State, int]] = {}
        queue: list[tuple[int, int, _State]] = [(0, 0, start)]
        ticket = 0
        while queue:
            cost, popped, state = heapq.heappop(queue)
            if cost > best[state]:
                continue
            if state.computed == self.everything and all(
                state.storage[v] >= 0 for v, value in enumerate(self.graph.values) if value.kept
            ):
                return cost, self._path(came, state)
            if popped % 4096 == 4095 and session.left_s() <= 0:
                return None
            for op, following in self._moves(state):
                reached = cost + (0 if op < 0 else self.graph.ops[op].cost)
                if reached < best.get(following, reached + 1):
                    best[following] = reached
                    came[following] = (state, op)
                    ticket += 1
                    heapq.heappush(queue, (reached, ticket, following))
        return None

    def _path(self, came: dict[_State, tuple[_State, int]], state: _State) -> list[int]:
        order: list[int] = []
        while state in came:
            state, op = came[state]
            if op >= 0:
                order.append(op)
        return order[::-1]

    def _moves(self, state: _State) -> Iterator[tuple[int, _State]]:
        for v, instance in enumerate(state.storage):
            if instance >= 0:
                yield -1, state._replace(storage=_renumbered((*state.storage[:v], -1, *state.storage[v + 1 :])))
        for o, op in enumerate(self.graph.ops):
            bit = 1 << o
            if any(state.storage[v] < 0 for v in op.inputs) or self.clobbers[o] & state.computed:
                continue
            if state.computed & bit:
                if self.once[o] or (op.replay_bytes and not state.replaying & bit):
                    continue
                holds = (0, 1) if op.replay_bytes else (0,)  # whether to keep the replay state for another computation
            else:
                if self.before[o] & ~state.computed:
                    continue
                holds = (0, 1) if op.replay_bytes and not self.once[o] else (0,)
            storage, during = self._computed(state, o)
            for hold in holds:
                active = state.replaying | (bit if hold else 0)
                replay = sum(p.replay_bytes for i, p in enumerate(self.graph.ops) if active >> i & 1)
                if during + replay + op.workspace_bytes <= self.budget:
                    after = active if hold else active & ~bit
                    yield o, _State(state.computed | bit, storage, after)

    def _computed(self, state: _State, o: int) -> tuple[tuple[int, ...], int]:
        """Storages after an op, and the bytes live while it runs, without workspace."""
        graph = self.graph
        storage = list(state.storage)
        fresh = max((*storage, -1)) + 1
        sizes: dict[int, int] = {}
        for v, instance in enumerate(storage):
            if instance >= 0:
                sizes[instance] = graph.values[graph.root[v]].size_bytes
        for v in graph.ops[o].outputs:
            if graph.values[v].base is None:
                storage[v] = fresh
                sizes[fresh] = graph.values[v].size_bytes
                fresh += 1
        for v in graph.ops[o].outputs:
            if graph.values[v].base is not None:
                storage[v] = storage[graph.storage_from[v]]
        return _renumbered(tuple(storage)), sum(sizes.values())


def _renumbered(storage: tuple[int, ...]) -> tuple[int, ...]:
    names: dict[int, int] = {}
    return tuple(-1 if s < 0 else names.setdefault(s, len(names)) for s in storage)
