"""Contracting chains: what is planned for the contracted graph is a plan of the original, and costs no more."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from checkmate import Graph, Op, Plan, Value, validate
from checkmate.torch.inductor.fusion import fuse
from tests.strategies import random_graph, random_order

KINDS = ("aten.mul.Tensor", "aten.exp.default", "aten.sum.dim_IntList", "aten.mm.default", "prims.inductor_random.default")


def with_kinds(rng: random.Random) -> Graph:
    """A random graph of ops that fuse and ops that do not."""
    graph = random_graph(rng, max_ops=14)
    ops = [msgspec.structs.replace(op, kind=rng.choice(KINDS)) for op in graph.ops]
    return msgspec.structs.replace(graph, ops=tuple(ops))


@given(st.integers(0, 2**32 - 1))
def test_every_order_of_the_contracted_graph_is_one_of_the_original(seed: int) -> None:
    """Otherwise a plan would read what nobody made."""
    rng = random.Random(seed)
    graph = with_kinds(rng)
    fused = fuse(graph)
    assert sorted(o for part in fused.parts for o in part) == list(range(len(graph.ops)))
    order = random_order(rng, fused.graph)
    assert not validate(fused.graph, Plan.from_order(fused.graph, order))
    assert not validate(graph, Plan.from_order(graph, fused.expand(order)))


@given(st.integers(0, 2**32 - 1))
def test_a_chain_costs_no_more_than_its_ops(seed: int) -> None:
    """One trip through memory instead of several: what crosses the border of a chain is part of what its ops move."""
    graph = with_kinds(random.Random(seed))
    fused = fuse(graph)
    for op, part in zip(fused.graph.ops, fused.parts, strict=True):
        assert op.cost <= max(1, sum(graph.ops[o].cost for o in part)) or len(part) == 1


def test_what_nothing_fuses_stays_as_it_is() -> None:
    """A graph of matrix products is the same graph, to the digest."""
    graph = with_kinds(random.Random(5))
    plain = msgspec.structs.replace(graph, ops=tuple(msgspec.structs.replace(o, kind="aten.mm.default") for o in graph.ops))
    assert fuse(plain).graph.digest == plain.digest


def test_an_activation_function_is_one_op_and_stores_nothing_inside() -> None:
    """GELU as Inductor decomposes it: five kernels in eager mode, one fused; its arithmetic is that of `erf`."""
    size = 4000
    ops = [Op("mm", (), (0,), 5000, kind="aten.mm.default")]
    for o, (name, reads, cost) in enumerate((("mul", (0,), 100), ("mul", (0,), 100), ("erf", (2,), 900), ("add", (3,), 100)), 1):
        ops.append(Op(name, reads, (o,), cost, kind=f"aten.{name}.Tensor"))
    ops += [Op("mul", (1, 4), (5,), 150, kind="aten.mul.Tensor"), Op("mm", (5,), (6,), 5000, kind="aten.mm.default")]
    graph = Graph(tuple(ops), tuple(Value(f"v{v}", size, kept=v == 6) for v in range(7)))
    fused = fuse(graph)
    assert fused.parts == ((0,), (1, 2, 3, 4, 5), (6,))
    assert [v.name for v in fused.graph.values] == ["v0", "v5", "v6"]
    # One read and one write at the speed of a multiplication, and what erf takes beyond moving its bytes.
    assert fused.graph.ops[1].cost == 100 + 800
