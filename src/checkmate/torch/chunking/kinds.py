"""Which regions of a graph are worth running piece by piece, and in how many pieces."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx

from checkmate.torch.chunking.ahead import ahead_of
from checkmate.torch.chunking.bits.comparison import keeps_bits
from checkmate.torch.chunking.graph_values import inputs, outputs, own_bytes, producer, size_bytes, tensor
from checkmate.torch.chunking.program import NotChunkable, Part, parts_of
from checkmate.torch.chunking.regions import Region, closed, grow
from checkmate.torch.chunking.rules.lookup import rules_of
from checkmate.torch.chunking.rules.placements import SUM, Split
from checkmate.torch.chunking.stages import Stage, kept_outside, stages_of, with_private_operands
from checkmate.torch.graph.op_properties import makes_views
from checkmate.torch.graph.provenance import common_place, place_of
from checkmate.torch.graph.storages import storage_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """When a region is offered to the planner.

    Attributes:
        least_share: Share of the largest tensor of the graph below which a tensor seeds no region.
        least_ratio: How many times more bytes the large tensors that never exist whole must have than the largest tensor that
            the region reads or returns in slices. Where they do not, pieces save little.
        pieces_per_ratio: Pieces for each time that the seed is larger than that: with two the large tensors of a piece, two or
            three in a backward, take about as much as what is around the region.
        most_pieces: Most pieces.
        fewer: A region with sums is offered in so many times fewer pieces as well, which take more memory and less time: each
            piece reads and writes all of a sum and reads all of a weight, and small products are slow.
        fewest_pieces: Fewest pieces that are offered besides.
        most_levels: Most levels of stages: each makes large tensors of those before it again.
        least_elements: Fewest elements of the seed in a piece. Smaller ops take no less time.
    """

    least_share: float = 0.1
    least_ratio: float = 2.0
    pieces_per_ratio: float = 2.0
    most_pieces: int = 32
    fewer: tuple[int, ...] = (2, 4)
    fewest_pieces: int = 4
    most_levels: int = 3
    least_elements: int = 1 << 14


_WORTH = Worth()


@dataclass(frozen=True, eq=False, slots=True)
class Kind:
    """Regions of one shape, such as the MLPs of all layers, and one way to run them. All run piece by piece or none does.

    Attributes:
        regions: The regions.
        parts: The parts of all regions.
        saved_bytes: Bytes of large tensors in one region that never exist whole.
        most_pieces: Whether no other kind has these regions in more pieces.
    """

    regions: tuple[Region, ...]
    parts: tuple[Part, ...]
    saved_bytes: int
    most_pieces: bool = True

    @property
    def place(self) -> str:
        """Where the regions are in the model, for people."""
        return common_place([place_of(region.rules) for region in self.regions])

    @property
    def description(self) -> str:
        """The place of the regions, and how they run, for people."""
        region = self.regions[0]
        how = ", gradients ahead of the backward" if self.ahead else ""
        return f"{self.place}, {region.count} pieces of {region.piece_length:,}{how}"

    @property
    def once(self) -> bool:
        """Whether nothing that is large is computed twice: no region has to wait for what is outside of it."""
        return all(part.stage.level == 0 for part in self.parts)

    @property
    def ahead(self) -> bool:
        """Whether gradients are computed ahead of the backward."""
        return any(part.stage.ahead is not None for part in self.parts)

    def excludes(self, other: Kind) -> bool:
        """Whether another kind is another way to run the same ops, or is this one."""
        return not {op for region in self.regions for op in region.rules}.isdisjoint(
            op for region in other.regions for op in region.rules
        )

    def is_fewer_pieces_of(self, other: Kind) -> bool:
        """Whether it runs the same ops as another kind in the same way, but for the number of pieces."""
        return not self.most_pieces and self.ahead == other.ahead and self.excludes(other)


def kinds_of(
    graph: fx.Graph, allows: Callable[[fx.Node], bool] = lambda op: True, *, exact: bool = False, once: bool = False
) -> list[Kind]:
    """The kinds of regions of a joint graph, those that save most first.

    Args:
        graph: The graph.
        allows: Whether an op may run piece by piece.
        exact: Whether to leave out regions whose results differ from those of the whole ops, on this device, in any bit.
        once: Whether to leave out regions that compute large tensors twice.

    Returns:
        The kinds; none for a graph with symbolic sizes.
    """
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in graph.nodes):
        return []
    sized = sorted(_seeds(graph), key=size_bytes, reverse=True)
    least = _WORTH.least_share * size_bytes(sized[0]) if sized else 0
    taken: set[fx.Node] = set()
    worthless: set[Hashable] = set()  # layers repeat
    found: dict[Hashable, list[_Found]] = {}

    def free(op: fx.Node) -> bool:
        return op not in taken and allows(op)

    for seed in sized:
        if size_bytes(seed) < least:
            break
        if producer(seed) in taken or _call(producer(seed)) in worthless:
            continue
        best = _best_region(graph, seed, free, exact, once)
        if best is None:
            worthless.add(_call(producer(seed)))
        else:
            for way in (best, *_in_fewer_pieces(best, graph, free)):
                found.setdefault(_signature(way.region), []).append(way)
                early = None if exact else _with_gradients_ahead(way, graph)
                if early is not None:
                    found.setdefault((*_signature(way.region), "ahead"), []).append(early)
            taken.update(best.region.rules)
    kinds = (_kind(alike) for alike in found.values())
    return sorted((kind for kind in kinds if kind.once or not once), key=lambda kind: kind.saved_bytes, reverse=True)


@dataclass(frozen=True, eq=False, slots=True)
class _Found:
    """A region that is worth it; the rest as in `Kind`."""

    region: Region
    parts: list[Part]
    saved_bytes: int
    most_pieces: bool = True


def _in_fewer_pieces(found: _Found, graph: fx.Graph, allows: Callable[[fx.Node], bool]) -> Iterator[_Found]:
    """A region with sums in fewer pieces, where it has the same ops then."""
    many = found.region
    counts = [many.count // fewer for fewer in _WORTH.fewer if many.count // fewer >= _WORTH.fewest_pieces]
    for count in counts if many.sums else ():
        few = grow(many.seed, many.splits[many.seed], count, allows=allows)
        few = None if few is None else closed(few, allows)
        parts = None if few is None else _parts(few, stages_of(few, graph), graph, allows)
        if parts is not None and parts[0].rules.keys() == many.rules.keys():
            yield _Found(*parts, found.saved_bytes, most_pieces=False)


def _with_gradients_ahead(found: _Found, graph: fx.Graph) -> _Found | None:
    """A region as it can run if its gradients are computed in the forward; None if they cannot be, or nothing is saved."""
    ahead = ahead_of(found.region, graph) if len(found.parts) > 1 else None
    if ahead is None:
        return None
    try:
        parts = parts_of(found.region, graph, ahead)
    except NotChunkable:
        return None
    return replace(found, parts=parts) if len(parts) < len(found.parts) else None


def _kind(alike: list[_Found]) -> Kind:
    first, parts = alike[0], tuple(part for each in alike for part in each.parts)
    return Kind(tuple(each.region for each in alike), parts, first.saved_bytes, first.most_pieces)


def _seeds(graph: fx.Graph) -> Iterator[fx.Node]:
    """Tensors that an op allocates in the forward and could be cut."""
    seen: set[int] = set()
    for op in graph.nodes:
        if op.op != "call_function" or makes_views(op):
            continue
        for value in outputs(op):
            if value is not None and isinstance(value.meta.get("val"), torch.Tensor) and storage_key(tensor(value)) not in seen:
                seen.add(storage_key(tensor(value)))
                if all(isinstance(n, int) for n in tensor(value).shape):
                    yield value


def _best_region(graph: fx.Graph, seed: fx.Node, allows: Callable[[fx.Node], bool], exact: bool, once: bool) -> _Found | None:
    """The region around a tensor that saves most; the arguments are those of `kinds_of`."""
    op = producer(seed)
    if not allows(op):
        return None
    place = outputs(op).index(seed)
    splits = {rule.outputs[place] for rule in rules_of(op) if isinstance(rule.outputs[place], Split)}
    found: list[tuple[tuple[int, bool, bool], Region, list[Stage]]] = []
    for split in splits:
        assert isinstance(split, Split)
        region = _region(seed, split, allows, exact)
        stages = [] if region is None else stages_of(region, graph)
        if region is None or (once and stages[-1].level > 0 and ahead_of(region, graph) is None):
            continue
        if len({stage.level for stage in stages}) <= _WORTH.most_levels:
            # Sums of gradients are better than sums in the forward, whose bits the loss shows.
            forward_sums = len(stages) > 1 and SUM in stages[0].results.values()
            found.append(((_saved_bytes(region), not region.sums, not forward_sums), region, stages))
    # Only what is looked at is traced, because that takes far longer than to find it.
    for (saved, *_), region, stages in sorted(found, key=lambda each: each[0], reverse=True):
        parts = _parts(region, stages, graph, allows)
        if parts is not None and (not exact or all(map(keeps_bits, parts[1]))):
            return _Found(*parts, saved)
    return None


def _parts(
    region: Region, stages: list[Stage], graph: fx.Graph, allows: Callable[[fx.Node], bool]
) -> tuple[Region, list[Part]] | None:
    """The parts of a region, which makes its private operands itself where it can; None if it cannot run piece by piece."""
    wider = region if region.exact else with_private_operands(region, stages, graph, allows)
    for one in dict.fromkeys((wider, region)):
        try:
            return one, parts_of(one, graph)
        except NotChunkable:
            continue
    return None


def _region(seed: fx.Node, split: Split, allows: Callable[[fx.Node], bool], exact: bool) -> Region | None:
    """The region around a tensor in as many pieces as are worth it; None if it is not worth running in pieces.

    The number depends on the graph alone and not on a budget, so that the order of sums is the same at every budget.
    """
    trial = grow(seed, split, 2, allows=allows, exact=exact)
    if trial is None or len(trial.rules) < 2:
        return None
    around = _largest_around(trial)
    if _saved_bytes(trial) < _WORTH.least_ratio * around:
        return None
    wanted = _WORTH.pieces_per_ratio * max(_WORTH.least_ratio, size_bytes(seed) / around)
    most = min(_WORTH.most_pieces, split.length(tensor(seed).shape), tensor(seed).numel() // _WORTH.least_elements)
    count = 2
    while count < wanted and 2 * count <= most:
        count *= 2
    while count > 1:
        region = grow(seed, split, count, allows=allows, exact=exact)
        if region is not None and len(region.rules) >= len(trial.rules):
            return closed(region, allows)  # with more pieces fewer ops would belong to it: a batch of 8 has no 16 pieces
        count //= 2
    return None


def _largest_around(region: Region) -> int:
    """Bytes of the largest tensor that a region reads or returns in slices, besides its seed."""
    read = {value for op in region.rules for value in inputs(op) if producer(value) not in region.rules}
    # The seed itself may be returned to the caller, as logits are: what is made of it is then large, and what is around is not.
    own = storage_key(tensor(region.seed))
    cut = [value for value in read | kept_outside(region) if value in region.splits and storage_key(tensor(value)) != own]
    return max((own_bytes(value) if makes_views(producer(value)) else size_bytes(value) for value in cut), default=1)


def _saved_bytes(region: Region) -> int:
    """Bytes of the large tensors that the region's ops allocate and that never exist whole."""
    returned = {storage_key(tensor(value)) for value in kept_outside(region) if not makes_views(producer(value))}
    inside: dict[int, int] = {}
    for op in region.rules:
        if makes_views(op):
            continue
        for value in outputs(op):
            if value is not None and value in region.splits and size_bytes(value) >= region.least_bytes:
                inside[storage_key(tensor(value))] = size_bytes(value)
    return sum(size for key, size in inside.items() if key not in returned)


def _call(op: fx.Node) -> Hashable:
    shapes = [tuple(tensor(v).shape) for v in (*inputs(op), *(v for v in outputs(op) if v is not None))]
    return str(op.target), tuple(shapes)


def _signature(region: Region) -> tuple[Hashable, ...]:
    ops = tuple((str(op.target), tuple(tuple(tensor(v).shape) for v in outputs(op) if v is not None)) for op in region.rules)
    return region.count, tuple(sorted(ops))
