"""Regions: sets of ops that can run piece by piece, so that the large arrays between them never exist whole.

A region grows from one large tensor that is cut along some axis. Every op that makes or reads a large tensor of the region
belongs to it if it has a rule that agrees with what is cut so far; other tensors of the op are then cut, whole or sums as the
rule says. Growth goes on through large tensors only, and ends by itself where tensors are small: at the hidden states around a
head with its logits, for example. Tensors that are concatenated count as one: with the gradients of queries, keys and values,
attention and the product before it are one region. An op without such a rule reads the tensor whole, which is then assembled.

The pieces of a region are the same shares of every tensor in it: piece 2 of 8 is the third eighth of each axis that is cut.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx

from checkmate.torch.chunking.graph_values import ancestors, descendants, inputs, outputs, producer, size_bytes, tensor
from checkmate.torch.chunking.rules.lookup import rules_of
from checkmate.torch.chunking.rules.pieces import cuts
from checkmate.torch.chunking.rules.placements import SUM, Placement, Rule, Split
from checkmate.torch.graph.op_properties import makes_views

_MOST_OPS = 128
"""A region of more ops is not offered: where tensors of one size follow each other without end, it would be the whole network."""

_MOST_BETWEEN = 16
"""Most ops between those of a region that may become part of it: between the forward of a layer and its backward is a network."""

_JOINING = frozenset({torch.ops.aten.cat.default, torch.ops.aten.stack.default})
"""Ops that only put tensors side by side."""


@dataclass(frozen=True, eq=False, slots=True)
class Region:
    """Ops that run piece by piece.

    Attributes:
        seed: The tensor from which the region grew.
        count: Number of pieces.
        rules: The ops, each with the rule by which it runs.
        splits: The tensors that are cut, made in the region or given to it.
        least_bytes: A tensor of as many bytes or more is large.
        exact: Whether results have to be those of the whole ops to the bit, so that no sum is cut and no view is copied.
    """

    seed: fx.Node
    count: int
    rules: Mapping[fx.Node, Rule]
    splits: Mapping[fx.Node, Split]
    least_bytes: int
    exact: bool = False

    @property
    def sums(self) -> bool:
        """Whether a tensor is a sum over pieces, so that its bits can differ from those of the whole op."""
        return any(rule.sums for rule in self.rules.values())

    @property
    def piece_length(self) -> int:
        """Slices of the seed in a piece, such as tokens; in the last one there may be fewer."""
        slices = slices_of(self.seed, self.splits[self.seed], self.count)
        assert slices is not None
        return math.prod(length for _, _, length in slices[0])


def grow(
    seed: fx.Node,
    split: Split,
    count: int,
    *,
    least_share: float = 0.5,
    allows: Callable[[fx.Node], bool] = lambda op: True,
    exact: bool = False,
) -> Region | None:
    """The region around a tensor.

    Args:
        seed: The tensor.
        split: How it is cut.
        count: Into how many pieces.
        least_share: Share of the seed's bytes from which a tensor is large.
        allows: Whether an op may belong to the region.
        exact: Whether results have to be those of the whole ops to the bit, so that no op may return sums over pieces.

    Returns:
        The region; None if the seed cannot be cut in this way, or the region would be too large.
    """
    if slices_of(seed, split, count) is None:
        return None
    length = split.length(tensor(seed).shape)
    growth = _Growth(count, length, max(1, int(least_share * size_bytes(seed))), allows, not exact)
    growth.place(seed, split)
    while growth.todo and len(growth.rules) <= _MOST_OPS:
        value = growth.todo.popleft()
        for op in (producer(value), *value.users):
            growth.visit(op)
    if not 0 < len(growth.rules) <= _MOST_OPS:
        return None
    return Region(seed, count, growth.rules, growth.splits, growth.least_bytes, exact)


def extended(region: Region, ops: Iterable[fx.Node], allows: Callable[[fx.Node], bool]) -> Region | None:
    """A region with more ops, of which none returns a sum; None if one has no rule that agrees with the region.

    Args:
        region: The region.
        ops: The ops, each next to one of the region or before it.
        allows: Whether an op may belong to the region.
    """
    length = region.splits[region.seed].length(tensor(region.seed).shape)
    growth = _Growth(region.count, length, region.least_bytes, allows, sums=False)
    growth.rules.update(region.rules)
    growth.splits.update(region.splits)
    made = [pair for op, rule in region.rules.items() for pair in zip(outputs(op), rule.outputs, strict=True)]
    growth.sum_values.update(value for value, placement in made if placement == SUM)
    for op in ops:
        growth.visit(op)
        if op not in growth.rules:
            return None
    return replace(region, rules=growth.rules, splits=growth.splits)


def closed(region: Region, allows: Callable[[fx.Node], bool]) -> Region:
    """A region with the ops between its ops that can run on slices too, such as the logarithm of a decomposed log-softmax.

    Growth ends at small tensors. Where such an op is made of what the region makes, and the region reads it, the region would
    have to make its large tensors twice: once for what comes before the op, and once for what comes after it.

    Args:
        region: The region.
        allows: Whether an op may belong to the region.
    """
    for ops in _between(region):
        found = extended(region, ops, allows) if len(ops) <= _MOST_BETWEEN else None
        region = found or region
    return region


def _between(region: Region) -> list[list[fx.Node]]:
    """The ops that depend on a region and that it depends on, in connected groups, each in the order of the graph."""
    nodes = descendants(region.rules, within=ancestors(region.rules, since=min(region.rules)))
    left = {node for node in nodes if producer(node) not in region.rules}
    groups: list[list[fx.Node]] = []
    while left:
        group = [left.pop()]
        for node in group:  # grows as it is gone through
            near = [other for other in (*node.all_input_nodes, *node.users) if other in left]
            left.difference_update(near)
            group += near
        groups.append(sorted(op for op in group if op is producer(op)))
    return sorted(groups)


class _Growth:
    """A region in the making. The arguments are those of `grow`; ``length`` is that of the seed's axis."""

    def __init__(self, count: int, length: int, least_bytes: int, allows: Callable[[fx.Node], bool], sums: bool) -> None:
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
        made, read = outputs(op), inputs(op)
        agreeing = [rule for rule in rules_of(op) if (self.sums or not rule.sums) and self._agrees(rule, made, read)]
        if not agreeing:
            return
        rule = self.rules[op] = max(agreeing, key=lambda rule: (not rule.sums, self._split_bytes(rule, made, read)))
        for value, placement in _placed(rule, made, read):
            if isinstance(placement, Split) and value not in self.splits:
                self.place(value, placement)
            elif placement == SUM:
                self.sum_values.add(value)

    def _agrees(self, rule: Rule, made: list[fx.Node | None], read: list[fx.Node]) -> bool:
        if len(rule.outputs) != len(made) or len(rule.inputs) != len(read):
            return False
        now: dict[fx.Node, object] = {}
        for value, placement in _placed(rule, made, read):
            if isinstance(placement, Split):
                length = placement.length(tensor(value).shape)
                if length != self.length and (length % self.count or self.length % self.count):
                    return False  # pieces would not be the same shares
                slices = slices_of(value, placement, self.count)
                known = self.splits.get(value)
                if slices is None or value in self.sum_values or (known and slices_of(value, known, self.count) != slices):
                    return False
            elif value in self.splits:
                return False  # cut by another op, and whole for this one
            if now.setdefault(value, placement) != placement:
                return False
        return any(isinstance(p, Split) for p in (*rule.outputs, *rule.inputs))

    def _split_bytes(self, rule: Rule, made: list[fx.Node | None], read: list[fx.Node]) -> int:
        return sum({v: size_bytes(v) for v, p in _placed(rule, made, read) if isinstance(p, Split)}.values())


