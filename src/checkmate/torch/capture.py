"""A joint forward and backward FX graph as a `checkmate.Graph`: sole reader of the nodes' metadata."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from checkmate.core.graph import Graph, Op, Value
from checkmate.torch.classify import Facts, facts, reads, trains_batch_norm
from checkmate.torch.compat import is_tangent
from checkmate.torch.rng import state_bytes
from checkmate.torch.sizes import leaves, storage_bytes, storage_key
from checkmate.torch.source import source_of

BOUNDARY = "boundary"
"""Kind of the op between forward and backward: it reads the forward's outputs and writes the tangents."""

SEED_BYTES = 16
"""Tangents up to this size belong to a scalar: who calls ``backward`` holds them until it returns."""

_EXTERNAL = -1  # storage of a parameter, buffer, batch or constant: resident


@dataclass(frozen=True, slots=True)
class OpCost:
    """What one computation of an op takes.

    Attributes:
        cost_ns: Nanoseconds.
        workspace_bytes: Bytes that live only while it runs.
    """

    cost_ns: int
    workspace_bytes: int


Costs = Callable[[Sequence[fx.Node]], Sequence[OpCost]]
"""Costs of nodes, in order."""


@dataclass(frozen=True, slots=True)
class Member:
    """An op of the graph and the nodes it stands for.

    Attributes:
        node: The ``call_function`` node, or None for the boundary.
        getitems: Nodes that pick one of its outputs.
    """

    node: fx.Node | None
    getitems: tuple[fx.Node, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A graph together with the joint FX graph that it describes.

    Attributes:
        graph: What planners see.
        joint: The joint module, untouched.
        members: Nodes of each op. Shape ``[op]``.
        boundary: Index of the boundary op.
        num_fwd_outputs: How many of the joint outputs belong to the forward.
    """

    graph: Graph
    joint: fx.GraphModule
    members: tuple[Member, ...]
    boundary: int
    num_fwd_outputs: int

    @property
    def forward_outputs(self) -> list[Any]:
        """What the forward returns."""
        return list(_outputs(self.joint)[: self.num_fwd_outputs])

    @property
    def backward_outputs(self) -> list[Any]:
        """What the backward returns: the gradients."""
        return list(_outputs(self.joint)[self.num_fwd_outputs :])


def capture_joint(
    joint: fx.GraphModule,
    num_fwd_outputs: int,
    costs: Costs,
    *,
    hold_outputs: bool = True,
    extra_resident_bytes: int = 0,
    name: str = "",
) -> Capture:
    """The graph of a training step that AOTAutograd traced.

    Args:
        joint: The joint module; it is not changed.
        num_fwd_outputs: How many of its outputs belong to the forward.
        costs: Costs and workspace of nodes.
        hold_outputs: Whether the caller holds the forward's outputs to the end of the step; otherwise
            they are gone when the backward begins, unless it needs them.
        extra_resident_bytes: What is resident besides the inputs of the graph: gradients that are
            there already, optimizer state.
        name: Name of the graph.

    Raises:
        GraphError: A size depends on data.
    """
    return _Builder(joint, num_fwd_outputs, hold_outputs).build(costs, extra_resident_bytes, name)


def _outputs(joint: fx.GraphModule) -> Sequence[Any]:
    output = next(iter(reversed(joint.graph.nodes)))
    return output.args[0]


@dataclass(eq=False, slots=True)
class _Draft:
    node: fx.Node
    facts: Facts
    backward: bool
    getitems: list[fx.Node] = field(default_factory=list)


class _Builder:
    def __init__(self, joint: fx.GraphModule, num_fwd_outputs: int, hold_outputs: bool) -> None:
        self.joint = joint
        self.num_fwd_outputs = num_fwd_outputs
        self.hold_outputs = hold_outputs
        self.nodes = list(joint.graph.nodes)
        outputs = _outputs(joint)
        self.forward_outputs = [o for o in outputs[:num_fwd_outputs] if isinstance(o, fx.Node)]
        self.backward_outputs = [o for o in outputs[num_fwd_outputs:] if isinstance(o, fx.Node)]
        self.drafts: dict[fx.Node, _Draft] = {}  # node, getitems included -> its op
        self.owner: dict[int, int] = {}  # storage -> value that owns it
        self.values: list[tuple[str, int, int | None]] = []
        self.value_of: dict[fx.Node, int] = {}
        self.seeds: set[int] = set()  # tangents of scalars

    def build(self, costs: Costs, extra_resident_bytes: int, name: str) -> Capture:
        resident = self._externals() + extra_resident_bytes
        self._draft()
        needed = self._needed()
        forward = [d for d in self._unique() if not d.backward and d.node in needed]
        backward = [d for d in self._unique() if d.backward and d.node in needed]
        boundary = len(forward)
        outputs: list[tuple[int, ...]] = [self._allocate(d) for d in forward]
        outputs.append(self._tangents())
        outputs += [self._allocate(d) for d in backward]
        found = costs([d.node for d in forward + backward])
        index = {d.node: i + (i >= boundary) for i, d in enumerate(forward + backward)}
        mutators = self._mutators(index)
        kept, single = self._kept()
        ops: list[Op] = []
        for draft, cost in zip(forward + backward, found, strict=True):
            if len(ops) == boundary:
                ops.append(self._boundary_op(outputs[boundary]))
            ops.append(self._op(draft, index, outputs[index[draft.node]], cost, mutators, single))
        if len(ops) == boundary:
            ops.append(self._boundary_op(outputs[boundary]))
        graph = Graph(
            ops=tuple(ops),
            values=tuple(Value(n, size, base=base, kept=v in kept) for v, (n, size, base) in enumerate(self.values)),
            order=self._order(forward, backward, index, boundary, mutators, ops),
            resident_bytes=resident,
            name=name,
        )
        members = [Member(d.node, tuple(d.getitems)) for d in forward + backward]
        members.insert(boundary, Member(None))
        return Capture(graph, self.joint, tuple(members), boundary, self.num_fwd_outputs)

    def _externals(self) -> int:
        """Note every storage that is there before the step; return their bytes."""
        total = 0
        for node in self.nodes:
            if node.op not in ("placeholder", "get_attr") or is_tangent(node):
                continue
            for tensor in leaves(node.meta.get("val")):
                if storage_key(tensor) not in self.owner:
                    self.owner[storage_key(tensor)] = _EXTERNAL
                    total += storage_bytes(tensor)
        return total

    def _draft(self) -> None:
        backward = {n for n in self.nodes if is_tangent(n)}
        for node in self.nodes:
            if node.op != "call_function":
                continue
            tag = str(node.meta.get("partitioner_tag", ""))
            if "backward" in tag or any(i in backward for i in node.all_input_nodes):
                backward.add(node)
            source = node.args[0] if node.target is operator.getitem else None
            if source in self.drafts:
                draft = self.drafts[source]  # type: ignore[index]
                draft.getitems.append(node)
            else:
                draft = _Draft(node, facts(node), node in backward)
            self.drafts[node] = draft

    def _unique(self) -> list[_Draft]:
        return [d for n, d in self.drafts.items() if n is d.node]

    def _needed(self) -> set[fx.Node]:
        """Nodes that an output, an effect or the random stream of the forward needs."""
        stack = [*self.forward_outputs, *self.backward_outputs]
        stack += [d.node for d in self._unique() if d.facts.effect or (d.facts.random and not d.backward)]
        needed: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            draft = self.drafts.get(node)
            if draft is None or draft.node in needed:
                continue
            needed.add(draft.node)
            stack += reads(draft.node)
        return needed

    def _allocate(self, draft: _Draft) -> tuple[int, ...]:
        """Make the values of an op, also of outputs that nobody reads; return them."""
        paths = dict(_tensors(draft.node.meta.get("val")))
        names = {_path(g, draft.node): g.name for g in reversed(draft.getitems)}
        made: dict[tuple[int, ...], int] = {}
        for path, tensor in paths.items():
            made[path] = len(self.values)
            owner = self.owner.setdefault(storage_key(tensor), len(self.values))
            label = names.get(path, ".".join(map(str, (draft.node.name, *path))))
            if owner == len(self.values):
                self.values.append((label, storage_bytes(tensor), None))
            else:
                self.values.append((label, 0, None if owner == _EXTERNAL else owner))
        if not made:  # a number that other ops read
            made[()] = len(self.values)
            self.values.append((draft.node.name, 0, None))
        for node in (draft.node, *draft.getitems):
            value = made.get(_path(node, draft.node))
            if value is not None:
                self.value_of[node] = value
        return tuple(made.values())

    def _tangents(self) -> tuple[int, ...]:
        made: list[int] = []
        for node in self.nodes:
            if not is_tangent(node):
                continue
            for leaf in leaves(node.meta.get("val")):
                owner = self.owner.setdefault(storage_key(leaf), len(self.values))
                if storage_bytes(leaf) <= SEED_BYTES:
                    self.seeds.add(len(self.values))
                own = owner == len(self.values)
                self.value_of[node] = len(self.values)
                made.append(len(self.values))
                self.values.append((node.name, storage_bytes(leaf) if own else 0, None if own else owner))
        return tuple(made)

    def _read_values(self, node: fx.Node) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for read in reads(node):
            if read in self.value_of:
                found[self.value_of[read]] = None
            elif read in self.drafts:  # a tuple read as a whole
                inside = [self.value_of[g] for g in self.drafts[read].getitems if g in self.value_of]
                found.update(dict.fromkeys(inside))
        return tuple(found)

    def _root(self, v: int) -> int:
        base = self.values[v][2]
        return v if base is None else base

    def _kept(self) -> tuple[set[int], set[int]]:
        """Values live at the end, and those whose op may run only once.

        What the caller holds is the instance that the forward returned: a later one would be another
        tensor, so neither it nor what it is a view of is ever made again.
        """
        held = {self.value_of[o] for o in self.forward_outputs if o in self.value_of} if self.hold_outputs else set()
        gradients = {self.value_of[o] for o in self.backward_outputs if o in self.value_of}
        return held | gradients | self.seeds, held | {self._root(v) for v in held}

    def _mutators(self, index: dict[fx.Node, int]) -> dict[int, list[int]]:
        """Ops that overwrite each storage, ascending."""
        found: dict[int, list[int]] = {}
        for node, o in index.items():
            for position in self.drafts[node].facts.mutates:
                target = node.args[position] if position < len(node.args) else None
                for written in target if isinstance(target, (list, tuple)) else (target,):
                    if isinstance(written, fx.Node):
                        for leaf in leaves(written.meta.get("val")):
                            found.setdefault(storage_key(leaf), []).append(o)
        return found

    def _op(
        self,
        draft: _Draft,
        index: dict[fx.Node, int],
        outputs: tuple[int, ...],
        cost: OpCost,
        mutators: dict[int, list[int]],
        single: set[int],
    ) -> Op:
        node = draft.node
        me = index[node]
        later = set() if trains_batch_norm(node) else {o for o in self._overwriters(node, mutators) if o > me}
        replay = state_bytes(node) if draft.facts.random and not draft.facts.pinned else 0
        return Op(
            name=node.name,
            inputs=self._read_values(node),
            outputs=outputs,
            cost=cost.cost_ns,
            # While a state is replayed the generator's own is put aside.
            workspace_bytes=cost.workspace_bytes + replay,
            replay_bytes=replay,
            recomputable=not (draft.facts.pinned or any(v in single for v in outputs) or not leaves(node.meta.get("val"))),
            clobbered_by=tuple(sorted(later)),
            phase="backward" if draft.backward else "forward",
            kind=str(node.target),
            source=source_of(node),
        )

    def _boundary_op(self, tangents: tuple[int, ...]) -> Op:
        returned = dict.fromkeys(self.value_of[o] for o in self.forward_outputs if o in self.value_of)
        return Op(BOUNDARY, tuple(returned), tangents, cost=0, recomputable=False, phase="loss", kind=BOUNDARY)

    def _overwriters(self, node: fx.Node, mutators: dict[int, list[int]]) -> Iterator[int]:
        for read in reads(node):
            for tensor in leaves(read.meta.get("val")):
                yield from mutators.get(storage_key(tensor), ())

    def _order(
        self,
        forward: list[_Draft],
        backward: list[_Draft],
        index: dict[fx.Node, int],
        boundary: int,
        mutators: dict[int, list[int]],
        ops: list[Op],
    ) -> tuple[tuple[int, int], ...]:
        pairs: dict[tuple[int, int], None] = {}
        for chain in (
            [index[d.node] for d in forward + backward if d.facts.random],
            [index[d.node] for d in forward + backward if d.facts.effect],
        ):
            pairs.update(dict.fromkeys(zip(chain, chain[1:], strict=False)))
        # The random stream and every effect of the forward belong to the forward.
        pairs.update(dict.fromkeys((index[d.node], boundary) for d in forward if d.facts.random or d.facts.effect))
        pairs.update(dict.fromkeys((index[d.node], boundary) for d in forward if not leaves(d.node.meta.get("val"))))
        after = set(ops[boundary].outputs)
        for draft in backward:
            o = index[draft.node]
            if any(v in after for v in ops[o].inputs):
                after.update(ops[o].outputs)
            else:
                pairs[boundary, o] = None
        for draft in forward + backward:
            o = index[draft.node]
            if draft.facts.effect:
                continue
            pairs.update(dict.fromkeys((m, o) for m in self._overwriters(draft.node, mutators) if m < o))
        return tuple(sorted(pairs))


def _tensors(value: object, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(path, tensor) of every tensor in what an op returns."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for position, inside in enumerate(value):
            yield from _tensors(inside, (*path, position))


def _path(node: fx.Node, producer: fx.Node) -> tuple[int, ...]:
    """Where in what ``producer`` returns a chain of getitems ends."""
    path: list[int] = []
    while node is not producer:
        path.append(node.args[1])  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return tuple(reversed(path))
