"""Translates a traced step into a `checkmate.Graph`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import tensorflow as tf

from checkmate.core.graph import Graph, Op, Phase, Value
from checkmate.cost.store import OpCost
from checkmate.tf2.op_properties import (
    FORWARDS,
    OPAQUE,
    READERS,
    Kind,
    classify,
    handles,
    output_bytes,
    static_shape_values,
    tensor_bytes,
)
from checkmate.tf2.trace import Trace

_log = logging.getLogger("checkmate.tf2")

Costs = Callable[[Sequence[tf.Operation]], Sequence[OpCost]]  # gives the cost and workspace of each of several ops


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A graph together with the traced step that it describes."""

    graph: Graph
    trace: Trace
    kinds: Mapping[str, Kind]  # of every op of the trace, by name
    members: tuple[tf.Operation, ...]  # the op of the trace behind each op of the graph
    # Names of the reads whose value is used after the variable's next change: ops of the graph that hold the old value.
    snapshot_reads: frozenset[str]


def base_tensor(tensor: tf.Tensor, kinds: Mapping[str, Kind]) -> tf.Tensor:
    """The tensor whose buffer a tensor uses: itself, unless it is the output of a view."""
    while kinds[tensor.op.name] == "view":
        tensor = _viewed(tensor)
    return tensor


def _viewed(view: tf.Tensor) -> tf.Tensor:
    """The operand of a view whose buffer the view uses."""
    return view.op.inputs[view.value_index if view.op.type == "IdentityN" else 0]


def behind(tensor: tf.Tensor, kinds: Mapping[str, Kind]) -> Iterator[tf.Tensor]:
    """The tensor whose buffer a tensor uses, then the other operands of the views between, such as a computed shape."""
    yield base_tensor(tensor, kinds)
    while kinds[tensor.op.name] == "view":
        for operand in () if tensor.op.type == "IdentityN" else tensor.op.inputs[1:]:
            yield from behind(operand, kinds)
        tensor = _viewed(tensor)


def capture_trace(trace: Trace, costs: Costs, name: str = "") -> Capture:
    """The graph of a traced step.

    Views are not ops of the graph: a reader of a view reads the value whose buffer it shares. Reads of variables are not ops
    either, since they copy nothing, except those whose variable changes before their last use.
    """
    return _Builder(trace).build(costs, name)


