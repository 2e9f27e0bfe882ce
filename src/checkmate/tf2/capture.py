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
    EMPTY_LISTS,
    FORWARDED_TO,
    FORWARDS,
    LOOPS,
    MOVES,
    OPAQUE,
    READERS,
    Kind,
    classify,
    handles,
    is_open,
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
    members: tuple[tuple[tf.Operation, ...], ...]  # ops of the trace behind each op of the graph, in the order in which they run
    values: Mapping[str, int]  # number of the value of each tensor that ops of the graph put out, by the tensor's name
    # Names of the reads whose value is used after the variable's next change: ops of the graph that hold the old value.
    snapshot_reads: frozenset[str]


def base_tensor(tensor: tf.Tensor, kinds: Mapping[str, Kind]) -> tf.Tensor:
    """The tensor whose buffer a tensor uses: itself, unless it is the output of a view."""
    return next(behind(tensor, kinds))


def behind(tensor: tf.Tensor, kinds: Mapping[str, Kind]) -> Iterator[tf.Tensor]:
    """The tensor whose buffer a tensor uses, then the other operands of the views between, such as a computed shape."""
    others: list[tf.Tensor] = []
    while kinds[tensor.op.name] == "view":
        several = tensor.op.type == "IdentityN"
        others += () if several else tensor.op.inputs[1:]
        tensor = tensor.op.inputs[tensor.value_index if several else 0]
    yield tensor
    for operand in others:
        yield from behind(operand, kinds)


def named_by(chain: Sequence[tf.Operation]) -> tf.Operation:
    """The op that stands for an op of the graph: the loop after the ops that make its lists, or else the first op."""
    return chain[-1] if chain[-1].type in LOOPS else chain[0]


