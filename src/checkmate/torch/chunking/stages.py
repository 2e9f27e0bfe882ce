"""Stages: the parts of a region that can each run as one op, because no op outside of the region comes between their ops.

The forward of a layer and its backward belong to one region, and the ops between them are outside: the backward's stage needs
gradients that depend on the stage of the forward. A stage computes large tensors of an earlier stage again, piece by piece, and
reads small tensors, which the earlier stage returns. If the tangents of a region do not depend on its own results, as in the head
in a whole step, the region has one stage: forward and backward of a piece follow each other and nothing is computed twice. A
region that computes its gradients with a tangent of one (`checkmate.torch.chunking.unit_tangent`) also has one stage.

Stages run in *waves*, with ops outside between two of them. Ops of one wave that share no computation are separate stages: ops
for the gradients of a convolution's input and of its weight, for example, need less memory one after the other.

Growth ends at small tensors, which a stage reads whole. Some of them exist for the region alone, and are computed from a smaller
tensor, such as a mask of booleans, or from one that is alive anyway: the gradient of attention's output is a product of the
gradient that the residual connection passes on. The op that computes them becomes part of the region.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from checkmate.solvers.walks import reached
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch.chunking.regions import Allows, Region, extended
from checkmate.torch.chunking.rules.placements import Placement, Split
from checkmate.torch.chunking.unit_tangent import UnitTangent
from checkmate.torch.graph.op_properties import is_pointwise, makes_views
from checkmate.torch.graph.provenance import place_of
from checkmate.torch.graph.storages import storage_key
from checkmate.torch.graph.traced import held_bytes, inputs, outputs, own_bytes, producer, readers, size_bytes, tensor


@dataclass(eq=False, slots=True)
class Stage:
    """Ops of a region that run as one op."""

    region: Region
    unit_tangent: UnitTangent | None  # the tangent that the region takes to be one
    wave: int  # how many waves of the region have to run before it, at least
    new_ops: tuple[fx.Node, ...]  # ops that belong to this stage alone, in the order of the graph
    all_ops: tuple[fx.Node, ...] = ()  # those and the ops of earlier stages that run again, in the order of the graph
    # The tensors that it reads from outside and their cuts: one op may read a tensor whole, and another may read it in slices.
    operands: dict[tuple[fx.Node, Placement], None] = field(default_factory=dict)
    results: dict[fx.Node, Placement] = field(default_factory=dict)  # assembled from slices, or a sum
    copies: set[fx.Node] = field(default_factory=set)  # views among these, returned without their bases

    def returned(self, value: fx.Node) -> torch.Tensor:
        """A traced result; if it is the copy of a view, a new tensor each time."""
        traced = tensor(value)
        if value not in self.copies:
            return traced
        with traced.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            return torch.empty_like(traced)

    @property
    def description(self) -> str:
        """The place of its region in the model, for people."""
        return f"{place_of(self.region.rules)} in {self.region.count} pieces"


def stages_of(region: Region, graph: fx.Graph, unit_tangent: UnitTangent | None = None) -> list[Stage]:
    """The stages of a region, in the order in which they can run; no op has to wait for a tangent that is taken to be one."""
    return _Stages(region, graph, unit_tangent).found


def waves_of(region: Region, graph: fx.Graph) -> dict[fx.Node, int]:
    """How often a path to each op of a region leaves the region and comes back."""
    return _Stages(region, graph, None).wave


def kept_outside(region: Region) -> set[fx.Node]:
    """Tensors made in a region that ops outside of it read, or that ops of it read whole.

    The base of a view takes the view's place. The views themselves are kept if all views of a tensor have fewer bytes than the
    base and are only computed with: then copies can take their place.
    """
    found: set[fx.Node] = set()
    views: dict[fx.Node, set[fx.Node]] = {}  # by base
    for op in region.rules:
        for value, user in readers(op):
            if user in region.rules and not region.reads_whole(user, value):
                continue
            base = _base(value, region)
            if base is None:
                continue
            if base is value or region.exact or not _can_copy(value, user, region):
                found.add(base)
            views.setdefault(base, set()).add(value)
    for base, copied in views.items():
        if base not in found:
            found |= copied if sum(map(own_bytes, copied)) < size_bytes(base) else {base}
    return found


def _base(value: fx.Node, region: Region) -> fx.Node | None:
    """The base of a view that a region makes, or a tensor itself; None if the base is not made in the region."""
    while makes_views(producer(value)):
        (value, *_) = inputs(producer(value))
        if producer(value) not in region.rules:
            return None
    return value


def _can_copy(view: fx.Node, user: fx.Node, region: Region) -> bool:
    """Whether an op outside of a region can read a copy of a view instead."""
    pure = isinstance(user.target, OpOverload) and not user.target._schema.is_mutable
    return isinstance(region.made_as(view), Split) and pure and not makes_views(user)


def _widens(op: fx.Node) -> bool:
    """Whether an op makes, element by element, a tensor of more bytes than its operands have."""
    read = {value: held_bytes(value) for value in inputs(op)}
    made = sum(own_bytes(value) for value in outputs(op) if value is not None)
    return is_pointwise(op) and sum(read.values()) < made


def with_private_operands(region: Region, stages: Sequence[Stage], graph: fx.Graph, allows: Allows) -> Region:
    """A region with the ops that compute tensors for it alone, from operands that take less memory."""
    for stage in stages:
        elsewhere = {_storage(value) for other in stages if other is not stage for value, _ in other.operands}
        for value, placement in stage.operands:
            path = _path_to(value)
            if not isinstance(placement, Split) or not path or not _is_private(path, region):
                continue
            op = path[-1]
            # An op that would run in several stages has to be quick, and the last of these stages still needs its operands.
            if not (_widens(op) if _storage(value) in elsewhere else _needed_bytes(op, stage) < own_bytes(value)):
                continue
            found = extended(region, path, allows)
            if found is not None and len(stages_of(found, graph)) == len(stages):
                region = found
    return region


def _path_to(value: fx.Node) -> list[fx.Node]:
    """The op that computes a tensor, after the ops that make views of it; empty if the tensor is an input of the graph."""
    path: list[fx.Node] = []
    while (op := producer(value)).op == "call_function":
        path.append(op)
        if not makes_views(op):
            return path
        value = inputs(op)[0]
    return []


def _is_private(path: Sequence[fx.Node], region: Region) -> bool:
    """Whether only a region reads the results of the ops of a path, and none of them belongs to it."""
    inside = region.rules.keys() | set(path)
    return region.rules.keys().isdisjoint(path) and all(user in inside for op in path for _, user in readers(op))


def _needed_bytes(op: fx.Node, stage: Stage) -> int:
    """Bytes of an op's operands that are kept alive during a stage only if the stage runs the op."""
    there = {_storage(value) for value, _ in stage.operands}
    needed: dict[int, int] = {}
    for value in inputs(op):
        if _storage(value) not in there and not _is_there(value, max(stage.new_ops)):
            needed[_storage(value)] = held_bytes(value)
    return sum(needed.values())