def _joined_bytes(value: fx.Node) -> int:
    """Bytes of the largest tensor that a tensor, or a view of it, is concatenated to."""
    users = list(value.users)
    return max([0, *(size_bytes(u) for u in users if u.target in _JOINING), *(_joined_bytes(u) for u in users if makes_views(u))])


def _placed(rule: Rule, made: list[fx.Node | None], read: list[fx.Node]) -> list[tuple[fx.Node, Placement]]:
    pairs = (*zip(made, rule.outputs, strict=True), *zip(read, rule.inputs, strict=True))
    return [(value, placement) for value, placement in pairs if value is not None and placement is not None]


def slices_of(value: fx.Node, split: Split, count: int) -> list[list[tuple[int, int, int]]] | None:
    """The slices of a tensor, ``(dimension, start, length)`` for each piece; None where there are not so many pieces.

    Args:
        value: The tensor.
        split: How it is cut.
        count: Into how many pieces.
    """
    shape = tensor(value).shape
    if not all(isinstance(n, int) for n in shape):
        return None  # a size that is known at run time only
    return _slices(tuple(shape), split, count)


@functools.lru_cache(maxsize=4096)  # layers repeat
def _slices(shape: tuple[int, ...], split: Split, count: int) -> list[list[tuple[int, int, int]]] | None:
    try:
        found = cuts(shape, split, count)
    except ValueError:
        return None
    whole = [[(d, start, n) for d, start, n in piece if n < shape[d]] for piece in found]
    return whole if len(whole) == count else None