def capture_trace(trace: Trace, costs: Costs, name: str = "") -> Capture:
    """The graph of a traced step.

    An op whose kernel overwrites an input that nothing else reads is one op of the graph together with the op that computes this
    input. Views are not ops of the graph: a reader of a view reads the value whose buffer it shares. Reads of variables are not
    ops either, since they copy nothing, except those whose variable changes before their last use.
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
        self.where: dict[str, int] = {}  # op of the trace -> op of the graph
        self.inside: set[str] = set()  # names of the tensors that no op of the graph puts out
        self.reused: dict[str, str] = {}  # name of an output -> name of the tensor whose buffer it overwrites

    def build(self, costs: Costs, name: str) -> Capture:
        before = {op.name: self._before(op) for op in self.real}
        clobbers = {op.name: self._clobberers(op) for op in self.real}
        needs = {op.name: [*(s.op.name for s in self._sources(op)), *before[op.name]] for op in self.real}
        for n, writers in clobbers.items():
            for writer in writers:
                if writer in needs:
                    needs[writer].append(n)
        members = self._chains(listed_order(needs, {op.name: self._phase(op) for op in self.real}), needs)
        values, run = self._number(members), [op for chain in members for op in chain]
        measures = {op.name: cost for op, cost in zip(run, costs(run), strict=True)}
        ops = [self._op(chain, measures, clobbers) for chain in members]
        pairs = sorted({(self.where[a], o) for n, o in self.where.items() for a in before[n] if self.where[a] != o})
        graph = Graph(tuple(ops), tuple(values), order=tuple(pairs), resident_bytes=self._resident_bytes(), name=name)
        self._log_opaque()
        return Capture(graph, self.trace, self.kinds, tuple(map(tuple, members)), self.values, frozenset(self.snapshot_reads))

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
        return [user for user in users if not self._only_reads(user) and self.index[user.name] > me]

    def _only_reads(self, op: tf.Operation) -> bool:
        """Whether an op changes none of the variables that it takes."""
        return op.type in READERS or self.kinds[op.name] == "op"

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
        if op.name in self.snapshot_reads or self._only_reads(op):
            writers += [w.name for w in self._writers_after(op)]
        return [n for n in dict.fromkeys(writers) if n != op.name]

    def _chains(self, order: Sequence[str], needs: Mapping[str, Sequence[str]]) -> list[list[tf.Operation]]:
        """The ops of the graph, each a chain of ops of the trace that write into the same buffer one after another.

        No plan loses by it: to keep a buffer for its only reader is never better than to keep what the reader writes into it. An
        op joins a chain if everything that it needs has run by then. Otherwise the output of an op after the forward pass, which
        is then computed once, is a view of what it overwrites.
        """
        users = [op for op in self.ops if op.name in self.needed and self.kinds[op.name] != "view"]
        uses = Counter(b.ref() for op in users for t in op.inputs for b in behind(t, self.kinds))
        readers = Counter(m for some in needs.values() for m in {*some})
        lists = {op.name: self._makers_of_lists(op, readers) for op in self.real if op.type in LOOPS}
        within = {maker.name for makers in lists.values() for maker in makers}
        chains: list[list[tf.Operation]] = []
        for n in order:
            if n in within:
                continue
            op, makers = self.ops[self.index[n]], lists.get(n, [])
            if makers:
                self.where.update((part.name, len(chains)) for part in (*makers, op))
                self.inside.update(t.name for maker in makers for t in maker.outputs)
                chains.append([*makers, op])
                continue
            after = max((self.where[m] for m in needs[n]), default=-1)
            dying = self._overwritten(op, uses)
            if (inside := next((t for t in dying if self.where[t.op.name] == after), None)) is not None:
                self.inside.add(inside.name)
                if inside.name in self.reused:
                    self.reused[_overwriting(op).name] = self.reused.pop(inside.name)
            else:
                after = len(chains)
                chains.append([])
                if dying and self._phase(op) != "forward":
                    self.reused[_overwriting(op).name] = dying[0].name
            chains[after].append(op)
            self.where[n] = after
        return chains

    def _makers_of_lists(self, loop: tf.Operation, readers: Mapping[str, int]) -> list[tf.Operation]:
        """The ops that make all lists which a loop is given and nothing else reads; none if it is given another list."""
        found: dict[str, tf.Operation] = {}
        stack = [t for t in loop.inputs if t.dtype == tf.variant]
        for t in stack:
            maker = t.op
            alone = self.kinds[maker.name] == "op" and readers[maker.name] == 1 and t.ref() not in self.kept
            if alone and maker.type in EMPTY_LISTS | MOVES | {"TensorListFromTensor"}:
                found[maker.name] = maker
                stack += () if maker.type in EMPTY_LISTS else [self._base(maker.inputs[0])]
            elif t.dtype == tf.variant:
                return []
        return sorted(found.values(), key=lambda op: self.index[op.name])

    def _overwritten(self, op: tf.Operation, uses: Counter[Any]) -> list[tf.Tensor]:
        """The inputs that nothing else reads, and into whose buffers an op can write its output."""
        found = [self._base(op.inputs[i]) for i in FORWARDS.get(op.type, ()) if i < len(op.inputs)]
        return [
            t
            for t in found
            if (out := _overwriting(op)).dtype == t.dtype
            and 0 < tensor_bytes(t) == tensor_bytes(out)
            and self.kinds[t.op.name] == "op"
            and t.op.type not in OPAQUE
            and uses[t.ref()] == 1
            and t.ref() not in self.kept
            and not any(map(is_open, (*t.op.inputs, *t.op.outputs, *op.inputs)))
        ]

    def _phase(self, op: tf.Operation) -> Phase:
        return self.trace.phase(self.index[op.name])

    def _number(self, members: Sequence[Sequence[tf.Operation]]) -> list[Value]:
        """A value for every output of every op of the graph; the lists that a loop returns share tensors, and are one value."""
        same: dict[str, str] = {}
        for *makers, op in members:
            lists = [t.name for t in op.outputs if t.dtype == tf.variant and makers and op.type in LOOPS]
            same.update((name, lists[0]) for name in lists)
        made = [t for chain in members for op in chain for t in op.outputs if t.name not in self.inside]
        tensors = [t for t in made if same.get(t.name, t.name) == t.name]
        number = {t.name: v for v, t in enumerate(tensors)}
        self.values = {t.name: number[same.get(t.name, t.name)] for t in made}
        base = [self.values.get(self.reused.get(t.name, "")) for t in tensors]
        sizes = [tensor_bytes(t) if b is None else 0 for t, b in zip(tensors, base, strict=True)]
        return [Value(t.name, s, b, t.ref() in self.kept) for t, s, b in zip(tensors, sizes, base, strict=True)]

    def _op(self, chain: Sequence[tf.Operation], measures: Mapping[str, OpCost], clobbers: Mapping[str, Sequence[str]]) -> Op:
        first = named_by(chain)
        read = dict.fromkeys(s.name for op in chain for s in self._sources(op) if self.where[s.op.name] != self.where[first.name])
        return Op(
            name=first.name,
            inputs=tuple(dict.fromkeys(self.values[n] for n in read)),
            outputs=tuple(dict.fromkeys(self.values[t.name] for op in chain for t in op.outputs if t.name in self.values)),
            cost=sum(measures[op.name].cost_ns for op in chain),
            workspace_bytes=max(measures[op.name].workspace_bytes for op in chain),
            # An op may change a list that it is given, and what an op overwrites must not be kept to compute it again.
            recomputable=all(self.kinds[op.name] == "op" and self._phase(op) != "optimizer" for op in chain)
            and (first is not chain[0] or all(t.dtype != tf.variant for t in first.outputs))
            and not any(t.name in self.reused for t in chain[-1].outputs),
            clobbered_by=tuple(sorted({self.where[c] for op in chain for c in clobbers[op.name]})),
            phase=self._phase(first),
            kind=first.type,
            source=first.name.rpartition("/")[0],
        )

    def _resident_bytes(self) -> int:
        """Bytes of variables and other captured tensors, of the batch and of constants."""
        variables = {id(v.handle): v.shape.num_elements() * v.dtype.size for v in self.trace.variables}
        outside = [variables.get(id(t), 0) if t.dtype == tf.resource else tensor_bytes(t) for t in self.trace.captured.values()]
        constants = [op for op in self.ops if op.type == "Const" and op.name in self.needed]
        return sum(outside) + sum(map(tensor_bytes, self.trace.arguments)) + sum(map(output_bytes, constants))

    def _log_opaque(self) -> None:
        opaque = [op for op in self.real if op.type in OPAQUE and not op.node_def.attr["_XlaMustCompile"].b]
        if opaque:
            names = ", ".join(f"{op.name} ({op.type})" for op in opaque)
            _log.info("loops, branches and nested functions are each one op of the plan, measured and not planned: %s", names)


def _overwriting(op: tf.Operation) -> tf.Tensor:
    """The output of an op that can overwrite an input."""
    return op.outputs[FORWARDED_TO.get(op.type, 0)]


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