def _is_there(value: fx.Node, last: fx.Node) -> bool:
    """Whether a tensor is an input of the graph, or is read after the last op of a stage."""
    todo, seen = [value], {value}
    while todo:
        value = todo.pop()
        op = producer(value)
        near = [user for user in value.users if user.op == "call_function"]
        if op.op == "placeholder" or any(user > last and not makes_views(user) for user in near):
            return True
        views = [v for user in near if makes_views(user) for v in outputs(user) if v is not None]
        found = {*views, *(inputs(op)[:1] if makes_views(op) else ())} - seen
        seen |= found
        todo += found
    return False


def _storage(value: fx.Node) -> int:
    return storage_key(tensor(value))


class _Stages:
    """Finds the stages of a region."""

    def __init__(self, region: Region, graph: fx.Graph, unit_tangent: UnitTangent | None) -> None:
        self.region = region
        self.wave = self._waves(list(graph.nodes), unit_tangent)
        self.whole = kept_outside(region)
        stages: list[Stage] = []
        self.stage_of: dict[fx.Node, Stage] = {}
        for wave in sorted({self.wave[op] for op in region.rules}):
            for ops in self._separate([op for op in region.rules if self.wave[op] == wave]):
                stages.append(Stage(region, unit_tangent, wave, tuple(sorted(ops))))
                self.stage_of.update(dict.fromkeys(ops, stages[-1]))
        for stage in stages:
            self._fill(stage)
        self.found = [stage for stage in stages if stage.results]

    def _waves(self, nodes: Sequence[fx.Node], unit_tangent: UnitTangent | None) -> dict[fx.Node, int]:
        """How often a path to each op leaves the region and comes back; tangents depend on all of the forward."""
        rules = self.region.rules
        first, last = nodes.index(min(rules)), nodes.index(max(rules))
        tangents = {n for n in nodes if is_tangent(n) and (unit_tangent is None or n is not unit_tangent.tangent)}
        after = reached(tangents, lambda node: node.users)
        wave = dict.fromkeys(nodes[:first], 0)
        begin = 0
        for backward in (False, True):
            if backward:
                begin = max((wave[op] + 1 for op in rules if op not in after), default=0)
                wave.update(dict.fromkeys(after.intersection(nodes[:first]), begin))
            for node in nodes[first : last + 1]:
                if (node in after) == backward:
                    by_inputs = (self._wave_after(i, node, wave) for i in node.all_input_nodes)
                    wave[node] = max([begin if node in tangents else 0, *by_inputs])
        return wave

    def _wave_after(self, read: fx.Node, node: fx.Node, wave: dict[fx.Node, int]) -> int:
        """Wave of a node by one of its inputs."""
        made, rules = producer(read), self.region.rules
        if node in rules and read not in dict(self.region.read_by(node)):
            return 0
        if made not in rules or node is made or (read is not node and producer(node) is made):
            return wave[read]
        inside = node in rules and not self.region.reads_whole(node, read)
        return wave[made] if inside else wave[made] + 1

    def _separate(self, ops: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """The ops of a wave in groups that share only quick computations."""
        wave = self.wave[ops[0]]
        group: dict[fx.Node, fx.Node] = {}

        def first(op: fx.Node) -> fx.Node:
            while group.setdefault(op, op) is not op:
                op = group[op]
            return op

        for op in reached(ops, lambda op: self._computed_with(op, wave)):
            for made in self._computed_with(op, wave):
                # One elementwise op on operands of the stage is quick to compute again.
                if not (is_pointwise(made) and self.wave[made] < wave and not self._computed_with(made, wave)):
                    group[first(op)] = first(made)
        groups: dict[fx.Node, list[fx.Node]] = {}
        for op in ops:
            groups.setdefault(first(op), []).append(op)
        return list(groups.values())

    def _computed_with(self, op: fx.Node, wave: int) -> list[fx.Node]:
        """The ops, without views, that compute the operands of an op and that a stage of some wave runs itself."""
        found: list[fx.Node] = []
        for value, _ in self.region.read_by(op):
            if not self._is_operand(value, op, wave):
                made = producer(value)
                found += self._computed_with(made, wave) if makes_views(made) else [made]
        return found

    def _is_operand(self, value: fx.Node, op: fx.Node, wave: int) -> bool:
        """Whether a stage of some wave reads an operand of an op, instead of computing it.

        An earlier stage returns the operand if it has to, or if the tensor is small.
        """
        made = producer(value)
        if made not in self.region.rules or self.region.reads_whole(op, value):
            return True
        if self.wave[made] >= wave or makes_views(made):
            return False
        return value in self.whole or (size_bytes(value) < self.region.least_bytes and not _widens(made))

    def _fill(self, stage: Stage) -> None:
        """Find the ops that a stage computes again, its operands and its results."""
        ops = set(stage.new_ops)
        todo = list(stage.new_ops)
        while todo:
            op = todo.pop()
            for value, placement in self.region.read_by(op):
                made = producer(value)
                if self._is_operand(value, op, stage.wave):
                    stage.operands[value, placement] = None
                    if made in self.region.rules:
                        self.stage_of[made].results[value] = self.region.made_as(value)
                elif made not in ops:
                    ops.add(made)
                    todo.append(made)
        stage.all_ops = tuple(sorted(ops))
        for op in stage.new_ops:
            for value in outputs(op):
                if value is not None and value in self.whole:
                    stage.results[value] = self.region.made_as(value)
                    if makes_views(op):
                        stage.copies.add(value)
