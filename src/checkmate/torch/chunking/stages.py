"""Stages: the parts of a region that can each run as one op, because nothing outside comes between their ops.

The forward of a layer and its backward belong to one region, and what comes between them is outside: the backward's stage needs
gradients that depend on the forward's. A stage makes again what an earlier stage made of large tensors, piece by piece, and
reads small ones, which the earlier stage returns. A region whose tangents do not depend on its own results, as those of the head
in a whole step, has one stage: forward and backward of a piece follow each other and nothing is computed twice. So has one whose
gradients are computed ahead of the backward (`checkmate.torch.chunking.ahead`).

Ops between which nothing comes, but which have nothing in common either, are stages of one *level*: those that make the gradients
of a convolution's input and of its weight, for example, need less memory one after the other.

Growth ends at small tensors, which a stage is given whole. Some of them exist for the region alone, and are made of a smaller
tensor, such as a mask of booleans, or of one that is there anyway: the gradient of attention's output is a product of the
gradient that the residual connection passes on. An op that makes such a tensor becomes part of the region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch.chunking.ahead import Ahead
from checkmate.torch.chunking.graph_values import (
    held_bytes,
    inputs,
    outputs,
    own_bytes,
    producer,
    readers,
    shape_only,
    size_bytes,
    tensor,
)
from checkmate.torch.chunking.regions import Region, extended
from checkmate.torch.chunking.rules.placements import WHOLE, Placement, Split
from checkmate.torch.graph.op_properties import is_pointwise, makes_views
from checkmate.torch.graph.provenance import place_of
from checkmate.torch.graph.storages import storage_key


@dataclass(eq=False, slots=True)
class Stage:
    """Ops of a region that run as one op.

    Attributes:
        region: The region.
        level: How many levels of the region have to run before it, at least.
        own: The ops that belong to this stage alone, in the order of the graph.
        ops: Those and the ops of earlier stages that it computes again, in the order of the graph.
        operands: What it reads from outside, each with how that is cut: an op may read whole what another reads in slices.
        results: What it returns, and whether that is assembled from slices or a sum.
        copies: The views among those, which are returned as tensors without what they are views of.
        ahead: How the region depends on a tangent, if it takes it to be one.
    """

    region: Region
    ahead: Ahead | None
    level: int
    own: tuple[fx.Node, ...]
    ops: tuple[fx.Node, ...] = ()
    operands: dict[tuple[fx.Node, Placement], None] = field(default_factory=dict)
    results: dict[fx.Node, Placement] = field(default_factory=dict)
    copies: set[fx.Node] = field(default_factory=set)

    def returned(self, value: fx.Node) -> torch.Tensor:
        """A result as it is traced; each time another tensor where it is the copy of a view."""
        traced = tensor(value)
        if value not in self.copies:
            return traced
        with traced.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            return torch.empty_like(traced)

    @property
    def description(self) -> str:
        """The place of its region, for people."""
        return f"{place_of(self.region.rules)} in {self.region.count} pieces"


def stages_of(region: Region, graph: fx.Graph, ahead: Ahead | None = None) -> list[Stage]:
    """The stages of a region, in the order in which they can run.

    Args:
        region: The region.
        graph: Its graph.
        ahead: The tangent that is taken to be one, so that nothing has to wait for it; none by default.
    """
    return _Stages(region, graph, ahead).found


def kept_outside(region: Region) -> set[fx.Node]:
    """Tensors made in a region that ops outside of it read, or that ops of it read whole.

    Of a view, what it is a view of; but the view itself where all such views of a tensor have fewer bytes than that and are
    only computed with, so that copies can take their place.
    """
    found: set[fx.Node] = set()
    views: dict[fx.Node, set[fx.Node]] = {}  # by what they are views of
    for op in region.rules:
        for value, user in readers(op):
            if user in region.rules and not _reads_whole(region, user, value):
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


def widens(op: fx.Node) -> bool:
    """Whether an op makes, element by element, a tensor of more bytes than what it is made of."""
    read = {value: held_bytes(value) for value in inputs(op)}
    made = sum(own_bytes(value) for value in outputs(op) if value is not None)
    return is_pointwise(op) and sum(read.values()) < made


def _base(value: fx.Node, region: Region) -> fx.Node | None:
    """The tensor that one made in a region is a view of, or itself; None for a view of what is not made in the region."""
    while makes_views(producer(value)):
        (value, *_) = inputs(producer(value))
        if producer(value) not in region.rules:
            return None
    return value


def _can_copy(view: fx.Node, user: fx.Node, region: Region) -> bool:
    """Whether an op outside of a region can read a copy of a view instead."""
    made = outputs(producer(view))
    split = isinstance(region.rules[producer(view)].outputs[made.index(view)], Split)
    pure = isinstance(user.target, OpOverload) and not user.target._schema.is_mutable
    return split and pure and not makes_views(user)


def with_private_operands(region: Region, stages: Sequence[Stage], graph: fx.Graph, allows: Callable[[fx.Node], bool]) -> Region:
    """A region with the ops that make what it alone reads, where what these read takes less memory.

    Args:
        region: The region.
        stages: Its stages.
        graph: Its graph.
        allows: Whether an op may belong to the region.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for stage in stages:
        elsewhere = {_storage(value) for other in stages if other is not stage for value, _ in other.operands}
        for value, placement in stage.operands:
            path = _path_to(value)
            if not isinstance(placement, Split) or not path or not _is_private(path, region):
                continue
            op = path[-1]
            # An op that would run in several stages has to be quick, and what it reads is needed until the last of them.
            if not (widens(op) if _storage(value) in elsewhere else _needed_bytes(op, stage, position) < own_bytes(value)):
                continue
            found = extended(region, path, allows)
            if found is not None and len(stages_of(found, graph)) == len(stages):
                region = found
    return region


