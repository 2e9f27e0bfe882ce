"""A traced step as a `checkmate.Graph`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from checkmate.core.errors import GraphError
from checkmate.core.graph import Graph, Op, Value
from checkmate.cost.store import OpCost
from checkmate.tf2.op_properties import (
    CALLS,
    CONTROL_FLOW,
    FORWARDS,
    READERS,
    Kind,
    classify,
    handles,
    recomputable,
    static_values,
    tensor_bytes,
)
from checkmate.tf2.ordering import listed_order
from checkmate.tf2.trace import Trace

_log = logging.getLogger("checkmate.tf2")

Costs = Callable[[Sequence[tf.Operation]], Sequence[OpCost]]
"""Costs of ops, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A graph together with the traced step that it describes.

    Attributes:
        graph: What planners see.
        trace: The step as traced.
        kinds: Kind of every op of the trace, by name.
        members: The op of the trace behind each op of the graph. Shape ``[op]``.
        held: Names of the reads whose value is used after the variable has changed: ops of the graph, unlike other reads.
        values: Value of each tensor that an op of the graph makes, by the tensor's name.
    """

    graph: Graph
    trace: Trace
    kinds: Mapping[str, Kind]
    members: tuple[tf.Operation, ...]
    held: frozenset[str]
    values: Mapping[str, int]

    def value_of(self, tensor: tf.Tensor) -> int | None:
        """The value that holds a tensor's buffer, or None if it is resident."""
        return self.values.get(base_tensor(tensor, self.kinds).name)

    @property
    def effects(self) -> tuple[int, ...]:
        """Ops that the function must run though nothing it returns needs them."""
        return tuple(o for o, op in enumerate(self.members) if self.kinds[op.name] == "effect")


def base_tensor(tensor: tf.Tensor, kinds: Mapping[str, Kind]) -> tf.Tensor:
    """The tensor whose buffer a tensor shares: itself unless a view made it."""
    while kinds[tensor.op.name] == "view":
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def capture_trace(trace: Trace, costs: Costs, name: str = "") -> Capture:
    """The graph of a traced step.

    Views are not ops of the graph: who reads one reads what it shares its buffer with. Neither are reads
    of variables, which copy nothing, but for those whose variable changes before their last use.

    Args:
        trace: The step.
        costs: Costs and workspace of ops.
        name: Name of the graph.

    Raises:
        GraphError: XLA compiles a part of the step, or the batch's shape is not static.
    """
    return _Builder(trace).build(costs, name)


