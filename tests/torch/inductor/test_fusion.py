"""The kinds of ops that Inductor fuses, by the names that FX gives them."""

from __future__ import annotations

import pytest

from checkmate import Graph, Op, Value
from checkmate.torch.inductor.fusion import contract_fusible_chains


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("aten.mul.Tensor", ((0,), (1, 2), (3,))),
        ("prims.inductor_random.default", ((0,), (1, 2), (3,))),
        ("aten.constant_pad_nd.default", ((0,), (1, 2), (3,))),
        ("aten.sum.dim_IntList", ((0,), (1,), (2,), (3,))),
        ("aten.mm.default", ((0,), (1,), (2,), (3,))),
    ],
)
def test_pointwise_ops_of_every_overload_join_the_op_that_reads_them(kind: str, parts: tuple[tuple[int, ...], ...]) -> None:
    """A graph names overloads; the partitioner of torch lists the packets that they belong to."""
    kinds = ("aten.mm.default", kind, "aten.exp.default", "aten.mm.default")
    ops = tuple(Op(f"op{o}", (o - 1,) if o else (), (o,), 10, kind=each) for o, each in enumerate(kinds))
    graph = Graph(ops, tuple(Value(f"v{v}", 40, kept=v == 3) for v in range(4)))
    assert contract_fusible_chains(graph).parts == parts
