"""Stages: the parts of a region that can each run as one op, because nothing outside comes between their ops.

The forward of a layer and its backward belong to one region, and what comes between them is outside: the backward's stage needs
gradients that depend on the forward's. A stage makes again what an earlier stage made of large tensors, piece by piece, and
reads small ones, which the earlier stage returns. A region whose tangents do not depend on its own results, as those of the head
in a whole step, has one stage: forward and backward of a piece follow each other and nothing is computed twice. So has one whose
gradients are computed ahead of the backward (`checkmate.torch.chunking.ahead`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from checkmate.torch._compat.aot import is_tangent
from checkmate.torch.chunking.ahead import Ahead
from checkmate.torch.chunking.graph_values import inputs, outputs, producer, readers, size_bytes
from checkmate.torch.chunking.regions import Region
from checkmate.torch.chunking.rules.placements import WHOLE, Placement
from checkmate.torch.graph.op_properties import makes_views
from checkmate.torch.graph.provenance import place_of


@dataclass(eq=False, slots=True)
class Stage:
    """Ops of a region that run as one op.

    Attributes:
        region: The region.
        own: The ops that belong to this stage alone, in the order of the graph.
        ops: Those and the ops of earlier stages that it computes again, in the order of the graph.
        operands: What it reads from outside, each with how that is cut: an op may read whole what another reads in slices.
        results: What it returns, and whether that is assembled from slices or a sum.
        ahead: How the region depends on a tangent, if it takes it to be one.
    """

    region: Region
    ahead: Ahead | None
    own: tuple[fx.Node, ...]
    ops: tuple[fx.Node, ...] = ()
    operands: dict[tuple[fx.Node, Placement], None] = field(default_factory=dict)
    results: dict[fx.Node, Placement] = field(default_factory=dict)

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
    """Tensors made in a region that ops outside of it read, or that ops of it read whole; of a view, what it is a view of."""
    found: set[fx.Node] = set()
    todo = [
        value
        for op in region.rules
        for value, user in readers(op)
        if user not in region.rules or _placement(region, user, value) == WHOLE
    ]
    seen = set(todo)
    while todo:
        value = todo.pop()
        op = producer(value)
        if makes_views(op):
            bases = [base for base in inputs(op) if producer(base) in region.rules and base not in seen]
            seen.update(bases)
            todo += bases
        else:
            found.add(value)
    return found


class _Stages:
    """Finds the stages of a region; the arguments are those of `stages_of`."""

    def __init__(self, region: Region, graph: fx.Graph, ahead: Ahead | None) -> None:
        self.region = region
        self.ahead = ahead
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.level = self._levels(graph)
        self.whole = kept_outside(region)
        levels = sorted({self.level[op] for op in region.rules})
        self.by_level = {
            level: Stage(region, ahead, self._sorted(op for op in region.rules if self.level[op] == level)) for level in levels
        }
        for stage in self.by_level.values():
            self._fill(stage)
        self.found = [stage for stage in self.by_level.values() if stage.results]

    def _sorted(self, ops: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(sorted(ops, key=self.position.__getitem__))

    def _levels(self, graph: fx.Graph) -> dict[fx.Node, int]:
        """How often a path to each node leaves the region and comes back; tangents depend on all of the forward."""
        rules = self.region.rules
        level: dict[fx.Node, int] = {}
        tangents = {n for n in graph.nodes if is_tangent(n) and (self.ahead is None or n is not self.ahead.tangent)}
        after: set[fx.Node] = set(tangents)
        for node in graph.nodes:
            if any(i in after for i in node.all_input_nodes):
                after.add(node)
        begin = 0
        for backward in (False, True):
            if backward:
                begin = max((level[op] + 1 for op in rules if op not in after), default=0)
            for node in graph.nodes:
                if (node in after) == backward:
                    level[node] = max(
                        [begin if node in tangents else 0, *(self._through(i, node, level) for i in node.all_input_nodes)]
                    )
        return level

    def _through(self, read: fx.Node, node: fx.Node, level: dict[fx.Node, int]) -> int:
        """Level of a node by one of its inputs."""
        made, rules = producer(read), self.region.rules
        if made not in rules or node is made or (read is not node and producer(node) is made):
            return level[read]
        inside = node in rules and _placement(self.region, node, read) != WHOLE
        return level[made] if inside else level[made] + 1

    def _fill(self, stage: Stage) -> None:
        """Find out what a stage computes again, reads and returns."""
        ops = set(stage.own)
        todo = list(stage.own)
        while todo:
            op = todo.pop()
            for value, placement in zip(inputs(op), self.region.rules[op].inputs, strict=True):
                made = producer(value)
                if made not in self.region.rules:
                    stage.operands[value, placement] = None
                elif placement == WHOLE or (self._earlier(made, stage) and self._returned(value, made)):
                    stage.operands[value, placement] = None
                    self.by_level[self.level[made]].results[value] = self._made_as(value)
                elif made not in ops:
                    ops.add(made)
                    todo.append(made)
        stage.ops = self._sorted(ops)
        for op in stage.own:
            for value in outputs(op):
                if value in self.whole:
                    assert value is not None
                    stage.results[value] = self._made_as(value)

    def _earlier(self, op: fx.Node, stage: Stage) -> bool:
        return self.level[op] < self.level[stage.own[0]]

    def _returned(self, value: fx.Node, made: fx.Node) -> bool:
        """Whether an earlier stage returns a tensor, so that it need not be made again: it has to, or the tensor is small."""
        return not makes_views(made) and (value in self.whole or size_bytes(value) < self.region.least_bytes)

    def _made_as(self, value: fx.Node) -> Placement:
        op = producer(value)
        placement = self.region.rules[op].outputs[outputs(op).index(value)]
        assert placement is not None
        return placement


def _placement(region: Region, op: fx.Node, value: fx.Node) -> Placement | None:
    """How an op of a region reads a tensor; WHOLE if it reads any copy of it whole, and None for an op outside."""
    if op not in region.rules:
        return None
    placements: list[Placement] = [p for v, p in zip(inputs(op), region.rules[op].inputs, strict=True) if v is value]
    return WHOLE if not placements or WHOLE in placements else placements[0]