class _Builder:
    """Builds the graph of a traced step."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.ops = trace.ops
        self.index = {op.name: i for i, op in enumerate(self.ops)}
        self.kinds = classify(self.ops)
        self.needed = self._needed()
        self.touching = self._touching()
        self.snapshot_reads = self._snapshot_reads()
        self.real = [op for op in self.ops if op.name in self.needed and self._is_real(op)]
        self.kept = {b.ref() for t in trace.function.graph.outputs for b in behind(t, self.kinds)}
        self.values: dict[str, int] = {}  # tensor -> value

    def build(self, costs: Costs, name: str) -> Capture:
        before = {op.name: self._before(op) for op in self.real}
        clobbers = {op.name: self._clobberers(op) for op in self.real}
        needs = {op.name: [*(s.op.name for s in self._sources(op)), *before[op.name]] for op in self.real}
        for n, writers in clobbers.items():
            for writer in writers:
                if writer in needs:
                    needs[writer].append(n)
        order = listed_order(needs, {op.name: self.trace.phase(self.index[op.name]) for op in self.real})
        members = [self.ops[self.index[n]] for n in order]
        where = {op.name: o for o, op in enumerate(members)}
        values = self._number(members)
        measures = costs(members)
        ops = [self._op(op, measure, where, clobbers) for op, measure in zip(members, measures, strict=True)]
        pairs = sorted({(where[a], o) for o, op in enumerate(members) for a in before[op.name]})
        graph = Graph(tuple(ops), tuple(values), order=tuple(pairs), resident_bytes=self._resident_bytes(), name=name)
        self._log_opaque(members)
        return Capture(graph, self.trace, self.kinds, tuple(members), frozenset(self.snapshot_reads))

    def _needed(self) -> set[str]:
        """Names of the ops on which an output or an effect depends."""
        graph = self.trace.function.graph
        stack = [t.op for t in graph.outputs] + [c for c in graph.control_outputs if self.kinds[c.name] == "effect"]
        needed: set[str] = set()
        while stack:
            op = stack.pop()
            if op.name in needed:
                continue
            needed.add(op.name)
            if static_shape_values(op) is None:  # a static shape is known without the tensor
                stack += [t.op for t in op.inputs]
                stack += op.control_inputs
        return needed

    def _is_real(self, op: tf.Operation) -> bool:
        """Whether an op of the trace is an op of the graph."""
        return self.kinds[op.name] in ("op", "effect") or op.name in self.snapshot_reads

    def _touching(self) -> dict[str, list[tf.Operation]]:
        """Ops that take each resource handle, in the order of the trace."""
        found: dict[str, list[tf.Operation]] = {}
        for op in self.ops:
            if op.name in self.needed:
                for handle in dict.fromkeys(handles(op)):
                    found.setdefault(handle, []).append(op)
        return found

    def _writers_after(self, op: tf.Operation) -> list[tf.Operation]:
        """Ops that are traced after an op and change a variable that it takes."""
        me = self.index[op.name]
        users = [user for handle in handles(op) for user in self.touching[handle]]
        return [user for user in users if user.type not in READERS and self.index[user.name] > me]

    def _snapshot_reads(self) -> set[str]:
        """Reads with a use that was traced after the variable's next change. They must hold the old value."""
        users: dict[str, int] = {}  # op -> index of the last op that uses its outputs, directly or through views
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
        """Tensors that an op reads and another op of the graph computes."""
        bases = dict.fromkeys(b.ref() for t in op.inputs for b in behind(t, self.kinds))
        return [b.deref() for b in bases if self._is_real(b.deref().op)]

    def _reads(self, op: tf.Operation) -> list[tf.Operation]:
        """Reads of variables whose buffers an op reads, without those that are ops of the graph."""
        found = dict.fromkeys(b.op.name for t in op.inputs for b in behind(t, self.kinds))
        return [self.ops[self.index[n]] for n in found if self.kinds[n] == "read" and n not in self.snapshot_reads]

    def _before(self, op: tf.Operation) -> list[str]:
        """Ops that must run before an op, by its control edges or the control edges of the reads that it uses."""
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
            else:  # `NoOp` and views pass control on; order around reads is in _clobberers
                stack += above.control_inputs
                stack += [t.op for t in above.inputs] if self.kinds[above.name] == "view" else []
        return [n for n in found if n in self.needed and n != op.name]

    def _clobberers(self, op: tf.Operation) -> list[str]:
        """Ops that overwrite a variable whose buffer an op reads."""
        writers = [w.name for read in self._reads(op) for w in self._writers_after(read)]
        if op.name in self.snapshot_reads or op.type in READERS:
            writers += [w.name for w in self._writers_after(op)]
        return [n for n in dict.fromkeys(writers) if n != op.name]

    def _reused_input(self, op: tf.Operation, uses: Counter[Any]) -> tf.Tensor | None:
        """The input whose buffer an op of the optimizer always reuses for its first output.

        This holds if the op is the input's only reader: ops of the optimizer are computed once, and the input is freed there.
        """
        for i in FORWARDS.get(op.type, ()) if self._in_optimizer(op) else ():
            source = self._base(op.inputs[i]) if i < len(op.inputs) else None
            if (
                source is not None
                and self._is_real(source.op)
                and self.kinds[source.op.name] == "op"
                and uses[source.ref()] == 1
                and source.ref() not in self.kept
                and source.dtype == op.outputs[0].dtype
                and 0 < tensor_bytes(source) == tensor_bytes(op.outputs[0])
            ):
                return source
        return None

    def _in_optimizer(self, op: tf.Operation) -> bool:
        return self.trace.phase(self.index[op.name]) == "optimizer"

    def _number(self, members: Sequence[tf.Operation]) -> list[Value]:
        """A value for every output of every op; an output that reuses a buffer is a view of that value."""
        users = [op for op in self.ops if op.name in self.needed and self.kinds[op.name] != "view"]
        uses = Counter(b.ref() for op in users for t in op.inputs for b in behind(t, self.kinds))
        values: list[Value] = []
        for op in members:
            reused = self._reused_input(op, uses)
            for tensor in op.outputs:
                self.values[tensor.name] = len(values)
                base = None if reused is None else self.values[reused.name]
                size = tensor_bytes(tensor) if reused is None else 0
                values.append(Value(tensor.name, size, base, tensor.ref() in self.kept))
                reused = None  # the other outputs have buffers of their own
        return values

    def _op(self, op: tf.Operation, measure: OpCost, where: Mapping[str, int], clobbers: Mapping[str, Sequence[str]]) -> Op:
        return Op(
            name=op.name,
            inputs=tuple(self.values[s.name] for s in self._sources(op)),
            outputs=tuple(self.values[t.name] for t in op.outputs),
            cost=measure.cost_ns,
            workspace_bytes=measure.workspace_bytes,
            # No shape gives the bytes of a tensor list.
            recomputable=self.kinds[op.name] == "op"
            and not self._in_optimizer(op)
            and all(t.dtype != tf.variant for t in (*op.inputs, *op.outputs)),
            clobbered_by=tuple(sorted(where[c] for c in clobbers[op.name])),
            phase=self.trace.phase(self.index[op.name]),
            kind=op.type,
            source=op.name.rpartition("/")[0],
        )

    def _resident_bytes(self) -> int:
        """Bytes of variables and other captured tensors, of the batch and of constants."""
        variables = {id(v.handle): v.shape.num_elements() * v.dtype.size for v in self.trace.variables}
        outside = [variables.get(id(t), 0) if t.dtype == tf.resource else tensor_bytes(t) for t in self.trace.captured.values()]
        constants = [op for op in self.ops if op.type == "Const" and op.name in self.needed]
        return sum(outside) + sum(map(tensor_bytes, self.trace.arguments)) + sum(map(output_bytes, constants))

    def _log_opaque(self, members: Sequence[tf.Operation]) -> None:
        opaque = [op for op in members if op.type in OPAQUE and not op.node_def.attr["_XlaMustCompile"].b]
        if opaque:
            names = ", ".join(f"{op.name} ({op.type})" for op in opaque)
            _log.info("loops, branches and nested functions are each one op of the plan, measured and not planned: %s", names)


