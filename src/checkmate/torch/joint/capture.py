"""Capture: a joint forward and backward FX graph as a `checkmate.core.graph.Graph`."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import msgspec
import torch
from torch import fx

from checkmate.core.budget import result_bytes
from checkmate.core.errors import GraphError
from checkmate.core.graph import BOUNDARY, Graph, Op, Value
from checkmate.cost.store import OpCost
from checkmate.solvers.walks import reached
from checkmate.torch._compat.aot import in_backward, is_tangent
from checkmate.torch._compat.dispatch import run_with_rng_state
from checkmate.torch.graph.host_weights import ON_DEVICE
from checkmate.torch.graph.op_properties import (
    BATCH_NORM_UPDATE,
    DESCRIPTION,
    FORWARD_ONLY,
    Mutators,
    OpProperties,
    mutators,
    op_names,
    op_properties,
    overwriters,
    trains_batch_norm,
    used_inputs,
)
from checkmate.torch.graph.optimizer_ops import UPDATE
from checkmate.torch.graph.provenance import source_of
from checkmate.torch.graph.rng import rng_state_bytes
from checkmate.torch.graph.storages import leaves, storage_bytes, storage_key
from checkmate.torch.graph.symbolic import size_arithmetic
from checkmate.torch.graph.traced import producer, results
from checkmate.torch.joint.values import Values

Costs = Callable[[Sequence[fx.Node]], Sequence[OpCost]]
"""Maps nodes to their costs, in order."""


@dataclass(frozen=True, slots=True)
class Member:
    """The FX nodes of one op of a captured graph: the op, and the getitems that select its outputs."""

    node: fx.Node | None  # None for the boundary
    getitems: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A captured graph together with the joint FX graph that it describes."""

    graph: Graph
    joint: fx.GraphModule  # unchanged
    members: tuple[Member, ...]  # nodes of each op
    num_fwd_outputs: int  # number of joint outputs that are the forward's; all in a whole step
    value_of: Mapping[fx.Node, int] = field(default_factory=dict)  # of nodes that return one tensor, getitems and tangents too

    @property
    def forward_outputs(self) -> list[Any]:
        """Outputs of the forward: nodes, numbers or None."""
        return list(results(self.joint)[: self.num_fwd_outputs])

    @property
    def backward_outputs(self) -> list[Any]:
        """Outputs of the backward: the gradients, nodes or None."""
        return list(results(self.joint)[self.num_fwd_outputs :])


def capture_joint(
    joint: fx.GraphModule,
    num_fwd_outputs: int | None,
    costs: Costs,
    *,
    hold_outputs: bool = True,
    hold_last: int = 0,
    no_recompute: frozenset[str] = frozenset(),
    extra_resident_bytes: int = 0,
) -> Capture:
    """Capture a training step that AOTAutograd traced; the joint module is not changed.

    ``num_fwd_outputs`` is None for a whole step with gradients and updates: it has no boundary, and all of its outputs are live
    at its end. With ``hold_outputs`` the caller holds the forward's outputs to the end of the step; otherwise they can be freed
    when the backward begins, unless it reads them. ``hold_last`` is how many copies of the results exist besides, for example
    those of the step before, as in ``prediction, loss = step(x, y)``. ``extra_resident_bytes`` are resident bytes besides the
    inputs of the graph, for example existing gradients and optimizer state.

    Raises:
        GraphError: A size depends on data, or a tensor is sparse.
    """
    capture = _Builder(joint, num_fwd_outputs, hold_outputs, no_recompute).build(costs, extra_resident_bytes)
    for _ in range(hold_last):
        resident_bytes = capture.graph.resident_bytes + result_bytes(capture.graph)
        capture = replace(capture, graph=msgspec.structs.replace(capture.graph, resident_bytes=resident_bytes))
    return capture


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedGraph:
    """A captured graph with a boundary, and the values of its arguments and results."""

    graph: Graph
    readers: tuple[tuple[int, ...], ...]  # ops that read each input
    views: Mapping[int, int]  # values that are views of an input, with the input
    returned: tuple[int | None, ...]  # value of each result of the forward; None for a number or an input
    tangents: tuple[int | None, ...]  # value of each gradient passed to the backward; None if not read
    gradients: tuple[int | None, ...]  # value of each result of the backward, an input's gradient, or None

    @property
    def boundary(self) -> int:
        """The op between forward and backward."""
        assert self.graph.boundary is not None
        return self.graph.boundary


