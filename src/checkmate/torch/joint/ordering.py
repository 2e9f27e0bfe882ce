"""Order constraints in a joint graph besides data dependences: random streams, side effects, overwritten storages."""

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
    """Pairs of ops ``(a, b)``: the first computation of ``a`` must come before the first computation of ``b``.

    - Random ops keep their order, so that each draws the same numbers as in the original program; so do sequenced ops.
    - Ops that overwrite one storage keep their order, and an op that reads it comes after the overwriters before it.
      (That it comes before those after it is a constraint on all its computations: ``Op.clobbered_by``.)
    - Random ops, side effects and numbers of the forward come before the boundary: the caller sees them after the forward.
    - Ops of the backward that allocate come after the boundary, since they would otherwise be computed in the forward.

    Args:
        ops: All ops, including the boundary.
        values: All values.
        listed: Index, node and properties of each op except the boundary, ascending.
        boundary: Index of the boundary, or None for a whole step. Passed, since the `Graph` does not exist yet.
        known: Ops that overwrite each storage.

    Returns:
        The pairs, sorted.
    """
    pairs: dict[tuple[int, int], None] = {}
    random = [o for o, _, properties in listed if properties.random]
    sequenced = [o for o, _, properties in listed if properties.sequenced]
    pairs.update(dict.fromkeys((*pairwise(random), *pairwise(sequenced))))
    for overwriting in known.values():
        pairs.update(dict.fromkeys((a, b) for a, b in pairwise(overwriting) if a < b))
    after = set() if boundary is None else set(ops[boundary].outputs)  # values that depend on the boundary by data
    for o, node, properties in listed:
        if boundary is None:
            pass
        elif o < boundary:
            if properties.random or properties.effect or not leaves(node.meta.get("val")):
                pairs[o, boundary] = None
        elif any(v in after for v in ops[o].inputs):
            after.update(ops[o].outputs)
        elif any(values[v].base is None for v in ops[o].outputs):
            # Views of forward values get no pair: planners fold them into the ops that read them.
            pairs[boundary, o] = None
        pairs.update(dict.fromkeys((m, o) for m in overwriters(node, known) if m < o))
    return tuple(sorted(pairs))
