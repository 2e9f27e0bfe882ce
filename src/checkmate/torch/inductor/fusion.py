"""The kinds of ATen and prims ops that Inductor fuses, and the contraction of a captured graph by them."""

from __future__ import annotations

import functools

import torch

from checkmate.core.graph import Graph
from checkmate.solvers.reductions.contract_chains import ContractChains, FusibleKinds
from checkmate.torch._compat.aot import fusible_packets

_REDUCTIONS = ("sum", "mean", "amax", "amin", "max", "min", "var", "var_mean", "std", "any", "argmax", "argmin", "prod")
"""Reductions in the list of fusible packets of torch's partitioner, which does not separate them from pointwise ops."""

_POINTWISE = ("prims.inductor_random", "prims.inductor_lookup_seed", "aten.constant_pad_nd")
"""Pointwise ops that Inductor fuses and that this list does not contain."""


def contract_fusible_chains(graph: Graph) -> ContractChains:
    """Contract every chain of ops that Inductor computes in one kernel; see `ContractChains.of`.

    Args:
        graph: The graph of a step, with the names of FX ops as the kinds of its ops.

    Examples:
        >>> from checkmate.core.graph import Op, Value
        >>> x, y, z = Value("x", 400), Value("y", 400), Value("z", 4, kept=True)
        >>> mul, exp = Op("mul", (0,), (1,), 10, kind="aten.mul.Tensor"), Op("sum", (1,), (2,), 10, kind="aten.sum.default")
        >>> chains = contract_fusible_chains(Graph((Op("mm", (), (0,), 50, kind="aten.mm.default"), mul, exp), (x, y, z)))
        >>> [op.name for op in chains.contracted.ops], chains.parts
        (['mm', 'sum'], ((0,), (1, 2)))
    """
    pointwise, reductions = _fusible_packets()
    kinds = {op.kind: op.kind.rsplit(".", 1)[0] for op in graph.ops}  # "aten.mul.Tensor", an overload of the packet "aten.mul"
    return ContractChains.of(
        graph,
        FusibleKinds(
            pointwise=frozenset(kind for kind, packet in kinds.items() if packet in pointwise),
            reductions=frozenset(kind for kind, packet in kinds.items() if packet in reductions),
        ),
    )


@functools.cache
def _fusible_packets() -> tuple[frozenset[str], frozenset[str]]:
    """Packets of the pointwise ops, and of the reductions, that Inductor fuses."""
    fusible = {str(packet) for packet in fusible_packets() if isinstance(packet, torch._ops.OpOverloadPacket)}
    reductions = {packet for packet in fusible if packet.split(".")[-1] in _REDUCTIONS}
    return frozenset((fusible - reductions) | set(_POINTWISE)), frozenset(reductions)