def captured_graph(capture: Capture) -> CapturedGraph:
    """The captured graph with its values by argument and result, in AOTAutograd's order."""
    placeholders = [n for n in capture.joint.graph.nodes if n.op == "placeholder"]
    inputs = [n for n in placeholders if not is_tangent(n)]
    readers: dict[fx.Node, list[int]] = {n: [] for n in inputs}
    for o, member in enumerate(capture.members):
        for read in () if member.node is None else used_inputs(member.node):
            if read in readers:
                readers[read].append(o)
    input_of = {storage_key(t): k for k, n in enumerate(inputs) for t in leaves(n.meta.get("val"))}
    graph, views = capture.graph, dict[int, int]()
    for node, value in capture.value_of.items():
        if graph.values[value].base is None and not graph.values[value].size_bytes:
            views.update((value, input_of[k]) for k in map(storage_key, leaves(node.meta.get("val"))) if k in input_of)
    return CapturedGraph(
        graph=graph,
        readers=tuple(tuple(readers[n]) for n in inputs),
        views=views,
        returned=tuple(map(capture.value_of.get, capture.forward_outputs)),
        tangents=tuple(capture.value_of.get(n) for n in placeholders if is_tangent(n)),
        gradients=tuple(map(capture.value_of.get, capture.backward_outputs)),
    )


def reads_of_overwritable(captured: CapturedGraph, overwritable: Set[int]) -> frozenset[int]:
    """Ops of a forward that read inputs that the backward of the plain step does not read.

    Until a step has shown that the caller does not change these inputs, these ops may not be computed again in the backward.
    """
    readers = {k: set(captured.readers[k]) for k in overwritable}
    for o, op in enumerate(captured.graph.ops):
        for k in {captured.views[v] for v in op.inputs if v in captured.views} & overwritable:
            readers[k].add(o)
    early = [ops for ops in readers.values() if max(ops, default=0) < captured.boundary]
    return frozenset(o for ops in early for o in ops)


def _refuse_sparse(nodes: Sequence[fx.Node]) -> None:
    for node in nodes:
        if any(tensor.layout is not torch.strided for tensor in leaves(node.meta.get("val"))):
            raise GraphError(
                f"{node.name!r} ({source_of(node)}) is a sparse tensor: how much memory it takes depends on the data",
                hint="make the gradients of embeddings dense: nn.Embedding(..., sparse=False); or exclude the module from "
                "compilation: torch.compiler.disable(embedding)",
            )


