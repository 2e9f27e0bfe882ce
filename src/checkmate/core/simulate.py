"""The memory account of a plan: bytes at every step, peak and cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from checkmate.core.errors import PlanError, WrongGraphError
from checkmate.core.graph import Graph, view_source
from checkmate.core.plan import Compute, Plan


class Resident(NamedTuple):
    """A storage that is live at a step.

    Attributes:
        value: The value that owns the storage.
        size_bytes: Bytes of the storage.
        made_at: Step that made this instance.
    """

    value: int
    size_bytes: int
    made_at: int


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Bytes and cost of a plan, step by step.

    Attributes:
        graph: The graph.
        plan: The plan.
        bytes: Bytes at every step, resident bytes included: while it runs for a `Compute`, after
            it for a `Free`. Shape ``[step]``, int64.
        cost: Sum of the costs of all computations, in the graph's ``cost_unit``.
    """

    graph: Graph
    plan: Plan
    bytes: npt.NDArray[np.int64]
    cost: int

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at any moment, resident bytes included."""
        return int(self.bytes.max()) if len(self.bytes) else self.graph.resident_bytes

    @property
    def peak_step(self) -> int:
        """First step at which the peak is reached."""
        return int(self.bytes.argmax()) if len(self.bytes) else 0

    def live(self, step: int) -> tuple[Resident, ...]:
        """Storages live while a step runs, its own outputs included, largest first.

        Resident bytes, the step's workspace and replay states are not among them.
        """
        ledger = _Ledger(self.graph, self.plan)
        for position in range(step + 1):
            ledger.run(position)
        return ledger.storages()


def simulate(graph: Graph, plan: Plan) -> Timeline:
    """Bytes held at every step of a plan, its peak and its cost.

    A `Compute` makes new instances of all outputs of its op; a read takes the newest. A view holds
    the storage instance that it was made from; storage goes with the last instance that shares it.
    While an op runs, what was live, its outputs and its workspace are there; an instance that it
    replaces goes after it.

    Args:
        graph: The graph.
        plan: Steps in execution order.

    Returns:
        The timeline.

    Raises:
        PlanError: A step reads or frees a value that no earlier step left live.
        WrongGraphError: The plan was made for another graph.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 2], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> timeline = simulate(chain, Plan.from_order(chain, [0, 1]))
        >>> timeline.bytes, timeline.cost
        (array([4, 6, 2]), 3)
    """
    if plan.graph_digest and plan.graph_digest != graph.digest:
        raise WrongGraphError(
            f"the plan was made for another graph ({plan.graph_digest[:15]}, not {graph.digest[:15]})",
            hint="plan this graph again, or pass the graph that the plan was made for",
        )
    ledger = _Ledger(graph, plan)
    held = np.fromiter((ledger.run(p) for p in range(len(plan.steps))), dtype=np.int64, count=len(plan.steps))
    return Timeline(graph, plan, held, ledger.cost)


class _Ledger:
    """Live instances while a plan is replayed."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph = graph
        self.steps = plan.steps
        self.cost = 0
        self.held = graph.resident_bytes
        self.storage_of: dict[int, int] = {}  # value -> storage instance of its newest instance
        self.storage: dict[int, Resident] = {}
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
            self._free(position, step.value)
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
        replaced = [self.storage_of[v] for v in op.outputs if v in self.storage_of]
        self._make(position, op.outputs)
        self.cost += op.cost
        peak = self.held + op.workspace_bytes
        for instance in replaced:
            self._release(instance)
        if self.last_replay.get(step.op) == position:
            self.held -= op.replay_bytes
        return peak

    def storages(self) -> tuple[Resident, ...]:
        return tuple(sorted(self.storage.values(), key=lambda r: (-r.size_bytes, r.value)))

    def _make(self, position: int, outputs: tuple[int, ...]) -> None:
        views = [v for v in outputs if self.graph.values[v].base is not None]
        shared = {v: self.storage_of.get(view_source(self.graph, v)) for v in views}
        for v in outputs:
            if v in shared:
                continue
            instance = len(self.users)
            size = self.graph.values[v].size_bytes
            self.storage_of[v] = instance
            self.users[instance] = 1
            self.storage[instance] = Resident(v, size, position)
            self.held += size
        for v in views:
            source = view_source(self.graph, v)
            instance = self.storage_of[source] if source in outputs else shared[v]
            assert instance is not None
            self.storage_of[v] = instance
            self.users[instance] += 1

    def _free(self, position: int, v: int) -> None:
        if v not in self.storage_of:
            raise PlanError(f"step {position} frees value {v}, and it is not live")
        self._release(self.storage_of.pop(v))

    def _release(self, instance: int) -> None:
        self.users[instance] -= 1
        if not self.users[instance]:
            self.held -= self.storage.pop(instance).size_bytes
