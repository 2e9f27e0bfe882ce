"""The regions of a graph that are worth running piece by piece, and their numbers of pieces."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from checkmate.torch.chunking.bits import keeps_bits
from checkmate.torch.chunking.messages import message_ops
from checkmate.torch.chunking.program import CARRYING, ChunkOp, NotChunkable, chunk_ops_of
from checkmate.torch.chunking.regions import Allows, Region, closed, grow
from checkmate.torch.chunking.rules.lookup import rules_of
from checkmate.torch.chunking.rules.placements import SUM, TOTALS, Split
from checkmate.torch.chunking.stages import kept_outside, stages_of, with_private_operands
from checkmate.torch.chunking.unit_tangent import unit_tangent_of
from checkmate.torch.graph.op_properties import makes_views
from checkmate.torch.graph.provenance import common_place, place_of
from checkmate.torch.graph.storages import storage_key
from checkmate.torch.graph.traced import held_bytes, inputs, outputs, producer, size_bytes, tensor


@dataclass(frozen=True, slots=True)
class Chunks:
    """The ops that may run piece by piece."""

    exact: bool = False  # results must have the bits of the whole ops, on this device
    allows: Allows = lambda op: True
    recomputes_nothing: bool = False  # allows only regions that compute no large tensor twice


@dataclass(frozen=True, eq=False, slots=True)
class RegionGroup:
    """Regions of one shape, such as the MLPs of all layers, and one way to run them. Either all run piece by piece, or none."""

    regions: tuple[Region, ...]
    chunk_ops: tuple[ChunkOp, ...]  # of all regions
    saved_bytes: int  # of the large tensors of one region that never exist whole
    most_pieces: bool = True  # whether no other group has these regions in more pieces

    @property
    def description(self) -> str:
        """The place of the regions in the model, and how they run, for people."""
        region, place = self.regions[0], common_place([place_of(region.rules) for region in self.regions])
        how = ", gradients ahead of the backward" if self.assumes_unit_tangent else ""
        return f"{place}, {region.count} pieces of {-(-region.length // region.count):,}{how}"

    @property
    def assumes_unit_tangent(self) -> bool:
        """Whether gradients are computed ahead of the backward."""
        return any(op.stage.unit_tangent is not None for op in self.chunk_ops)

    def excludes(self, other: RegionGroup) -> bool:
        """Whether another group runs the same ops in another way, or is this group."""
        mine, its = ({op for region in group.regions for op in region.rules} for group in (self, other))
        return not mine.isdisjoint(its)

    def is_fewer_pieces_of(self, other: RegionGroup) -> bool:
        """Whether it runs the same ops as another group in the same way, but in fewer pieces."""
        alike = self.assumes_unit_tangent == other.assumes_unit_tangent
        return not self.most_pieces and alike and self.excludes(other)


def region_groups(graph: fx.Graph, chunks: Chunks = Chunks()) -> list[RegionGroup]:
    """The groups of regions of a joint graph, those that save most first; none for a graph with symbolic sizes."""
    if any(isinstance(node.meta.get("val"), torch.SymInt) for node in graph.nodes):
        return []
    seeds = _seeds(graph)
    taken: set[fx.Node] = set()
    worthless: set[Hashable] = set()  # layers repeat
    found: dict[Hashable, list[RegionGroup]] = {}
    # Inductor, for which nothing may be computed twice, fuses a gather with what follows, and has no messages.
    never = CARRYING.keys() if chunks.recomputes_nothing else ()
    free = replace(chunks, allows=lambda op: op not in taken and op.target not in never and chunks.allows(op))
    for seed in seeds:
        if size_bytes(seed) < 0.1 * size_bytes(seeds[0]):
            break  # pieces of small tensors save little
        if producer(seed) in taken or _call(producer(seed)) in worthless:
            continue
        best = _best_region(graph, seed, free)
        if best is None:
            worthless.add(_call(producer(seed)))
            continue
        for way in (best, *_in_fewer_pieces(best, graph, free.allows)):
            found.setdefault(_signature(way), []).append(way)
            early = None if chunks.exact else _with_unit_tangent(way, graph)
            if early is not None:
                found.setdefault((*_signature(way), "unit tangent"), []).append(early)
        taken.update(best.regions[0].rules)
    groups: list[RegionGroup] = []
    for alike in found.values():
        regions = tuple(region for each in alike for region in each.regions)
        groups.append(replace(alike[0], regions=regions, chunk_ops=tuple(op for each in alike for op in each.chunk_ops)))
    if chunks.recomputes_nothing:  # no region may have to wait for ops outside of it
        groups = [group for group in groups if all(op.stage.wave == 0 for op in group.chunk_ops)]
    return sorted(groups, key=lambda group: group.saved_bytes, reverse=True)


def _in_fewer_pieces(found: RegionGroup, graph: fx.Graph, allows: Allows) -> Iterator[RegionGroup]:
    """A region that adds to tensors, in half and a quarter of the pieces, if it still has the same ops.

    Fewer pieces take more memory and less time: each piece reads and writes all of a sum and reads all of a weight, and small
    products are slow.
    """
    (many,) = found.regions
    adds = not many.exact and any(placement in TOTALS for rule in many.rules.values() for placement in rule.outputs)
    for count in [count for count in (many.count // 2, many.count // 4) if adds and count >= 4]:
        share = many.least_bytes / size_bytes(many.seed)
        few = grow(many.seed, many.splits[many.seed], count, allows=many.rules.__contains__, least_share=share)
        way = None if few is None else _as_group(closed(few, allows), graph, allows, found.saved_bytes)
        if way is not None and way.regions[0].rules.keys() == many.rules.keys():
            yield replace(way, most_pieces=False)


def _with_unit_tangent(found: RegionGroup, graph: fx.Graph) -> RegionGroup | None:
    """A region with its gradients computed in the forward; None if they cannot be, or nothing is saved."""
    unit_tangent = unit_tangent_of(found.regions[0], graph) if len(found.chunk_ops) > 1 else None
    if unit_tangent is None:
        return None
    try:
        ops = chunk_ops_of(found.regions[0], graph, unit_tangent)
    except NotChunkable:
        return None
    return replace(found, chunk_ops=tuple(ops)) if len(ops) < len(found.chunk_ops) else None


def _seeds(graph: fx.Graph) -> list[fx.Node]:
    """Tensors that an op allocates and that could be cut, the largest first."""
    ops = [op for op in graph.nodes if op.op == "call_function" and not makes_views(op)]
    made = [value for op in ops for value in outputs(op) if value is not None and isinstance(value.meta.get("val"), torch.Tensor)]
    first = {storage_key(tensor(value)): value for value in reversed(made)}
    found = [value for value in made if first[storage_key(tensor(value))] is value]
    return sorted((v for v in found if all(isinstance(n, int) for n in tensor(v).shape)), key=size_bytes, reverse=True)


def _best_region(graph: fx.Graph, seed: fx.Node, chunks: Chunks) -> RegionGroup | None:
    """The region around a tensor that saves most bytes, as a separate group."""
    op = producer(seed)
    if not chunks.allows(op):
        return None
    place = outputs(op).index(seed)
    found: list[tuple[tuple[int, bool, bool, bool], Region]] = []
    splits = {split for rule in rules_of(op) if isinstance(split := rule.outputs[place], Split)}
    for region, is_layer in (each for split in splits for each in _regions(seed, split, graph, chunks)):
        stages = stages_of(region, graph)
        if chunks.recomputes_nothing and stages[-1].wave > 0 and unit_tangent_of(region, graph) is None:
            continue
        if is_layer or len({stage.wave for stage in stages}) <= 3:  # each computes large tensors of earlier stages again
            # Sums of gradients are better than sums in the forward: the loss shows the bits of the latter.
            forward_sums = len(stages) > 1 and SUM in stages[0].results.values()
            found.append(((_saved_bytes(region), not region.sums, not forward_sums, is_layer), region))
    # Tracing takes far longer than finding a region: only the candidates up to the first success are traced.
    for (saved, *_), region in sorted(found, key=lambda each: each[0], reverse=True):
        group = _as_group(region, graph, chunks.allows, saved)
        if group is not None and (not chunks.exact or all(map(keeps_bits, group.chunk_ops))):
            return group
    return None


def _as_group(region: Region, graph: fx.Graph, allows: Allows, saved_bytes: int) -> RegionGroup | None:
    """A region with the ops that compute its private operands, if they can; None if it cannot run piece by piece."""
    wider = region if region.exact else with_private_operands(region, stages_of(region, graph), graph, allows)
    for one in dict.fromkeys((wider, region)):
        try:
            return RegionGroup((one,), tuple(chunk_ops_of(one, graph)), saved_bytes)
        except NotChunkable:
            continue
    return None


def _regions(seed: fx.Node, split: Split, graph: fx.Graph, chunks: Chunks) -> Iterator[tuple[Region, bool]]:
    """The regions around a tensor, and whether each is a layer of message passing."""
    if (region := _region(seed, split, chunks.allows, chunks.exact)) is not None:
        yield region, False
    layer = message_ops(seed, split, graph, chunks.allows, exact=chunks.exact)
    if layer and (region := _region(seed, split, layer.__contains__, chunks.exact, layer_ops=len(layer))) is not None:
        yield region, True


def _region(seed: fx.Node, split: Split, allows: Allows, exact: bool, *, layer_ops: int = 0) -> Region | None:
    """The region around a tensor, in the number of pieces that pays; None if the region is not worth running in pieces.

    The large tensors that never exist whole must have twice the bytes of the largest tensor around the region, or pieces save
    little. There are two pieces for each time that the seed is larger than that tensor. The large tensors of a piece, two or
    three in a backward, then take about as much as the tensors around. A layer of message passing, which has ``layer_ops`` ops,
    has more of them, a quarter of which may exist at once. Pieces of fewer than 16,384 elements take no less time. The number
    depends on the graph alone and not on a budget: the order of sums is the same at every budget.
    """
    limits: dict[str, Any] = {"least_share": 0, "most_ops": layer_ops} if layer_ops else {}
    trial = grow(seed, split, 2, allows=allows, exact=exact, **limits)
    if trial is None or len(trial.rules) < 2:
        return None
    around = _largest_around(trial)
    if _saved_bytes(trial) < 2 * around:
        return None
    wanted = 2 * max(2.0, (_saved_bytes(trial) / 4 if layer_ops else size_bytes(seed)) / around)
    most = min(32, trial.length, tensor(seed).numel() // (1 << 14))
    count = 2
    while count < wanted and 2 * count <= most:
        count *= 2
    while count > 2:
        region = grow(seed, split, count, allows=allows, exact=exact, **limits)
        if region is not None and len(region.rules) >= len(trial.rules):
            return closed(region, allows)  # with more pieces fewer ops would belong to it: a batch of 8 has no 16 pieces
        count //= 2
    return closed(trial, allows)


def _largest_around(region: Region) -> int:
    """Bytes of the largest tensor that a region reads or returns in slices, besides its seed."""
    read = {value for op in region.rules for value in inputs(op) if producer(value) not in region.rules}
    # The seed itself may be returned to the caller, as logits are: tensors made of it are then large, and those around are not.
    own = storage_key(tensor(region.seed))
    cut = [value for value in read | kept_outside(region) if value in region.splits and storage_key(tensor(value)) != own]
    return max((held_bytes(value) if makes_views(producer(value)) else size_bytes(value) for value in cut), default=1)


def _saved_bytes(region: Region) -> int:
    """Bytes of the large tensors that the region's ops allocate and that never exist whole."""
    returned = {storage_key(tensor(value)) for value in kept_outside(region) if not makes_views(producer(value))}
    made = [value for op in region.rules if not makes_views(op) for value in outputs(op) if value in region.splits]
    inside = {storage_key(tensor(value)): size_bytes(value) for value in made if value is not None}
    return sum(size for key, size in inside.items() if size >= region.least_bytes and key not in returned)


def _call(op: fx.Node) -> Hashable:
    return str(op.target), tuple(tuple(tensor(v).shape) for v in (*inputs(op), *(v for v in outputs(op) if v is not None)))


def _signature(way: RegionGroup) -> tuple[Hashable, ...]:
    (region,) = way.regions
    ops = tuple((str(op.target), tuple(tuple(tensor(v).shape) for v in outputs(op) if v is not None)) for op in region.rules)
    return region.count, tuple(sorted(ops))