class _Builder:
    """Builds the `Capture` of a joint module."""

    def __init__(
        self, joint: fx.GraphModule, num_fwd_outputs: int | None, hold_outputs: bool, no_recompute: frozenset[str]
    ) -> None:
        outputs = results(joint)
        self.joint = joint
        self.whole = num_fwd_outputs is None
        self.num_fwd_outputs = len(outputs) if num_fwd_outputs is None else num_fwd_outputs
        self.hold_outputs = hold_outputs or self.whole
        self.no_recompute = no_recompute
        self.nodes = list(joint.graph.nodes)
        self.forward_outputs = [o for o in outputs[: self.num_fwd_outputs] if isinstance(o, fx.Node)]
        self.backward_outputs = [o for o in outputs[self.num_fwd_outputs :] if isinstance(o, fx.Node)]
        self.backward = {n for n in self.nodes if is_tangent(n)}
        self.getitems = self._collected()
        self.properties = {op: op_properties(op) for op in self.getitems}
        self.values = Values()
        self.boundary: int | None = None

    def build(self, costs: Costs, extra_resident_bytes: int) -> Capture:
        _refuse_sparse(self.nodes)
        resident = self.values.add_external(self.nodes) + extra_resident_bytes
        needed = self._needed()
        forward = [op for op in self.getitems if op in needed and (self.whole or op not in self.backward)]
        forward.sort(key=lambda op: op.target is not ON_DEVICE)
        backward = [op for op in self.getitems if op in needed and not self.whole and op in self.backward]
        boundary = self.boundary = None if self.whole else len(forward)
        # Values are numbered in the order of ops: forward, boundary (its tangents), backward.
        made = [self.values.outputs(op, self.getitems[op]) for op in forward]
        tangents = self.values.tangents(self.nodes)
        made += [self.values.outputs(op, self.getitems[op]) for op in backward]
        listed = [(i + (i >= len(forward)), op, self.properties[op]) for i, op in enumerate(forward + backward)]
        known = mutators(listed)
        kept, single = self._kept()
        each = zip(listed, made, self._costs(costs, forward + backward), strict=True)
        ops = [self._op(node, o, outputs, cost, known, single) for (o, node, _), outputs, cost in each]
        members = [Member(op, tuple(self.getitems[op])) for op in forward + backward]
        if boundary is not None:
            members.insert(boundary, Member(None))
            returned = tuple(dict.fromkeys(self.values.of_node[o] for o in self.forward_outputs if o in self.values.of_node))
            ops.insert(boundary, Op(BOUNDARY, returned, tangents, cost=0, recomputable=False, phase="loss", kind=BOUNDARY))
        values = self.values.all(kept, {self.values.of_node[op] for op in forward if op.target is ON_DEVICE})
        graph = Graph(
            ops=tuple(ops),
            values=values,
            order=_order_pairs(ops, values, listed, boundary, known),
            resident_bytes=resident,
        )
        return Capture(graph, self.joint, tuple(members), self.num_fwd_outputs, dict(self.values.of_node))

    def _costs(self, costs: Costs, nodes: Sequence[fx.Node]) -> Iterator[OpCost]:
        """The costs of ops; what is on the device when the step begins costs nothing."""
        found = iter(costs([n for n in nodes if n.target is not ON_DEVICE]))
        return (OpCost(0, 0) if n.target is ON_DEVICE else next(found) for n in nodes)

    def _collected(self) -> dict[fx.Node, list[fx.Node]]:
        """The ops with the getitems that select their outputs; those of the backward are added to `backward`.

        A whole step has no ``partitioner_tag``, because AOTAutograd traced it as an inference graph: the mark of autograd
        decides. In a joint graph all nodes that depend on a tangent are backward: passes add nodes without tags.
        """
        found: dict[fx.Node, list[fx.Node]] = {}
        sizes = size_arithmetic(self.nodes)
        for node in self.nodes:
            if node.op != "call_function" or node in sizes:
                continue
            tag = str(node.meta.get("partitioner_tag", ""))
            if self.whole:
                later = in_backward(node) or node.target is UPDATE
            else:
                later = "backward" in tag or any(i in self.backward for i in node.all_input_nodes)
            if later:
                self.backward.add(node)
            selected = found.setdefault(producer(node), [])
            if node.target is operator.getitem:
                selected.append(node)
        return found

    def _needed(self) -> set[fx.Node]:
        """Nodes that an output, a side effect or the random stream of the forward depends on; all others are dead code.

        Dead random ops of the forward count too: they advance the generator, as in the user's program.
        """
        roots = [*self.forward_outputs, *self.backward_outputs]
        roots += [op for op, known in self.properties.items() if known.effect or (known.random and op not in self.backward)]
        return reached(map(producer, roots), lambda op: map(producer, used_inputs(op)), self.getitems.__contains__)

    def _kept(self) -> tuple[set[int], set[int]]:
        """Values that are live at the end of the step, and values whose op must run exactly once.

        The caller holds the storages that the forward returned. A second computation would be a second allocation: the op that
        allocates this storage runs once. A view of it may be computed again, since it refers to the same storage.
        """
        held = {self.values.of_node[o] for o in self.forward_outputs if o in self.values.of_node} if self.hold_outputs else set()
        gradients = {self.values.of_node[o] for o in self.backward_outputs if o in self.values.of_node}
        return held | gradients | self.values.scalar_tangents, {self.values.root(v) for v in held}

    def _op(self, node: fx.Node, me: int, outputs: tuple[int, ...], cost: OpCost, known: Mutators, single: set[int]) -> Op:
        properties = self.properties[node]
        # No computation of this op is allowed after an op that overwrites one of its inputs. BatchNorm is exempt: recomputed
        # without running statistics (partition/apply_plan.py), it does not read the statistics that it overwrites.
        later = set[int]() if trains_batch_norm(node) else {o for o in overwriters(node, known) if o > me}
        if node.meta.get(FORWARD_ONLY) and self.boundary is not None:
            later.add(self.boundary)
        replay = rng_state_bytes(node) if properties.random and not properties.pinned else 0
        replayed = rng_state_bytes(node) if node.target is run_with_rng_state else 0
        again = sum(map(storage_bytes, node.meta["val"][1:3])) if node.target is BATCH_NORM_UPDATE else 0
        return Op(
            name=node.name,
            inputs=self.values.read_by(node),
            outputs=outputs,
            cost=cost.cost_ns,
            # A replay saves the generator's current state, to restore it. A graph has no workspace for recomputations alone:
            # the state counts for every computation of a random op, and the statistics that a recomputation of a BatchNorm makes.
            workspace_bytes=cost.workspace_bytes + replay + replayed + again,
            replay_bytes=replay,
            recomputable=not (
                properties.pinned
                or node.target is ON_DEVICE
                or any(v in single for v in outputs)
                or not leaves(node.meta.get("val"))
                or not self.no_recompute.isdisjoint(op_names(node))
            ),
            clobbered_by=tuple(sorted(later)),
            phase="optimizer" if node.target is UPDATE else "backward" if node in self.backward else "forward",
            kind=node.meta.get(DESCRIPTION, str(node.target)),
            source=source_of(node),
        )


