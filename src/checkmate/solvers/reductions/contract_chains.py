"""A reduction for compilers that fuse: each chain of fusible ops becomes one op, and nothing inside it is stored.

A compiler that fuses computes a chain of pointwise ops in one kernel and keeps the values inside it in registers. Planned op by
op, each op of the chain would cost a trip through memory and hold a value that never exists. Therefore a chain is contracted into
its last op, provided that no op outside reads a value inside. The last op is then the only way out of the chain: the
contraction makes no cycle, and a plan of the contracted graph is a plan of the original one. Light ops are the exception:
each chain that reads one has its own computation of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from msgspec import structs

from checkmate.core.graph import Graph, Op


@dataclass(frozen=True, slots=True)
class FusibleKinds:
    """The kinds of ops that a compiler fuses, as in `Op.kind`."""

    pointwise: frozenset[str]  # anywhere in a chain
    reductions: frozenset[str]  # only at the end of a chain: the result of a reduction is stored
    light: frozenset[str] = frozenset()  # pointwise, and cheaper to compute again in each kernel than to store and read

    def fuse(self, op: Op) -> bool:
        """Whether an op is part of a kernel with others."""
        return op.kind in self.pointwise or op.kind in self.reductions


@dataclass(frozen=True, slots=True)
class ContractChains:
    """A graph with its chains contracted, and the way back."""

    contracted: Graph
    parts: tuple[tuple[int, ...], ...]
    """Ops of the original graph behind each op of ``contracted``, in ascending order; a light op can be in several."""
    stored: tuple[int, ...]
    """Pointwise ops of the original graph whose outputs a plan of ``contracted`` counts as stored: the last op of each chain, and
    pointwise ops in no chain."""
    rows: frozenset[int] = frozenset()
    """Ops of ``contracted`` that are, or end with, a reduction over rows."""

    @classmethod
    def of(cls, graph: Graph, kinds: FusibleKinds, rows: Collection[int] = ()) -> ContractChains:
        """Contract every chain of pointwise ops into its last op.

        A chain stays on one side of the boundary between forward and backward. It contains no op that may not run again, whose
        inputs are overwritten, that holds replay state, or that has a place in the graph's explicit order. Free views inside
        it become part of it.

        A light op whose result is no smaller than its operands is never stored: it becomes part of each chain that reads it, on
        both sides of the boundary. Its operands are held instead of its result, and take no more bytes.
        """
        members: dict[int, list[int]] = {}
        for o, lasts in enumerate(_chain_ends(graph, kinds, rows)):
            for last in lasts:
                members.setdefault(last, []).append(o)
        ends = sorted(members)
        contracted = _contracted(graph, kinds, members)
        stored = tuple(last for last in ends if graph.ops[last].kind in kinds.pointwise)
        over_rows = frozenset(o for o, last in enumerate(ends) if last in rows)
        return cls(contracted, tuple(tuple(members[last]) for last in ends), stored, over_rows)

    def apply_order(self, order: Iterable[int]) -> tuple[int, ...]:
        """Order of the contracted graph from which `invert` made an order."""
        position = {part[-1]: o for o, part in enumerate(self.parts)}
        return tuple(position[o] for o in order if o in position)

    def invert(self, order: Iterable[int]) -> tuple[int, ...]:
        """Order of the original graph for an order of the contracted one."""
        return tuple(part for o in order for part in self.parts[o])


def _chain_ends(graph: Graph, kinds: FusibleKinds, rows: Collection[int]) -> list[frozenset[int]]:
    """Last ops of the chains that contain each op; the op itself if no chain contains it."""
    paired = {o for pair in graph.order for o in pair} | {c for op in graph.ops for c in op.clobbered_by}
    ordered = {o for pair in graph.order if not any(graph.ops[p].phase == "loss" for p in pair) for o in pair}
    ends = [frozenset({o}) for o in range(len(graph.ops))]
    for o in reversed(range(len(graph.ops))):  # readers first: an op joins the chains of its readers
        op = graph.ops[o]
        chains = frozenset[int]().union(*(ends[r] for v in op.outputs for r in graph.readers[v]))
        fused = op.kind in kinds.pointwise or o in rows or _is_view(graph, op)
        if not chains or o in ordered or not fused or not _inside(graph, op) or not all(_closes(graph, kinds, c) for c in chains):
            continue
        alone = len(chains) == 1 and all(graph.ops[c].phase == op.phase for c in chains)
        if alone or (len(chains) <= 4 and o not in paired and _is_light(graph, kinds, op)):
            ends[o] = chains
    return ends


def _closes(graph: Graph, kinds: FusibleKinds, last: int) -> bool:
    """Whether a chain may end with an op."""
    op = graph.ops[last]
    return kinds.fuse(op) and all(graph.values[v].base is None for v in op.outputs) and not _is_view(graph, op)


def _is_light(graph: Graph, kinds: FusibleKinds, op: Op) -> bool:
    """Whether an op is computed again for each reader, from operands that take no more bytes than its result."""
    # Other operands, such as the mean of each row, are not counted up to a sixteenth of the result.
    small = _bytes(graph, set(op.inputs)) <= (1 + 1 / 16) * _bytes(graph, op.outputs)
    return _is_view(graph, op) or (op.kind in kinds.light and small)


def _is_view(graph: Graph, op: Op) -> bool:
    return op.recomputable and all(graph.values[v].size_bytes == 0 for v in op.outputs)


def _inside(graph: Graph, op: Op) -> bool:
    """Whether the rules for the op allow it inside a chain."""
    free = op.recomputable and not op.clobbered_by and not op.replay_bytes
    return free and not any(graph.values[v].kept for v in op.outputs)


def _contracted(graph: Graph, kinds: FusibleKinds, members: dict[int, list[int]]) -> Graph:
    """The contracted graph."""
    ends = sorted(members)
    new_op = {m: i for i, last in enumerate(ends) for m in members[last]}  # of ops in pairs, which are in one chain
    kept = [v for v, o in enumerate(graph.producer) if o in members]
    new_value = {v: i for i, v in enumerate(kept)}
    ops: list[Op] = []
    for last in ends:
        op, chain = graph.ops[last], members[last]
        made = {v for m in chain for v in graph.ops[m].outputs}
        read = dict.fromkeys(v for m in chain for v in graph.ops[m].inputs if v not in made)
        ops.append(
            structs.replace(
                op,
                inputs=tuple(new_value[v] for v in read),
                outputs=tuple(new_value[v] for v in op.outputs),
                cost=_cost(graph, chain) if len(chain) > 1 else op.cost,
                workspace_bytes=0 if kinds.fuse(op) else op.workspace_bytes,
                clobbered_by=tuple(sorted({new_op[c] for c in op.clobbered_by})),
            )
        )
    roots = [None if graph.values[v].base is None else new_value[graph.root[v]] for v in kept]
    values = tuple(structs.replace(graph.values[v], base=root) for v, root in zip(kept, roots, strict=True))
    pairs = {(new_op[a], new_op[b]) for a, b in graph.order}
    return structs.replace(graph, ops=tuple(ops), values=values, order=tuple(sorted((a, b) for a, b in pairs if a != b)))


def _cost(graph: Graph, members: list[int]) -> int:
    """Cost of a chain as one kernel: its arithmetic, and one trip through memory for the values that cross its border.

    Costs are measured op by op, without a split into arithmetic and traffic. The member with the least cost per byte counts as
    limited by memory: its rate is the cost of moving a byte. The cost of the other members beyond that rate is arithmetic.
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
