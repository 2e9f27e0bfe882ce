"""The memory account of a plan: bytes at every step, peak and cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.errors import PlanError, WrongGraphError
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Discard, Fetch, Free, HostMemory, Offload, Plan


class Copy(NamedTuple):
    """A copy between device and host.

    Attributes:
        direction: ``"out"`` to the host, ``"in"`` from it.
        value: The value whose storage is copied.
        step: Step that issues it.
        issued_ns: Time at which the compute stream issues it, from the beginning of the step.
        begin_ns: Time at which its engine begins it.
        end_ns: Time at which it is done.
    """

    direction: Literal["out", "in"]
    value: int
    step: int
    issued_ns: int
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Bytes and cost of a plan, step by step.

    Attributes:
        graph: The graph.
        plan: The plan.
        bytes: Bytes at every step, resident bytes included: while it runs for a `Compute`, after
            it for any other step. Shape ``[step]``, int64.
        cost: Sum of the costs of all computations, in the graph's ``cost_unit``; with copies, the time at which the step ends,
            waits for copies included.
        host_bytes: Bytes of the copies on the host after every step. A copy that was there before the step counts at every step
            if the plan fetches the value. Shape ``[step]``, int64.
        copies: Copies in the order in which they are issued.
    """

    graph: Graph
    plan: Plan
    bytes: npt.NDArray[np.int64]
    cost: int
    host_bytes: npt.NDArray[np.int64]
    copies: tuple[Copy, ...]

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment, resident bytes included."""
        return int(self.bytes.max()) if len(self.bytes) else self.graph.resident_bytes

    @property
    def host_peak_bytes(self) -> int:
        """The most bytes that copies take on the host at any moment."""
        return int(self.host_bytes.max()) if len(self.host_bytes) else 0

    def copied_bytes(self, direction: Literal["out", "in"]) -> int:
        """Bytes of all copies to the host, or of all from it."""
        return sum(self.graph.values[copy.value].size_bytes for copy in self.copies if copy.direction == direction)

    @property
    def waited(self) -> int:
        """Part of the cost in which the compute stream waits for copies."""
        return self.cost - sum(self.graph.ops[o].cost for o in self.plan.order)

    @property
    def peak_step(self) -> int:
        """First step at which the peak is reached."""
        return int(self.bytes.argmax()) if len(self.bytes) else 0


def simulate(graph: Graph, plan: Plan, host: HostMemory | None = None) -> Timeline:
    """Bytes held at every step of a plan, its peak and its cost.

    A `Compute` makes new instances of all outputs of its op; a read takes the newest instance. A view
    holds the storage instance that it was made from. Storage is freed with the last instance that shares
    it. While an op runs, all earlier live values, its outputs and its workspace are in memory. An
    instance that the op replaces is freed after the op.

    Copies run in parallel to the compute stream, on one engine in each direction, in the order of issue. The compute stream waits
    for a copy only before an op that reads the fetched value, a free of the storage, a discard of the copy on the host, and at
    the end of the step. Therefore the bytes depend on the order of the steps alone, not on times. A value that is on the host
    before the step may be fetched at once, and its copy stays.

    Args:
        graph: The graph.
        plan: Steps in execution order.
        host: Time the copies on this bus instead of the plan's.

    Returns:
        The timeline.

    Raises:
        PlanError: A step reads, frees or copies a value that is not live, or the plan has copies and costs are not
            nanoseconds.
        WrongGraphError: The plan was made for another graph.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 2], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> timeline = simulate(chain, Plan.from_order(chain, [0, 1]))
        >>> timeline.bytes, timeline.cost
        (array([4, 6, 2]), 3)
    """
    if not plan.is_for(graph):
        raise WrongGraphError(
            f"the plan was made for another graph ({plan.graph_digest[:15]}, not {graph.digest[:15]})",
            hint="plan this graph again, or pass the graph that the plan was made for",
        )
    if plan.host is not None and graph.cost_unit != "ns":
        raise PlanError(
            f"the plan has copies, whose times are in nanoseconds, and the costs of the graph are in {graph.cost_unit!r}",
            hint="use a graph with cost_unit='ns', or a plan without copies",
        )
    if excess := plan.excess(graph):
        raise PlanError(excess, hint="make a plan that computes the ops with the most inputs and outputs less often")
    ledger = _Ledger(graph, plan, host)
    count = len(plan.steps)
    held, on_host = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    for p in range(count):
        held[p] = ledger.run(p)
        on_host[p] = ledger.bus.held
    return Timeline(graph, plan, held, ledger.bus.finished(), on_host, tuple(ledger.bus.copies))


class _Bus:
    """Clock of the compute stream, and the copies that run in parallel."""

    def __init__(self, graph: Graph, host: HostMemory | None) -> None:
        self.graph = graph
        self.host = host
        self.now = 0  # time that the compute stream has reached
        self.held = 0  # bytes of the copies on the host
        self.copies: list[Copy] = []
        # End of the copies issued to each engine. Storage instance -> end of its last copy, for which frees wait, and of the copy
        # into it, for which reads wait. Value -> end of the copies to and from its host copy.
        self.engine: dict[str, int] = {"out": 0, "in": 0}
        self.busy: dict[int, int] = {}
        self.arriving: dict[int, int] = {}
        self.host_copy = {v: 0 for v, value in enumerate(graph.values) if value.on_host}

    def wait_to_read(self, instance: int) -> None:
        self.now = max(self.now, self.arriving.pop(instance, 0))

    def wait_to_free(self, instance: int) -> None:
        self.now = max(self.now, self.busy.pop(instance, 0))

    def offload(self, position: int, v: int, instance: int) -> None:
        assert self.host is not None
        size = self.graph.values[v].size_bytes
        self.held += size
        self.host_copy[v] = self._copy("out", v, position, self.now, self.host.out_ns(size))
        self.busy[instance] = self.host_copy[v]

    def fetch(self, position: int, v: int, instance: int) -> None:
        assert self.host is not None
        ready = max(self.now, self.host_copy[v])
        self.host_copy[v] = self._copy("in", v, position, ready, self.host.in_ns(self.graph.values[v].size_bytes))
        self.busy[instance] = self.arriving[instance] = self.host_copy[v]

    def discard(self, v: int) -> None:
        self.now = max(self.now, self.host_copy.pop(v))
        self.held -= self.graph.values[v].size_bytes

    def finished(self) -> int:
        """Time at which the step ends."""
        return max(self.now, *self.engine.values())

    def _copy(self, direction: Literal["out", "in"], v: int, position: int, ready: int, duration: int) -> int:
        begin = max(ready, self.engine[direction])
        self.engine[direction] = begin + duration
        self.copies.append(Copy(direction, v, position, self.now, begin, begin + duration))
        return begin + duration


class _Ledger:
    """Live instances while a plan is replayed."""

    def __init__(self, graph: Graph, plan: Plan, host: HostMemory | None = None) -> None:
        self.graph = graph
        self.steps = plan.steps
        self.bus = _Bus(graph, host or plan.host)
        fetched = {step.value for step in plan.steps if isinstance(step, Fetch)} & set(self.bus.host_copy)
        self.bus.held = sum(graph.values[v].size_bytes for v in fetched)
        self.held = graph.resident_bytes
        self.storage_of: dict[int, int] = {}  # value -> storage instance of its newest instance
        self.size: dict[int, int] = {}  # storage instance -> bytes
        self.users: dict[int, int] = {}  # storage instance -> live instances that share it
        self.last_replay: dict[int, int] = {}
        self.replaying: set[int] = set()
        times: dict[int, int] = {}
        for p, step in enumerate(self.steps):
            if isinstance(step, Compute) and 0 <= step.op < len(graph.ops) and graph.ops[step.op].replay_bytes:
                times[step.op] = times.get(step.op, 0) + 1
                self.last_replay[step.op] = p
        self.last_replay = {o: p for o, p in self.last_replay.items() if times[o] > 1}

    def run(self, position: int) -> int:
        """Replay one step; return the bytes it reports."""
        step = self.steps[position]
        if not isinstance(step, Compute):
            if isinstance(step, Free):
                self._free(position, step.value)
            elif not 0 <= step.value < len(self.graph.values):
                raise PlanError(f"step {position} copies value {step.value} of {len(self.graph.values)}")
            else:
                self._copy(position, step)
            return self.held
        if not 0 <= step.op < len(self.graph.ops):
            raise PlanError(f"step {position} computes op {step.op} of {len(self.graph.ops)}")
        op = self.graph.ops[step.op]
        for v in op.inputs:
            if v not in self.storage_of:
                raise PlanError(
                    f"step {position} computes op {step.op} ({op.name!r}), which reads value {v} "
                    f"({self.graph.values[v].name!r}), and it is not live"
                )
        if step.op in self.last_replay and step.op not in self.replaying:
            self.replaying.add(step.op)
            self.held += op.replay_bytes
        if self.bus.arriving:
            for v in op.inputs:
                self.bus.wait_to_read(self.storage_of[v])
        replaced = [self.storage_of[v] for v in op.outputs if v in self.storage_of]
        self._make(op.outputs)
        self.bus.now += op.cost
        peak = self.held + op.workspace_bytes
        for instance in replaced:
            self._release(instance)
        if self.last_replay.get(step.op) == position:
            self.held -= op.replay_bytes
        return peak

    def _make(self, outputs: tuple[int, ...]) -> None:
        for v in outputs:
            if self.graph.values[v].base is None:
                self._allocate(v)
        for v in outputs:
            if self.graph.values[v].base is not None:
                instance = self.storage_of[self.graph.storage_from[v]]
                self.storage_of[v] = instance
                self.users[instance] += 1

    def _allocate(self, v: int) -> int:
        instance = len(self.users)
        self.storage_of[v] = instance
        self.users[instance] = 1
        self.size[instance] = self.graph.values[v].size_bytes
        self.held += self.size[instance]
        return instance

    def _copy(self, position: int, step: Offload | Fetch | Discard) -> None:
        v, live, copied = step.value, step.value in self.storage_of, step.value in self.bus.host_copy
        if isinstance(step, Offload):
            if not live or copied or self.graph.values[v].base is not None:
                why = "is a view" if self.graph.values[v].base is not None else "has a copy" if copied else "is not live"
                raise PlanError(f"step {position} copies value {v} to the host, and it {why}")
            self.bus.offload(position, v, self.storage_of[v])
        elif not copied:
            raise PlanError(f"step {position} needs a copy of value {v} on the host, and there is none")
        elif isinstance(step, Discard):
            if self.graph.values[v].on_host:
                raise PlanError(f"step {position} discards the copy of value {v}, which was on the host before the step")
            self.bus.discard(v)
        elif live:
            raise PlanError(f"step {position} fetches value {v}, and it is live")
        else:
            self.bus.fetch(position, v, self._allocate(v))

    def _free(self, position: int, v: int) -> None:
        if v not in self.storage_of:
            raise PlanError(f"step {position} frees value {v}, and it is not live")
        self._release(self.storage_of.pop(v))

    def _release(self, instance: int) -> None:
        self.users[instance] -= 1
        if not self.users[instance]:
            self.bus.wait_to_free(instance)
            self.held -= self.size[instance]