def _order_pairs(
    ops: Sequence[Op],
    values: Sequence[Value],
    listed: Sequence[tuple[int, fx.Node, OpProperties]],
    boundary: int | None,
    known: Mutators,
) -> tuple[tuple[int, int], ...]:
    """Pairs of ops ``(a, b)``: the first computation of ``a`` must come before the first computation of ``b``.

    - Random ops keep their order, and each draws the same numbers as in the original program; sequenced ops keep theirs too.
    - Ops that overwrite one storage keep their order, and an op that reads it comes after the earlier overwriters. (That it comes
      before the later ones is a constraint on all its computations: ``Op.clobbered_by``.)
    - Random ops, side effects and numbers of the forward come before the boundary: the caller sees them after the forward.
    - Ops of the backward that allocate come after the boundary; otherwise they would be computed in the forward.
    """
    random = [o for o, _, properties in listed if properties.random]
    sequenced = [o for o, _, properties in listed if properties.sequenced]
    pairs = {*pairwise(random), *pairwise(sequenced)}
    pairs.update((a, b) for overwriting in known.values() for a, b in pairwise(overwriting) if a < b)
    after = set() if boundary is None else set(ops[boundary].outputs)  # values that depend on the boundary by data
    for o, node, properties in listed:
        pairs.update((m, o) for m in overwriters(node, known) if m < o)
        if boundary is None:
            continue
        if o < boundary:
            if properties.random or properties.effect or not leaves(node.meta.get("val")):
                pairs.add((o, boundary))
        elif any(v in after for v in ops[o].inputs):
            after.update(ops[o].outputs)
        elif any(values[v].base is None for v in ops[o].outputs):
            # Views of forward values get no pair: planners fold them into the ops that read them.
            pairs.add((boundary, o))
    return tuple(sorted(pairs))
