"""A graph whose sizes and costs are linear in the batch, from captures at two batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from checkmate.core.errors import GraphError, OptionError
from checkmate.core.graph import Graph

_HINT = "capture the same step twice, with nothing changed but the batch"


@dataclass(frozen=True, slots=True)
class AffineGraph:
    """Graph of a step at any batch size, on a line through two of them.

    Sizes are rounded up to whole bytes and are never negative; a size that falls as the batch grows counts as constant, at its
    larger value. Costs are lines with whole slopes, exact at the larger batch. If a measured cost falls from one capture to the
    other, its line is constant; if it extrapolates to a negative cost at batch 1, its line goes through the origin.

    Attributes:
        small: Graph at the smaller batch.
        small_batch: Its batch.
        large: Graph at the larger batch.
        large_batch: Its batch.

    Raises:
        GraphError: The graphs differ in more than sizes, costs and names.
        OptionError: The batches are not whole, positive and ascending.

    Examples:
        >>> one = Graph.from_dag(cost=[5, 10], size_bytes=[4, 100], edges=[(0, 1)], resident_bytes=7)
        >>> two = Graph.from_dag(cost=[6, 20], size_bytes=[8, 100], edges=[(0, 1)], resident_bytes=7)
        >>> ten = AffineGraph(one, 1, two, 2)(10)
        >>> [op.cost for op in ten.ops], [value.size_bytes for value in ten.values]
        ([14, 100], [40, 100])
    """

    small: Graph
    small_batch: int
    large: Graph
    large_batch: int

    def __post_init__(self) -> None:
        if not 1 <= self.small_batch < self.large_batch:
            raise OptionError(
                f"small_batch={self.small_batch!r} and large_batch={self.large_batch!r} must be positive and ascending"
            )
        check_same_structure(self.small, self.small_batch, self.large, self.large_batch)

    @classmethod
    def proportional(cls, graph: Graph, batch: int = 1) -> AffineGraph:
        """A graph whose sizes and costs are proportional to the batch, with constant resident bytes and weights on the host.

        Args:
            graph: Graph at one batch size.
            batch: That batch size.
        """
        double = combined([graph], lambda sizes: 2 * sizes[0], lambda costs: 2 * costs[0])
        values = tuple(a if a.on_host else b for a, b in zip(graph.values, double.values, strict=True))
        double = msgspec.structs.replace(double, resident_bytes=graph.resident_bytes, values=values)
        return cls(graph, batch, double, 2 * batch)

    def __call__(self, batch: int) -> Graph:
        """The graph at a batch size.

        Raises `OptionError` if the batch is less than one.
        """
        if batch < 1:
            raise OptionError(f"batch={batch!r} must be one or more")
        return combined(
            [self.small, self.large],
            lambda sizes: self._size(sizes[0], sizes[1], batch),
            lambda costs: self._cost(costs[0], costs[1], batch),
        )

    def _size(self, small: int, large: int, batch: int) -> int:
        if small >= large:
            return small
        rise, run = (large - small) * (batch - self.small_batch), self.large_batch - self.small_batch
        return max(0, small - (-rise // run))  # rounded up

    def _cost(self, small: int, large: int, batch: int) -> int:
        slope = max(0, round((large - small) / (self.large_batch - self.small_batch)))
        if large - slope * (self.large_batch - 1) < 0:
            slope = large // self.large_batch
        return large + slope * (batch - self.large_batch)


def combined(graphs: Sequence[Graph], size: Callable[[Sequence[int]], int], cost: Callable[[Sequence[int]], int]) -> Graph:
    """The first of some graphs of one step, with each size and each cost computed from those of all graphs."""
    ops = tuple(
        msgspec.structs.replace(
            same[0],
            cost=cost([op.cost for op in same]),
            workspace_bytes=size([op.workspace_bytes for op in same]),
            replay_bytes=size([op.replay_bytes for op in same]),
        )
        for same in zip(*(graph.ops for graph in graphs), strict=True)
    )
    values = tuple(
        msgspec.structs.replace(same[0], size_bytes=size([value.size_bytes for value in same]))
        for same in zip(*(graph.values for graph in graphs), strict=True)
    )
    return msgspec.structs.replace(graphs[0], ops=ops, values=values, resident_bytes=size([g.resident_bytes for g in graphs]))


def check_same_structure(small: Graph, small_batch: int, large: Graph, large_batch: int) -> None:
    """Check that two graphs of one step differ only in sizes, costs and names.

    Raises `GraphError` if they differ in more.
    """
    where = f"the graphs at batch {small_batch} and {large_batch}"
    if len(small.ops) != len(large.ops) or len(small.values) != len(large.values):
        raise GraphError(
            f"{where} have {len(small.ops)} and {len(large.ops)} ops, {len(small.values)} and {len(large.values)} values",
            hint=_HINT,
        )
    for o, (a, b) in enumerate(zip(small.ops, large.ops, strict=True)):
        for fact in ("inputs", "outputs", "recomputable", "clobbered_by", "phase", "kind"):
            if getattr(a, fact) != getattr(b, fact):
                raise GraphError(
                    f"{where} differ in op {o} ({a.name!r}): {fact} is {getattr(a, fact)!r} and {getattr(b, fact)!r}", hint=_HINT
                )
    for v, (x, y) in enumerate(zip(small.values, large.values, strict=True)):
        if (x.base, x.kept, x.on_host) != (y.base, y.kept, y.on_host):
            raise GraphError(f"{where} differ in value {v} ({x.name!r}): base, kept or on_host", hint=_HINT)
    if small.order != large.order:
        raise GraphError(f"{where} differ in `order`", hint=_HINT)


def check_growing(small: Graph, small_batch: int, large: Graph, large_batch: int) -> None:
    """Check that no size falls from one graph of a step to another of a larger batch.

    Raises `GraphError` if a size falls.
    """
    sizes = [
        ("resident", small.resident_bytes, large.resident_bytes),
        *((f"value {a.name!r}", a.size_bytes, b.size_bytes) for a, b in zip(small.values, large.values, strict=True)),
        *((f"workspace of {a.name!r}", a.workspace_bytes, b.workspace_bytes) for a, b in zip(small.ops, large.ops, strict=True)),
        *((f"replay of {a.name!r}", a.replay_bytes, b.replay_bytes) for a, b in zip(small.ops, large.ops, strict=True)),
    ]
    for what, before, after in sizes:
        if before > after:
            raise GraphError(
                f"{what}: {before} bytes at batch {small_batch}, {after} bytes at batch {large_batch}",
                hint="capture the step such that no size falls as the batch grows; otherwise nothing is proven of larger batches",
            )
