"""Contracting chains: what is planned for the contracted graph is a plan of the original, and costs no more."""

from __future__ import annotations

import random

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from checkmate import Graph, Op, Plan, Value, validate
from checkmate.solvers.reductions.contract_chains import ContractChains, FusibleKinds
from tests.strategies import random_graph, random_order

KINDS = ("mul", "exp", "sum", "mm", "random")
FUSIBLE = FusibleKinds(pointwise=frozenset({"mul", "exp", "erf", "add", "random"}), reductions=frozenset({"sum"}))


def with_kinds(rng: random.Random) -> Graph:
    """A random graph of ops that fuse and ops that do not."""
    graph = random_graph(rng, max_ops=14)
    ops = [msgspec.structs.replace(op, kind=rng.choice(KINDS)) for op in graph.ops]
    return msgspec.structs.replace(graph, ops=tuple(ops))


@given(st.integers(0, 2**32 - 1))
def test_every_order_of_the_contracted_graph_is_one_of_the_original(seed: int) -> None:
    """Otherwise a plan would read a value that was not computed."""
    rng = random.Random(seed)
    graph = with_kinds(rng)
    chains = ContractChains.of(graph, FUSIBLE)
    assert sorted(o for part in chains.parts for o in part) == list(range(len(graph.ops)))
    order = random_order(rng, chains.contracted)
    assert not validate(chains.contracted, Plan.from_order(chains.contracted, order))
    assert not validate(graph, Plan.from_order(graph, chains.invert(order)))
    assert chains.apply_order(chains.invert(order)) == tuple(order)


@given(st.integers(0, 2**32 - 1))
def test_a_chain_costs_no_more_than_its_ops(seed: int) -> None:
    """One trip through memory instead of several: what crosses the border of a chain is part of what its ops move."""
    graph = with_kinds(random.Random(seed))
    chains = ContractChains.of(graph, FUSIBLE)
    for op, part in zip(chains.contracted.ops, chains.parts, strict=True):
        assert op.cost <= max(1, sum(graph.ops[o].cost for o in part)) or len(part) == 1


def test_a_graph_without_fusible_ops_is_unchanged() -> None:
    """A graph of matrix products is the same graph, to the digest."""
    graph = with_kinds(random.Random(5))
    plain = msgspec.structs.replace(graph, ops=tuple(msgspec.structs.replace(o, kind="mm") for o in graph.ops))
    assert ContractChains.of(plain, FUSIBLE).contracted.digest == plain.digest


def test_an_activation_function_is_one_op_and_stores_nothing_inside() -> None:
    """GELU as Inductor decomposes it: five kernels in eager mode, one fused; its arithmetic is that of `erf`."""
    size = 4000
    ops = [Op("mm", (), (0,), 5000, kind="mm")]
    for o, (name, reads, cost) in enumerate((("mul", (0,), 100), ("mul", (0,), 100), ("erf", (2,), 900), ("add", (3,), 100)), 1):
        ops.append(Op(name, reads, (o,), cost, kind=name))
    ops += [Op("mul", (1, 4), (5,), 150, kind="mul"), Op("mm", (5,), (6,), 5000, kind="mm")]
    graph = Graph(tuple(ops), tuple(Value(f"v{v}", size, kept=v == 6) for v in range(7)))
    chains = ContractChains.of(graph, FUSIBLE)
    assert chains.parts == ((0,), (1, 2, 3, 4, 5), (6,))
    assert [v.name for v in chains.contracted.values] == ["v0", "v5", "v6"]
    # One read and one write at the speed of a multiplication, and what erf takes beyond moving its bytes.
    assert chains.contracted.ops[1].cost == 100 + 800


def test_a_reduction_ends_a_chain_and_is_never_inside_one() -> None:
    """What it computes is stored, so that the pointwise op after it begins a chain of its own."""
    kinds = ("mm", "mul", "sum", "exp", "mm")
    ops = tuple(Op(kind, (o - 1,) if o else (), (o,), 10, kind=kind) for o, kind in enumerate(kinds))
    chains = ContractChains.of(Graph(ops, tuple(Value(f"v{v}", 40, kept=v == 4) for v in range(5))), FUSIBLE)
    assert chains.parts == ((0,), (1, 2), (3,), (4,))
    assert chains.stored == (3,)