class _Builder:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ops = trace.ops
        self.index = {op.name: i for i, op in enumerate(self.ops)}
        self.kinds = classify(self.ops)
        self.needed = self._needed()
        self.touching = self._touching()
        self.held = self._held_reads()
        self.real = [op for op in self.ops if op.name in self.needed and self._is_real(op)]
        self.values: dict[str, int] = {}  # tensor -> value
        self.in_place: dict[str, str] = {}  # tensor -> the one whose buffer it takes over

    def build(self, costs: Costs, name: str) -> Capture:
        self._refuse_xla()
        before = {op.name: self._before(op) for op in self.real}
        clobbers = {op.name: self._clobberers(op) for op in self.real}
        late = {op.name for op in self.real if self._late(op)}
        data = {op.name: [s.op.name for s in self._sources(op)] for op in self.real}
        members = [self.ops[self.index[n]] for n in listed_order([op.name for op in self.real], data, before, clobbers, late)]
        where = {op.name: o for o, op in enumerate(members)}
        self._find_in_place(members)
        values = self._number(members)
        measures = costs(members)
        ops = [self._op(op, measure, where, clobbers) for op, measure in zip(members, measures, strict=True)]
        order = sorted({(where[a], o) for o, op in enumerate(members) for a in before[op.name]})
        graph = Graph(tuple(ops), tuple(values), order=tuple(order), resident_bytes=self._resident_bytes(), name=name)
        self._tell_opaque(members)
        return Capture(graph, self.trace, self.kinds, tuple(members), frozenset(self.held), self.values)

    def _needed(self) -> set[str]:
        """Ops that the outputs or an effect need."""
        graph = self.trace.function.graph
        stack = [t.op for t in graph.outputs] + [c for c in graph.control_outputs if self.kinds[c.name] == "effect"]
        needed: set[str] = set()
        while stack:
            op = stack.pop()
            if op.name in needed:
                continue
            needed.add(op.name)
            if static_values(op) is None:  # a static shape is known without what it is the shape of
                stack += [t.op for t in op.inputs]
                stack += op.control_inputs
        return needed

    def _is_real(self, op: tf.Operation) -> bool:
        return self.kinds[op.name] in ("op", "effect") or op.name in self.held

    def _touching(self) -> dict[str, list[tf.Operation]]:
        """Ops that take each resource, as traced."""
        found: dict[str, list[tf.Operation]] = {}
        for op in self.ops:
            if op.name in self.needed:
                for handle in dict.fromkeys(handles(op)):
                    found.setdefault(handle, []).append(op)
        return found

    def _writers_after(self, op: tf.Operation) -> list[tf.Operation]:
        """Ops that change a variable after an op has read it."""
        me = self.index[op.name]
        users = [user for handle in handles(op) for user in self.touching[handle]]
        return [user for user in users if user.type not in READERS and self.index[user.name] > me]

    def _held_reads(self) -> set[str]:
        """Reads with a use that was traced after the variable's next change: they hold the old value."""
        users: dict[str, int] = {}  # op -> number of the last op that uses what it gives, views looked through
        for i in range(len(self.ops) - 1, -1, -1):
            op = self.ops[i]
            last = users.get(op.name, i) if self.kinds[op.name] == "view" else i
            if op.name in self.needed:
                for source in op.inputs:
                    users[source.op.name] = max(users.get(source.op.name, -1), last)
        for out in self.trace.function.graph.outputs:
            source = self._base(out).op
            users[source.name] = len(self.ops)
        held: set[str] = set()
        for op in self.ops:
            if self.kinds[op.name] == "read" and op.name in self.needed:
                later = [self.index[w.name] for w in self._writers_after(op)]
                if later and users.get(op.name, -1) > min(later):
                    held.add(op.name)
        return held

    def _base(self, tensor: tf.Tensor) -> tf.Tensor:
        return base_tensor(tensor, self.kinds)

    def _sources(self, op: tf.Operation) -> list[tf.Tensor]:
        """Tensors made by ops of the graph that an op reads."""
        bases = dict.fromkeys(self._base(t).ref() for t in op.inputs)
        return [b.deref() for b in bases if self._is_real(b.deref().op)]

    def _reads(self, op: tf.Operation) -> list[tf.Operation]:
        """Reads of variables behind what an op reads, that are not ops of the graph themselves."""
        found = dict.fromkeys(self._base(t).op.name for t in op.inputs)
        return [self.ops[self.index[n]] for n in found if self.kinds[n] == "read" and n not in self.held]

    def _before(self, op: tf.Operation) -> list[str]:
        """Ops that must have run before: by control edges, of its own or of the reads that it uses."""
        found: dict[str, None] = {}
        stack = [c for o in (op, *self._reads(op)) for c in o.control_inputs]
        seen: set[str] = set()
        while stack:
            above = stack.pop()
            if above.name in seen:
                continue
            seen.add(above.name)
            if self._is_real(above):
                found[above.name] = None
            else:  # what only passes control on; a read orders nothing but what changes the variable, see _clobberers
                stack += above.control_inputs
                stack += [t.op for t in above.inputs] if self.kinds[above.name] == "view" else []
        return [n for n in found if n in self.needed and n != op.name]

    def _clobberers(self, op: tf.Operation) -> list[str]:
        """Ops that change a variable whose buffer an op reads."""
        writers = [w.name for read in self._reads(op) for w in self._writers_after(read)]
        if op.name in self.held or op.type in READERS:
            writers += [w.name for w in self._writers_after(op)]
        return [n for n in dict.fromkeys(writers) if n != op.name]

    def _find_in_place(self, members: Sequence[tf.Operation]) -> None:
        """Tensors of the optimizer that always take over the buffer of what they are made from.

        They do where nobody else reads that, since the optimizer's ops are computed once: what they read dies there.
        """
        kept = {self._base(t).ref() for t in self.trace.function.graph.outputs}
        users = [op for op in self.ops if op.name in self.needed and self.kinds[op.name] != "view"]
        uses = Counter(self._base(t).ref() for op in users for t in op.inputs)
        for op in members:
            places = FORWARDS.get(op.type, ()) if self._late(op) else ()
            for i in places:
                source = self._base(op.inputs[i]) if i < len(op.inputs) else None
                if (
                    source is not None
                    and self._is_real(source.op)
                    and self.kinds[source.op.name] == "op"
                    and uses[source.ref()] == 1
                    and source.ref() not in kept
                    and source.dtype == op.outputs[0].dtype
                    and 0 < tensor_bytes(source) == tensor_bytes(op.outputs[0])
                ):
                    self.in_place[op.outputs[0].name] = source.name
                    break

    def _late(self, op: tf.Operation) -> bool:
        return self.trace.phase(self.index[op.name]) == "optimizer"

    def _number(self, members: Sequence[tf.Operation]) -> list[Value]:
        kept = {self._base(t).ref() for t in self.trace.function.graph.outputs}
        values: list[Value] = []
        for op in members:
            for tensor in op.outputs:
                self.values[tensor.name] = len(values)
                base = self.in_place.get(tensor.name)
                size = tensor_bytes(tensor) if base is None else 0
                values.append(Value(tensor.name, size, None if base is None else self.values[base], tensor.ref() in kept))
        return values

    def _op(self, op: tf.Operation, measure: OpCost, where: Mapping[str, int], clobbers: Mapping[str, Sequence[str]]) -> Op:
        return Op(
            name=op.name,
            inputs=tuple(self.values[s.name] for s in self._sources(op)),
            outputs=tuple(self.values[t.name] for t in op.outputs),
            cost=measure.cost_ns,
            workspace_bytes=measure.workspace_bytes,
            recomputable=self.kinds[op.name] == "op" and recomputable(op) and not self._late(op),
            clobbered_by=tuple(sorted(where[c] for c in clobbers[op.name])),
            phase=self.trace.phase(self.index[op.name]),
            kind=op.type,
            source=op.name.rpartition("/")[0],
        )

    def _resident_bytes(self) -> int:
        outside = [self._outside_bytes(tensor) for tensor in self.trace.captured.values()]
        constants = [op for op in self.ops if op.type == "Const" and op.name in self.needed]
        return (
            sum(outside)
            + sum(map(tensor_bytes, self.trace.arguments))
            + sum(tensor_bytes(t) for op in constants for t in op.outputs)
        )

    def _outside_bytes(self, tensor: tf.Tensor) -> int:
        if tensor.dtype != tf.resource:
            return tensor_bytes(tensor)
        variable = next((v for v in self.trace.function.graph.variables if v.handle is tensor), None)
        return 0 if variable is None else variable.shape.num_elements() * variable.dtype.size

    def _refuse_xla(self) -> None:
        for op in self.real:
            if op.type in CALLS and "_XlaMustCompile" in op.node_def.attr and op.get_attr("_XlaMustCompile"):
                raise GraphError(
                    f"op {op.name!r} is a function that XLA compiles (jit_compile=True): no schedule reaches inside",
                    hint="take jit_compile=True off the functions that the model or the loss calls",
                )

    def _tell_opaque(self, members: Sequence[tf.Operation]) -> None:
        loops = [op for op in members if op.type in CONTROL_FLOW | CALLS]
        if loops:
            names = ", ".join(f"{op.name} ({op.type})" for op in loops[:5]) + (", ..." if len(loops) > 5 else "")
            _log.warning(
                "%d loops, branches or functions are each one op of the plan, and what they hold inside is measured but not "
                "planned: %s",
                len(loops),
                names,
            )
