"""What must come before what in a joint graph beyond its data: random streams, effects, overwritten inputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from checkmate.core.graph import Op, Value
from checkmate.torch.graph.mutations import Mutators, overwriters
from checkmate.torch.graph.op_properties import OpProperties
from checkmate.torch.graph.storages import leaves


def order_pairs(
    ops: Sequence[Op],
    values: Sequence[Value],
    listed: Sequence[tuple[int, fx.Node, OpProperties]],
    boundary: int | None,
    known: Mutators,
) -> tuple[tuple[int, int], ...]:
    """Pairs (a, b) of ops: the first computation of a comes before the first of b.

    Args:
        ops: All ops, the boundary included.
        values: All values.
        listed: Index, node and facts of each but the boundary, ascending.
        boundary: Index of the boundary, or None in the graph of a whole step.
        known: What overwrites what.
    """
    pairs: dict[tuple[int, int], None] = {}
    random = [o for o, _, properties in listed if properties.random]
    sequenced = [o for o, _, properties in listed if properties.sequenced]
    pairs.update(dict.fromkeys((*pairwise(random), *pairwise(sequenced))))
    for overwriting in known.values():
        pairs.update(dict.fromkeys((a, b) for a, b in pairwise(overwriting) if a < b))
    after = set() if boundary is None else set(ops[boundary].outputs)
    for o, node, properties in listed:
        if boundary is None:
            pass
        elif o < boundary:
            # The random stream, every effect and every number of the forward belong to the forward.
            if properties.random or properties.effect or not leaves(node.meta.get("val")):
                pairs[o, boundary] = None
        elif any(v in after for v in ops[o].inputs):
            after.update(ops[o].outputs)
        elif any(values[v].base is None for v in ops[o].outputs):
            # Views of what the forward made stay free: they are made where they are read, and planners fold them.
            pairs[boundary, o] = None
        pairs.update(dict.fromkeys((m, o) for m in overwriters(node, known) if m < o))
    return tuple(sorted(pairs))
