"""Regions: sets of ops that can run piece by piece, without the large arrays between them ever existing whole.

A region grows from one large tensor that is cut along some axis. Every op that makes or reads a large tensor of the region
belongs to it if it has a rule that agrees with the cuts so far. The rule then says which other tensors of the op are cut, whole
or sums. Growth goes on through large tensors only, and ends at small tensors, such as the hidden states around a head with
its logits. Tensors that are concatenated count as one: with the gradients of queries, keys and values, attention and the product
before it are one region. An op without an agreeing rule reads the tensor whole, which is then assembled.

The pieces of a region are the same shares of every tensor in it: piece 2 of 8 is the third eighth of each axis that is cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import fx

from checkmate.solvers.walks import reached
from checkmate.torch.chunking.rules.lookup import rules_of
from checkmate.torch.chunking.rules.placements import TOTALS, WHOLE, Placement, Rule, Slices, Split, cuts
from checkmate.torch.graph.op_properties import makes_views
from checkmate.torch.graph.traced import ancestors, descendants, inputs, outputs, producer, shape_only, size_bytes, tensor

_MOST_OPS = 128
"""A region of more ops is not offered: if tensors of one size follow each other without end, it would be the whole network."""

_JOINING = frozenset({torch.ops.aten.cat.default, torch.ops.aten.stack.default})
"""Ops that only put tensors side by side."""

Allows: TypeAlias = Callable[[fx.Node], bool]
"""Whether an op may belong to a region."""


@dataclass(frozen=True, eq=False, slots=True)
class Region:
    """Ops that run piece by piece, each with the rule by which it runs."""

    seed: fx.Node  # the tensor from which the region grew
    count: int  # of pieces
    rules: Mapping[fx.Node, Rule]
    splits: Mapping[fx.Node, Split]  # the tensors that are cut, made in the region or given to it
    least_bytes: int  # from which on a tensor is large
    exact: bool = False  # results must have the bits of the whole ops: no sum is cut and no view is copied

    @property
    def sums(self) -> bool:
        """Whether a tensor is a sum over pieces: its bits can differ from the bits of the whole op."""
        return any(rule.sums for rule in self.rules.values())

    @property
    def length(self) -> int:
        """Elements of the seed along the axis that is cut, such as tokens."""
        return self.splits[self.seed].length(tensor(self.seed).shape)

    def slices(self, value: fx.Node, placement: Placement) -> list[Slices]:
        """The slices of a tensor of the region for each piece."""
        found = slices_of(value, placement, self.count)
        assert found is not None
        return found

    def read_by(self, op: fx.Node) -> list[tuple[fx.Node, Placement]]:
        """The tensors that an op reads, and their placements; with repetitions."""
        pairs = zip(inputs(op), self.rules[op].inputs, strict=True)
        unread = shape_only(op)
        return [pair for i, pair in enumerate(pairs) if i not in unread]

    def reads_whole(self, op: fx.Node, value: fx.Node) -> bool:
        """Whether an op reads any copy of a tensor whole."""
        return (value, WHOLE) in self.read_by(op)

    def made_as(self, value: fx.Node) -> Placement:
        """The placement of a tensor that the region makes."""
        op = producer(value)
        placement = self.rules[op].outputs[outputs(op).index(value)]
        assert placement is not None
        return placement


def grow(
    seed: fx.Node,
    split: Split,
    count: int,
    *,
    least_share: float = 0.5,
    allows: Allows = lambda op: True,
    exact: bool = False,
    most_ops: int = _MOST_OPS,
) -> Region | None:
    """The region around a tensor that is cut; None if it cannot be cut in this way, or the region would be too large.

    A tensor is large if it has at least ``least_share`` of the seed's bytes.
    """
    if slices_of(seed, split, count) is None:
        return None
    least_bytes = max(1, int(least_share * size_bytes(seed)))
    growth = _Growth(count, split.length(tensor(seed).shape), least_bytes, allows, sums=not exact)
    growth.place(seed, split)
    while growth.todo and len(growth.rules) <= most_ops:
        value = growth.todo.popleft()
        for op in (producer(value), *value.users):
            growth.visit(op)
    if not 0 < len(growth.rules) <= most_ops:
        return None
    return Region(seed, count, growth.rules, growth.splits, least_bytes, exact)


def extended(region: Region, ops: Iterable[fx.Node], allows: Allows) -> Region | None:
    """A region with more ops next to its own, none of which returns a sum; None if an op has no rule that agrees with it."""
    growth = _Growth(region.count, region.length, region.least_bytes, allows, sums=False)
    growth.rules.update(region.rules)
    growth.splits.update(region.splits)
    growth.sum_values.update(value for op, rule in region.rules.items() for value, p in _placed(op, rule) if p in TOTALS)
    for op in ops:
        growth.visit(op)
        if op not in growth.rules:
            return None
    return replace(region, rules=growth.rules, splits=growth.splits)


def closed(region: Region, allows: Allows) -> Region:
    """A region with the ops between its ops that can run on slices too, such as the logarithm of a decomposed log-softmax.

    Growth ends at small tensors. If an op reads a result of the region, and the region reads the result of the op, the region
    would have to compute its large tensors twice: once for the ops before this op, and once for the ops after it.
    """
    for ops in _between(region):
        # More ops are a network, such as the network between the forward of a layer and its backward.
        region = (extended(region, ops, allows) if len(ops) <= 16 else None) or region
    return region


def _between(region: Region) -> list[list[fx.Node]]:
    """The ops that depend on a region and that it depends on, in connected groups, each in the order of the graph."""
    nodes = descendants(region.rules, within=ancestors(region.rules, since=min(region.rules)))
    left = {node for node in nodes if producer(node) not in region.rules}
    groups: list[list[fx.Node]] = []
    while left:
        group = reached([min(left)], lambda node: (*node.all_input_nodes, *node.users), left.__contains__)
        left -= group
        groups.append(sorted(op for op in group if op is producer(op)))
    return sorted(groups)


class _Growth:
    """A region while it grows."""

    def __init__(self, count: int, length: int, least_bytes: int, allows: Allows, *, sums: bool) -> None:
        self.count, self.length, self.least_bytes, self.allows, self.sums = count, length, least_bytes, allows, sums
        self.rules: dict[fx.Node, Rule] = {}
        self.splits: dict[fx.Node, Split] = {}
        self.sum_values: set[fx.Node | None] = set()
        self.todo: deque[fx.Node] = deque()

    def place(self, value: fx.Node, split: Split) -> None:
        self.splits[value] = split
        if size_bytes(value) >= self.least_bytes or _joined_bytes(value) >= self.least_bytes:
            self.todo.append(value)

    def visit(self, op: fx.Node) -> None:
        """Add an op to the region if one of its rules agrees with the tensors that are placed."""
        if op in self.rules or op.op != "call_function" or not self.allows(op):
            return
        agreeing = [rule for rule in rules_of(op) if self._agrees(op, rule)]
        if not agreeing:
            return
        cut = [{v: size_bytes(v) for v, p in _placed(op, rule) if isinstance(p, Split)} for rule in agreeing]
        best = max(range(len(agreeing)), key=lambda i: (not agreeing[i].sums, sum(cut[i].values())))
        rule = self.rules[op] = agreeing[best]
        for value, placement in _placed(op, rule):
            if isinstance(placement, Split) and value not in self.splits:
                self.place(value, placement)
            elif placement in TOTALS:
                self.sum_values.add(value)

    def _agrees(self, op: fx.Node, rule: Rule) -> bool:
        if (rule.sums and not self.sums) or len(rule.outputs) != len(outputs(op)) or len(rule.inputs) != len(inputs(op)):
            return False
        now: dict[fx.Node, object] = {}
        for value, placement in _placed(op, rule):
            if isinstance(placement, Split):
                length = placement.length(tensor(value).shape)
                if length != self.length and (length % self.count or self.length % self.count):
                    return False  # pieces would not be the same shares
                slices = slices_of(value, placement, self.count)
                known = self.splits.get(value)
                if slices is None or value in self.sum_values or (known and slices_of(value, known, self.count) != slices):
                    return False
            elif value in self.splits:
                return False  # another op cuts it, and this one reads it whole
            if now.setdefault(value, placement) != placement:
                return False
        return any(isinstance(p, Split) for p in (*rule.outputs, *rule.inputs))


def _joined_bytes(value: fx.Node) -> int:
    """Bytes of the largest concatenation that a tensor, or a view of it, is part of."""
    users = list(value.users)
    return max([0, *(size_bytes(u) for u in users if u.target in _JOINING), *(_joined_bytes(u) for u in users if makes_views(u))])


def _placed(op: fx.Node, rule: Rule) -> list[tuple[fx.Node, Placement]]:
    """The tensors of an op with their placements."""
    pairs = (*zip(outputs(op), rule.outputs, strict=True), *zip(inputs(op), rule.inputs, strict=True))
    return [(value, placement) for value, placement in pairs if value is not None and placement is not None]


def slices_of(value: fx.Node, placement: Placement, count: int) -> list[Slices] | None:
    """The slices of a tensor for each piece; None if it cannot be cut into ``count``, or a size is known at run time only."""
    if not isinstance(placement, Split):
        return [()] * count
    shape = tuple(tensor(value).shape)
    found = cuts(shape, placement, count) if all(isinstance(n, int) for n in shape) else None
    return found if found is not None and len(found) == count else None
