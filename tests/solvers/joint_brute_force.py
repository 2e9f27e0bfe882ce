"""Every step with copies of a tiny graph without views, in any order: the oracle of the joint search and its bound."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from checkmate import Compute, Discard, Fetch, Free, Offload, Plan, Problem


class _State(NamedTuple):
    """A moment between two steps. Times are counted from it, and 0 if they are over."""

    computed: int  # ops computed so far, as bits
    live: tuple[int, ...]  # time until the storage of each value can be freed, or -1
    ready: tuple[int, ...]  # time until each live value can be read
    host: tuple[int, ...]  # time until the copies to and from each copy on the host are done, or -1
    engines: tuple[int, int]  # time until each engine is idle
    fetched: int = 0  # values fetched so far that were on the host before the step, as bits: they take bytes of the host


def least_time(problem: Problem, most_states: int = 200_000) -> tuple[int, Plan] | None:
    """Least time in which a step ends, and a plan that takes it; None if no plan keeps the limits.

    Dijkstra's algorithm over states, on the time at which the compute stream comes to them.

    Raises:
        MemoryError: There are too many states.
    """
    graph, host = problem.graph, problem.host
    assert host is not None
    assert all(v.base is None for v in graph.values)
    assert not any(op.replay_bytes for op in graph.ops)
    size = [v.size_bytes for v in graph.values]
    room = problem.budget_bytes - graph.resident_bytes
    before = [0] * len(graph.ops)
    for a, b in graph.order:
        before[b] |= 1 << a
    clobbers = [sum(1 << c for c in set(op.clobbered_by)) for op in graph.ops]
    given = [v for v, value in enumerate(graph.values) if value.on_host]
    weights = sum(1 << graph.producer[v] for v in given)
    everything = (1 << len(graph.ops)) - 1 & ~weights

    def passed(state: _State, time: int) -> _State:
        def less(times: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(max(0, t - time) if t >= 0 else -1 for t in times)

        out, back = state.engines
        return _State(
            state.computed, less(state.live), less(state.ready), less(state.host), (max(0, out - time), max(0, back - time)),
            state.fetched,
        )  # fmt: skip

    def bits(v: int) -> int:
        return 1 << graph.producer[v]

    def put(times: tuple[int, ...], v: int, time: int) -> tuple[int, ...]:
        return (*times[:v], time, *times[v + 1 :])

    def moves(state: _State) -> Iterator[tuple[int, object, _State]]:
        held = sum(size[v] for v, t in enumerate(state.live) if t >= 0)
        on_host = sum(size[v] for v, t in enumerate(state.host) if t >= 0 and (v not in given or state.fetched >> v & 1))
        for v, t in enumerate(state.live):
            if t >= 0:
                later = passed(state, t)
                yield t, Free(v), later._replace(live=put(later.live, v, -1), ready=put(later.ready, v, -1))
                if state.host[v] < 0 and on_host + size[v] <= host.bytes:
                    done = state.engines[0] + host.out_ns(size[v])
                    yield 0, Offload(v), state._replace(
                        host=put(state.host, v, done), live=put(state.live, v, max(t, done)), engines=(done, state.engines[1])
                    )  # fmt: skip
            elif state.host[v] >= 0 and held + size[v] <= room:
                first = v in given and not state.fetched >> v & 1
                if first and on_host + size[v] > host.bytes:
                    continue
                done = max(state.engines[1], state.host[v]) + host.in_ns(size[v])
                yield 0, Fetch(v), state._replace(
                    host=put(state.host, v, done), live=put(state.live, v, done), ready=put(state.ready, v, done),
                    engines=(state.engines[0], done), fetched=state.fetched | int(first) << v,
                )  # fmt: skip
            if state.host[v] >= 0 and v not in given:
                later = passed(state, state.host[v])
                yield state.host[v], Discard(v), later._replace(host=put(later.host, v, -1))
        for o, op in enumerate(graph.ops):
            bit = 1 << o
            if any(state.live[v] < 0 for v in op.inputs) or clobbers[o] & state.computed:
                continue
            if state.computed & bit:
                if not op.recomputable or (problem.recompute == "forward" and op.phase != "forward"):
                    continue
            elif before[o] & ~state.computed & ~weights:
                continue
            if bit & weights and (state.fetched or state.computed & ~sum(bits(v) for v in given if state.live[v] >= 0)):
                continue  # the others were fetched, freed or read: this one was not there when the step began
            if held + sum(size[v] for v in op.outputs) + op.workspace_bytes > room:
                continue
            time = max([0, *(state.ready[v] for v in op.inputs)]) + op.cost
            later = passed(state, time)
            replaced = max([0, *(later.live[v] for v in op.outputs)])
            time, later = time + replaced, passed(later, replaced)
            live, ready = later.live, later.ready
            for v in op.outputs:
                live, ready = put(live, v, 0), put(ready, v, 0)
            yield time, Compute(o), later._replace(computed=state.computed | bit, live=live, ready=ready)

    nothing = (-1,) * len(graph.values)
    host_copies = tuple(0 if v in given else -1 for v in range(len(graph.values)))
    start = _State(0, nothing, nothing, host_copies, (0, 0))
    best: dict[_State | None, int] = {start: 0}
    came: dict[_State | None, tuple[_State, object]] = {}
    queue: list[tuple[int, int, _State | None]] = [(0, 0, start)]
    ticket = 0
    while queue:
        time, _, state = heapq.heappop(queue)
        if time > best[state]:
            continue
        if state is None:
            steps: list[object] = []
            while state in came:
                state, step = came[state]
                steps.append(step)
            return time, Plan(tuple(reversed(steps[1:])), graph.digest, host)  # type: ignore[arg-type]
        following = list(moves(state))
        kept = (v for v, value in enumerate(graph.values) if value.kept and (v not in given or state.computed & bits(v)))
        if state.computed & everything == everything and all(state.live[v] >= 0 for v in kept):
            following.append((max(state.engines), None, None))  # type: ignore[arg-type]
        for took, step, later in following:
            reached = time + took
            if reached < best.get(later, reached + 1):
                if len(best) > most_states:
                    raise MemoryError("too many states")
                best[later] = reached
                came[later] = (state, step)
                ticket += 1
                heapq.heappush(queue, (reached, ticket, later))
    return None