def listed_order(needs: Mapping[str, Sequence[str]], phases: Mapping[str, Phase]) -> list[str]:
    """Ops in the order of the trace, but metrics before the backward pass, and each update directly after its gradient.

    Keras computes metrics, whose phase is ``"loss"``, after the update. This would keep the prediction until then: for a language
    model it is the largest tensor of the step. A gradient is freed after its update instead of at the end of the backward pass.
    An op of the optimizer that depends on no gradient (weight decay, decay of a slot) is listed directly before the first op that
    reads it. If every update depends on all gradients, as with clipping by the global norm, no update can move.

    Args:
        needs: For each op, in the order of the trace, the ops that must run before it.
        phases: Phase of each op.
    """
    traced = list(needs)
    start = next((i for i, n in enumerate(traced) if phases[n] == "backward"), len(traced))
    early = dict.fromkeys(traced[:start])
    for n in traced[start:]:
        if phases[n] == "loss" and early.keys() >= set(needs[n]):
            early[n] = None
    listed = [*early, *(n for n in traced[start:] if n not in early)]
    place = {n: i for i, n in enumerate(listed)}
    ready: dict[str, int] = {}  # place of the last op outside the optimizer that an op depends on
    for n in TopologicalSorter(needs).static_order():
        ready[n] = max((ready[m] for m in needs[n]), default=-1) if phases[n] == "optimizer" else place[n]
    # An update that nothing needs is listed together with the unlisted ops that it needs. Therefore these ops are as late as
    # their first reader allows. An update that depends on no gradient, such as the step counter, is last.
    needed = {m for n in listed for m in needs[n]}
    last = len(listed)
    updates = [n for n in listed if phases[n] == "optimizer" and n not in needed]
    roots = [(place[n], 0, place[n], n) for n in listed if phases[n] != "optimizer"]
    roots += [(ready[n] if ready[n] >= 0 else last, 1, place[n], n) for n in updates]
    order: dict[str, None] = {}
    for *_, root in sorted(roots):
        stack = [(root, False)]
        while stack:
            n, complete = stack.pop()
            if complete:
                order[n] = None
            elif n not in order:
                stack.append((n, True))
                stack += [(m, False) for m in sorted(needs[n], key=place.__getitem__, reverse=True) if m not in order]
    return list(order)