def _path_to(value: fx.Node) -> list[fx.Node]:
    """The op that makes a tensor, after the ops that make views of it; empty where the graph is given it."""
    path: list[fx.Node] = []
    while (op := producer(value)).op == "call_function":
        path.append(op)
        if not makes_views(op):
            return path
        value = inputs(op)[0]
    return []


def _is_private(path: Sequence[fx.Node], region: Region) -> bool:
    """Whether only a region reads what the ops of a path make, and none of them belongs to it."""
    if not region.rules.keys().isdisjoint(path):
        return False
    inside = region.rules.keys() | set(path)
    return all(user in inside for op in path for _, user in readers(op))


def _needed_bytes(op: fx.Node, stage: Stage, position: Mapping[fx.Node, int]) -> int:
    """Bytes of what an op reads that need not be there while a stage runs unless this stage runs the op."""
    last = max(map(position.__getitem__, stage.own))
    there = {_storage(value) for value, _ in stage.operands}
    needed: dict[int, int] = {}
    for value in inputs(op):
        if _storage(value) not in there and not _is_there(value, last, position):
            needed[_storage(value)] = held_bytes(value)
    return sum(needed.values())


def _is_there(value: fx.Node, last: int, position: Mapping[fx.Node, int]) -> bool:
    """Whether a tensor is an input of the graph, or is read after a stage."""
    todo, seen = [value], {value}
    while todo:
        value = todo.pop()
        op = producer(value)
        near = [user for user in value.users if user.op == "call_function"]
        if op.op == "placeholder" or any(position[user] > last and not makes_views(user) for user in near):
            return True
        views = [v for user in near if makes_views(user) for v in outputs(user) if v is not None]
        found = {*views, *(inputs(op)[:1] if makes_views(op) else ())} - seen
        seen |= found
        todo += found
    return False


def _storage(value: fx.Node) -> int:
    return storage_key(tensor(value))


