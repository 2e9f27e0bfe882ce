"""What a compiler that fuses makes of a graph: chains of pointwise ops are one op, and nothing inside them is stored.

Planned as they are, the ops of a chain would each cost a trip through memory and each hold a tensor that never
exists. A chain is contracted into the op that ends it if nobody outside reads anything of its inside; since the end
is then its only way out, contracting makes no cycle, and a plan of what is left is a plan of the original.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from checkmate.core.graph import Graph, Op, Value
from checkmate.torch._compat.aot import fusible_packets

_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "any", "argmax", "argmin", "prod")
_MORE = ("prims.inductor_random", "prims.inductor_lookup_seed", "aten.constant_pad_nd")


@dataclass(frozen=True, slots=True)
class Fused:
    """A graph with its chains contracted, and how to get back.

    Attributes:
        graph: The contracted graph.
        parts: Ops of the original graph that each op stands for, in their order. Shape ``[op]``.
    """

    graph: Graph
    parts: tuple[tuple[int, ...], ...]

    @property
    def stored(self) -> tuple[int, ...]:
        """Pointwise ops of the original graph whose results a plan counts as stored: the ends of chains."""
        pointwise, _ = _kinds()
        ends = (part[-1] for part, op in zip(self.parts, self.graph.ops, strict=True) if op.kind.rsplit(".", 1)[0] in pointwise)
        return tuple(ends)

    def contract(self, order: Iterable[int]) -> tuple[int, ...]:
        """The order of this graph that an order made by `expand` came from."""
        position = {part[-1]: o for o, part in enumerate(self.parts)}
        return tuple(position[o] for o in order if o in position)

    def expand(self, order: Iterable[int]) -> tuple[int, ...]:
        """The order of the original graph that an order of the contracted one stands for."""
        return tuple(part for o in order for part in self.parts[o])


@functools.cache
def _kinds() -> tuple[frozenset[str], frozenset[str]]:
    """Kinds, without overload, of pointwise ops and of reductions that a compiler fuses."""
    fusible = {str(packet) for packet in fusible_packets() if isinstance(packet, torch._ops.OpOverloadPacket)}
    reductions = {kind for kind in fusible if kind.split(".")[-1] in _REDUCTIONS}
    return frozenset((fusible - reductions) | set(_MORE)), frozenset(reductions)


def fuse(graph: Graph) -> Fused:
    """Contract every chain of pointwise ops into the op that ends it.

    A chain stays on its side of the boundary and has nothing in it that runs once, is overwritten or has its place in an
    order. Views within it come along. It may end in a reduction, but has none inside: what a reduction makes is stored.

    Args:
        graph: The graph of a step, its kinds the names of ops in FX.

    Examples:
        >>> x, y, z = Value("x", 400), Value("y", 400), Value("z", 4, kept=True)
        >>> mul, exp = Op("mul", (0,), (1,), 10, kind="aten.mul.Tensor"), Op("sum", (1,), (2,), 10, kind="aten.sum.default")
        >>> fused = fuse(Graph((Op("mm", (), (0,), 50, kind="aten.mm.default"), mul, exp), (x, y, z)))
        >>> [op.name for op in fused.graph.ops], fused.parts
        (['mm', 'sum'], ((0,), (1, 2)))
    """
    pointwise, reductions = _kinds()
    packet = [op.kind.rsplit(".", 1)[0] for op in graph.ops]
    ordered = {o for pair in graph.order if not any(graph.ops[p].phase == "loss" for p in pair) for o in pair}
    readers: list[set[int]] = [set() for _ in graph.values]
    for o, op in enumerate(graph.ops):
        for v in op.inputs:
            readers[v].add(o)
    end = list(range(len(graph.ops)))
    for o in reversed(range(len(graph.ops))):
        op = graph.ops[o]
        ends = {end[r] for v in op.outputs for r in readers[v]}
        if len(ends) != 1 or o in ordered or not (packet[o] in pointwise or _is_view(graph, op)) or not _inside(graph, op):
            continue
        (last,) = ends
        closing = graph.ops[last]
        stored = all(graph.values[v].base is None for v in closing.outputs) and not _is_view(graph, closing)
        if closing.phase == op.phase and stored and (packet[last] in pointwise or packet[last] in reductions):
            end[o] = last
    return _contracted(graph, end, pointwise | reductions, packet)


def _is_view(graph: Graph, op: Op) -> bool:
    return op.recomputable and all(graph.values[v].size_bytes == 0 for v in op.outputs)


def _inside(graph: Graph, op: Op) -> bool:
    free = op.recomputable and not op.clobbered_by and not op.replay_bytes
    return free and not any(graph.values[v].kept for v in op.outputs)


def _contracted(graph: Graph, end: list[int], fusible: Collection[str], packet: list[str]) -> Fused:
    parts: dict[int, list[int]] = {}
    for o, last in enumerate(end):
        parts.setdefault(last, []).append(o)
    ends = sorted(parts)
    position = {last: i for i, last in enumerate(ends)}
    new_op = [position[last] for last in end]
    kept = [v for v in range(len(graph.values)) if end[graph.producer[v]] == graph.producer[v]]
    new_value = {v: i for i, v in enumerate(kept)}
    ops: list[Op] = []
    for last in ends:
        op, members = graph.ops[last], parts[last]
        made = {v for m in members for v in graph.ops[m].outputs}
        read = dict.fromkeys(v for m in members for v in graph.ops[m].inputs if v not in made)
        one_kernel = packet[last] in fusible
        ops.append(
            Op(
                name=op.name,
                inputs=tuple(new_value[v] for v in read),
                outputs=tuple(new_value[v] for v in op.outputs),
                cost=_cost(graph, members) if len(members) > 1 else op.cost,
                workspace_bytes=0 if one_kernel else op.workspace_bytes,
                replay_bytes=op.replay_bytes,
                recomputable=op.recomputable,
                clobbered_by=tuple(sorted({new_op[c] for c in op.clobbered_by})),
                phase=op.phase,
                kind=op.kind,
                source=op.source,
            )
        )
    values = tuple(
        Value(value.name, value.size_bytes, None if value.base is None else new_value[graph.root[v]], value.kept)
        for v, value in ((v, graph.values[v]) for v in kept)
    )
    pairs = dict.fromkeys((new_op[a], new_op[b]) for a, b in graph.order)
    contracted = Graph(
        ops=tuple(ops),
        values=values,
        order=tuple(sorted(pair for pair in pairs if pair[0] != pair[1])),
        resident_bytes=graph.resident_bytes,
        cost_unit=graph.cost_unit,
        name=graph.name,
    )
    return Fused(contracted, tuple(tuple(parts[last]) for last in ends))


def _cost(graph: Graph, members: list[int]) -> int:
    """Cost of a chain as one kernel: its arithmetic, and one trip through memory for what crosses its border.

    The member that moves its bytes fastest tells what moving costs; what the others take beyond that is arithmetic.
    """
    work = [graph.ops[m] for m in members if not _is_view(graph, graph.ops[m])]
    moved = [_bytes(graph, op.inputs) + _bytes(graph, op.outputs) for op in work]
    rate = min((op.cost / size for op, size in zip(work, moved, strict=True) if size), default=0.0)
    made = {v for op in work for v in op.outputs}
    read = {graph.root[v] for op in work for v in op.inputs} - made
    across = _bytes(graph, read) + _bytes(graph, graph.ops[members[-1]].outputs)
    arithmetic = sum(max(0.0, op.cost - rate * size) for op, size in zip(work, moved, strict=True))
    return max(1, round(rate * across + arithmetic))


def _bytes(graph: Graph, values: Iterable[int]) -> int:
    return sum(graph.values[graph.root[v]].size_bytes for v in values)
