"""Evaluation plans: computations, frees, and copies to the host and back, in execution order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from checkmate.core.errors import OptionError, PlanError
from checkmate.core.graph import SHOWN, Graph
from checkmate.core.units import parse_bytes

BoolMatrix = npt.NDArray[np.bool_]


class Compute(msgspec.Struct, frozen=True, tag_field="step", tag="compute", forbid_unknown_fields=True):
    """Run an op: every output gets a new instance.

    Attributes:
        op: Index of the op.
    """

    op: int


class Free(msgspec.Struct, frozen=True, tag_field="step", tag="free", forbid_unknown_fields=True):
    """Free the newest instance of a value; its storage goes with the last instance that shares it.

    Attributes:
        value: Index of the value.
    """

    value: int


class Offload(msgspec.Struct, frozen=True, tag_field="step", tag="offload", forbid_unknown_fields=True):
    """Begin to copy the storage of a value to the host. It stays on the device until it is freed.

    Attributes:
        value: Index of the value, which owns its storage.
    """

    value: int


class Fetch(msgspec.Struct, frozen=True, tag_field="step", tag="fetch", forbid_unknown_fields=True):
    """Begin to copy a value back from the host into a new instance, whose storage is allocated at once.

    Attributes:
        value: Index of the value.
    """

    value: int


class Discard(msgspec.Struct, frozen=True, tag_field="step", tag="discard", forbid_unknown_fields=True):
    """Free the copy of a value on the host.

    Attributes:
        value: Index of the value.
    """

    value: int


Step = Compute | Free | Offload | Fetch | Discard


class HostMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of the host that copies may fill, and the bus to it, with one copy engine in each direction.

    Attributes:
        bytes: The most bytes of copies at any moment: what may be pinned. Text such as ``"32GiB"`` is read too.
        out_bytes_per_s: Traffic to the host, in bytes per second; 0 if nothing is copied there, and weights are fetched.
        in_bytes_per_s: Traffic from the host, in bytes per second.

    Raises:
        OptionError: A rate is not a whole number, or nothing can be fetched.
        UnitError: The bytes cannot be read.

    Examples:
        >>> host = HostMemory("32GiB", 25_000_000_000, 20_000_000_000)
        >>> host.bytes, host.out_ns(1000), host.in_ns(1000)
        (34359738368, 40, 50)
    """

    bytes: int
    out_bytes_per_s: int
    in_bytes_per_s: int

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "bytes", parse_bytes(self.bytes))
        for name in ("out_bytes_per_s", "in_bytes_per_s"):
            rate = getattr(self, name)
            if isinstance(rate, bool) or int(rate) != rate or rate < (name == "in_bytes_per_s"):
                raise OptionError(f"{name}={rate!r} is not a positive whole number of bytes per second")
            msgspec.structs.force_setattr(self, name, int(rate))

    def out_ns(self, size_bytes: int) -> int:
        """Nanoseconds that the engine takes to copy bytes to the host, rounded up."""
        if not self.out_bytes_per_s:
            raise PlanError("a value is copied to the host, and the rate of copies to it is 0", hint="plan without this copy")
        return -(-size_bytes * 10**9 // self.out_bytes_per_s)

    def in_ns(self, size_bytes: int) -> int:
        """Nanoseconds that the engine takes to copy bytes from the host, rounded up."""
        return -(-size_bytes * 10**9 // self.in_bytes_per_s)


class Stages(NamedTuple):
    """A plan as the matrices of Jain et al. (2020).

    Attributes:
        R: Whether an op is computed in a stage. Shape ``[stage, op]``.
        S: Whether an output of an op is held when a stage begins. Shape ``[stage, op]``.
    """

    R: BoolMatrix
    S: BoolMatrix


class Plan(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Steps in execution order.

    Attributes:
        steps: `Compute` and `Free` steps; an op may be computed any number of times. With a host, also `Offload`, `Fetch` and
            `Discard` steps.
        graph_digest: Digest of the graph it was made for, or "" where it was written by hand.
        host: The host and the bus for which its copies were placed; None if it has no copies.

    Raises:
        PlanError: It has copies and no host.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> Plan.from_order(chain, [0, 1]).steps
        (Compute(op=0), Compute(op=1), Free(value=0))
    """

    steps: tuple[Step, ...]
    graph_digest: str = ""
    host: HostMemory | None = None

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "steps", tuple(self.steps))
        copies = any(isinstance(step, (Offload, Fetch, Discard)) for step in self.steps)
        if copies and self.host is None:
            raise PlanError("a plan with copies to the host has no host", hint="give it host=HostMemory(...)")
        if not copies:
            msgspec.structs.force_setattr(self, "host", None)

    def __repr__(self) -> str:
        if len(self.steps) <= SHOWN:
            return super().__repr__()
        order = self.order
        again = len(order) - len(set(order))
        return f"<Plan of {len(order):,} computations, {again:,} of them repeated, for {self.graph_digest[:15] or 'any graph'}>"

    @property
    def order(self) -> tuple[int, ...]:
        """Ops in the order in which they are computed, repetitions included."""
        return tuple(step.op for step in self.steps if isinstance(step, Compute))

    def excess(self, graph: Graph) -> str:
        """The reason in words that replaying the plan takes too long; ``""`` if it does not.

        An op with thousands of inputs and outputs, computed thousands of times, fits in a small file and takes hours. In plans of
        training steps, ops that are computed often have few inputs and outputs.
        """
        sizes = [len(op.inputs) + len(op.outputs) for op in graph.ops]
        work = sum(sizes[o] for o in self.order if 0 <= o < len(sizes))
        # 100,000 reads and writes are replayed in a moment. Beyond those of each op once, a step may have 64 on average.
        if work <= 100_000 + 64 * (len(self.steps) + sum(sizes)):
            return ""
        return f"the {len(self.steps)} steps of the plan read and write {work} values: more than is replayed"

    def is_for(self, graph: Graph) -> bool:
        """Whether the plan was made for a graph, or names no graph."""
        digest = self.graph_digest.partition("+")[0]
        return not digest or graph.has_digest(digest)

    def is_for_structure_of(self, graph: Graph) -> bool:
        """Whether a graph has the structure that the plan was made for. `checkmate plan` puts `Graph.structure` after a plus."""
        return self.graph_digest.partition("+")[2] == graph.structure

    @classmethod
    def from_order(cls, graph: Graph, order: Iterable[int]) -> Plan:
        """Plan that computes ``order`` and frees every value at its earliest place.

        A value is freed right after its last read before its op is computed again. A value that
        no op reads is freed at once. Kept values stay.

        Raises:
            PlanError: An op index is out of range, or an op reads a value that no earlier op of
                ``order`` has made.
        """
        return with_frees(graph, [Compute(int(o)) for o in order])

    def stages(self, graph: Graph) -> Stages:
        """The matrices R and S of the plan.

        A stage ends with the first computation of an op, as in the paper. It also ends before an op that
        would break the ascending order inside it. Therefore R alone determines the order.

        Raises:
            PlanError: The plan has an index out of range.
        """
        rows: list[list[int]] = [[]]
        held: list[set[int]] = [set()]
        live: set[int] = set()
        computed: set[int] = set()
        advanced = False
        for step in self.steps:
            if isinstance(step, Fetch):
                live.add(step.value)
            if isinstance(step, Free):
                live.discard(step.value)
            if not isinstance(step, Compute):
                continue
            op = step.op
            if not 0 <= op < len(graph.ops):
                raise PlanError(f"the plan computes op {op} of {len(graph.ops)}")
            if advanced or (rows[-1] and op <= rows[-1][-1]):
                rows.append([])
                held.append({graph.producer[v] for v in live})
            rows[-1].append(op)
            advanced = op not in computed
            computed.add(op)
            live.update(graph.ops[op].outputs)
        R = np.zeros((len(rows), len(graph.ops)), dtype=np.bool_)
        S = np.zeros_like(R)
        for t, row in enumerate(rows):
            R[t, row] = True
            S[t, sorted(held[t])] = True
        return Stages(R, S)


def with_frees(graph: Graph, sequence: Iterable[Step], host: HostMemory | None = None) -> Plan:
    """The plan of `Compute`, `Offload`, `Fetch` and `Free` steps that frees every value at its earliest place; kept values stay.

    A `Free` in the sequence is the earliest place for the free of its value, where the copy is expected to be done; if the last
    read is later, the value is freed after it. A copy on the host is discarded after the first computation that reads the
    fetched value. Copies that were there before the step stay, and values that are fetched from them need not be live at the end.

    Raises:
        PlanError: An op index is out of range, or an op reads a value that no earlier step has made.
    """
    sequence = tuple(sequence)
    newest: dict[int, int] = {}  # value -> position of the step that made its newest instance
    last: dict[tuple[int, int], int] = {}  # (value, position made) -> last position that needs it
    fetched: dict[int, int] = {}  # value -> position of its last fetch
    discards: dict[int, int] = {}  # value -> position of the first read after that
    for p, step in enumerate(sequence):
        if not isinstance(step, Compute):
            if isinstance(step, Fetch):
                newest[step.value] = fetched[step.value] = p
                discards.pop(step.value, None)
            last[step.value, newest[step.value]] = p
            continue
        o = step.op
        if not 0 <= o < len(graph.ops):
            raise PlanError(f"the order computes op {o} of {len(graph.ops)}")
        for v in graph.ops[o].inputs:
            if v not in newest:
                raise PlanError(
                    f"position {p} computes op {o} ({graph.ops[o].name!r}), which reads value {v} ({graph.values[v].name!r}) "
                    "before any op has made it"
                )
            last[v, newest[v]] = p
            if fetched and fetched.get(v) == newest[v]:
                discards.setdefault(v, p)
        for v in graph.ops[o].outputs:
            newest[v] = last[v, p] = p
    after: list[list[Step]] = [[] for _ in sequence]
    for v in sorted(fetched):
        if not graph.values[v].on_host:
            after[discards.get(v, len(sequence) - 1)].append(Discard(v))
    made_at = {v: p for p, step in enumerate(sequence) if isinstance(step, Compute) for v in graph.ops[step.op].outputs}
    # Values on the host whose ops are computed are all on the device when the step begins: none is freed before.
    begun = max((p for v, p in made_at.items() if graph.values[v].on_host), default=0)
    for v, made in sorted(last):
        if not (graph.values[v].kept and v in made_at and newest[v] == made):
            after[max(last[v, made], begun * graph.values[v].on_host)].append(Free(v))
    steps: list[Step] = []
    for p, step in enumerate(sequence):
        steps += after[p] if isinstance(step, Free) else (step, *after[p])
    return Plan(tuple(steps), graph.digest, host)