class _Stages:
    """Finds the stages of a region; the arguments are those of `stages_of`."""

    def __init__(self, region: Region, graph: fx.Graph, ahead: Ahead | None) -> None:
        self.region = region
        self.ahead = ahead
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.level = self._levels()
        self.whole = kept_outside(region)
        self.stages: list[Stage] = []
        self.stage_of: dict[fx.Node, Stage] = {}
        for level in sorted({self.level[op] for op in region.rules}):
            for own in self._apart([op for op in region.rules if self.level[op] == level]):
                self.stages.append(Stage(region, ahead, level, self._sorted(own)))
                self.stage_of.update(dict.fromkeys(own, self.stages[-1]))
        for stage in self.stages:
            self._fill(stage)
        self.found = [stage for stage in self.stages if stage.results]

    def _sorted(self, ops: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(sorted(ops, key=self.position.__getitem__))

    def _levels(self) -> dict[fx.Node, int]:
        """How often a path to each op leaves the region and comes back; tangents depend on all of the forward."""
        rules = self.region.rules
        nodes = list(self.position)
        first, last = self.position[min(rules)], self.position[max(rules)]
        tangents = {n for n in nodes if is_tangent(n) and (self.ahead is None or n is not self.ahead.tangent)}
        after: set[fx.Node] = set(tangents)
        for node in nodes[: last + 1]:
            if not after.isdisjoint(node.all_input_nodes):
                after.add(node)
        level = dict.fromkeys(nodes[:first], 0)
        begin = 0
        for backward in (False, True):
            if backward:
                begin = max((level[op] + 1 for op in rules if op not in after), default=0)
                level.update(dict.fromkeys(after.intersection(nodes[:first]), begin))
            for node in nodes[first : last + 1]:
                if (node in after) == backward:
                    level[node] = max(
                        [begin if node in tangents else 0, *(self._through(i, node, level) for i in node.all_input_nodes)]
                    )
        return level

    def _through(self, read: fx.Node, node: fx.Node, level: dict[fx.Node, int]) -> int:
        """Level of a node by one of its inputs."""
        made, rules = producer(read), self.region.rules
        if node in rules and read not in dict(_read(self.region, node)):
            return 0
        if made not in rules or node is made or (read is not node and producer(node) is made):
            return level[read]
        inside = node in rules and not _reads_whole(self.region, node, read)
        return level[made] if inside else level[made] + 1

    def _apart(self, ops: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """The ops of a level in groups that compute nothing in common, but for what takes no time to compute again."""
        level = self.level[ops[0]]
        group: dict[fx.Node, fx.Node] = {}

        def first(op: fx.Node) -> fx.Node:
            while group.setdefault(op, op) is not op:
                op = group[op]
            return op

        todo, seen = list(ops), set(ops)
        while todo:
            op = todo.pop()
            for made in self._computed_with(op, level):
                if not self._is_quick(made, level):
                    group[first(op)] = first(made)
                if made not in seen:
                    seen.add(made)
                    todo.append(made)
        groups: dict[fx.Node, list[fx.Node]] = {}
        for op in ops:
            groups.setdefault(first(op), []).append(op)
        return list(groups.values())

    def _is_quick(self, op: fx.Node, level: int) -> bool:
        """Whether a stage of some level computes an op again, and that is one elementwise op on what it is given."""
        return is_pointwise(op) and self.level[op] < level and not self._computed_with(op, level)

    def _computed_with(self, op: fx.Node, level: int) -> list[fx.Node]:
        """The ops, views aside, that make what an op reads and that a stage of some level computes itself."""
        found: list[fx.Node] = []
        for value, _ in _read(self.region, op):
            if not self._is_operand(value, op, level):
                made = producer(value)
                found += self._computed_with(made, level) if makes_views(made) else [made]
        return found

    def _is_operand(self, value: fx.Node, op: fx.Node, level: int) -> bool:
        """Whether a stage of some level is given what an op reads, instead of making it."""
        made = producer(value)
        if made not in self.region.rules or _reads_whole(self.region, op, value):
            return True
        return self.level[made] < level and self._returned(value, made)

    def _fill(self, stage: Stage) -> None:
        """Find out what a stage computes again, reads and returns."""
        ops = set(stage.own)
        todo = list(stage.own)
        while todo:
            op = todo.pop()
            for value, placement in _read(self.region, op):
                made = producer(value)
                if self._is_operand(value, op, stage.level):
                    stage.operands[value, placement] = None
                    if made in self.region.rules:
                        self.stage_of[made].results[value] = self._made_as(value)
                elif made not in ops:
                    ops.add(made)
                    todo.append(made)
        stage.ops = self._sorted(ops)
        for op in stage.own:
            for value in outputs(op):
                if value in self.whole:
                    assert value is not None
                    stage.results[value] = self._made_as(value)
                    if makes_views(op):
                        stage.copies.add(value)

    def _returned(self, value: fx.Node, made: fx.Node) -> bool:
        """Whether an earlier stage returns a tensor, so that it need not be made again: it has to, or the tensor is small."""
        small = size_bytes(value) < self.region.least_bytes and not widens(made)
        return not makes_views(made) and (value in self.whole or small)

    def _made_as(self, value: fx.Node) -> Placement:
        op = producer(value)
        placement = self.region.rules[op].outputs[outputs(op).index(value)]
        assert placement is not None
        return placement


def _read(region: Region, op: fx.Node) -> list[tuple[fx.Node, Placement]]:
    """The tensors that an op of a region reads, and how; with repetitions."""
    pairs = zip(inputs(op), region.rules[op].inputs, strict=True)
    unread = shape_only(op)
    return [pair for i, pair in enumerate(pairs) if i not in unread]


def _reads_whole(region: Region, op: fx.Node, value: fx.Node) -> bool:
    """Whether an op of a region reads any copy of a tensor whole."""
    return (value, WHOLE) in _read(region, op)
