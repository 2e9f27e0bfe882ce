"""Contracting chains: what is planned for the contracted graph is a plan of the original, and costs no more."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkmate import Graph, Op, Plan, Value, validate
from checkmate.solvers.reductions.contract_chains import ContractChains, FusibleKinds
from tests.strategies import random_graph, random_order

KINDS = ("mul", "exp", "sum", "mm", "random")
FUSIBLE = FusibleKinds(pointwise=frozenset({"mul", "exp", "erf", "add", "random"}), reductions=frozenset({"sum"}))
LIGHT = replace(FUSIBLE, light=frozenset({"mul", "add"}))


def with_kinds(rng: random.Random) -> Graph:
    """A random graph of ops that fuse and ops that do not."""
    graph = random_graph(rng, max_ops=14)
    ops = [msgspec.structs.replace(op, kind=rng.choice(KINDS)) for op in graph.ops]
    return msgspec.structs.replace(graph, ops=tuple(ops))


@given(st.integers(0, 2**32 - 1), st.sampled_from([FUSIBLE, LIGHT]))
def test_every_order_of_the_contracted_graph_is_one_of_the_original(seed: int, kinds: FusibleKinds) -> None:
    """Otherwise a plan would read a value that was not computed."""
    rng = random.Random(seed)
    graph = with_kinds(rng)
    chains = ContractChains.of(graph, kinds)
    inside = Counter(o for part in chains.parts for o in part)
    assert sorted(inside) == list(range(len(graph.ops)))
    free = {o for o, op in enumerate(graph.ops) if all(graph.values[v].size_bytes == 0 for v in op.outputs)}
    assert all(graph.ops[o].kind in kinds.light or o in free for o, count in inside.items() if count > 1)
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


@given(st.integers(0, 2**32 - 1))
def test_a_graph_without_fusible_ops_is_unchanged(seed: int) -> None:
    """A graph of matrix products is the same graph, to its names and units."""
    graph = with_kinds(random.Random(seed))
    ops = tuple(msgspec.structs.replace(op, kind="mm", source=f"model.py:{o}") for o, op in enumerate(graph.ops))
    plain = msgspec.structs.replace(graph, ops=ops, cost_unit="FLOP", name="products")
    chains = ContractChains.of(plain, FUSIBLE)
    assert chains.contracted == plain
    assert (chains.parts, chains.stored) == (tuple((o,) for o in range(len(ops))), ())


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


@pytest.mark.parametrize(
    ("kind", "size", "parts"),
    [
        ("mul", 40, ((0,), (1, 2), (1, 3), (4,))),  # its operand takes no more
        ("mul", 20, ((0,), (1,), (2,), (3,), (4,))),  # storing the result frees the operand
        ("exp", 40, ((0,), (1,), (2,), (3,), (4,))),
    ],
)
def test_a_light_op_is_computed_by_each_of_its_readers(kind: str, size: int, parts: tuple[tuple[int, ...], ...]) -> None:
    """Nothing but its operand is there from one to the other, which may be in the backward."""
    graph = row(
        Op("mm", (), (0,), 50, kind="mm"),
        Op("light", (0,), (1,), 10, kind=kind),
        Op("exp", (1,), (2,), 10, kind="exp"),
        Op("sum", (1,), (3,), 10, phase="backward", kind="sum"),
        Op("mm", (2, 3), (4,), 50, phase="backward", kind="mm"),
        sizes=(40, size, 40, 4, 40),
    )
    assert ContractChains.of(graph, LIGHT).parts == parts


def test_a_reduction_ends_a_chain_and_is_never_inside_one() -> None:
    """What it computes is stored, so that the pointwise op after it begins a chain of its own."""
    kinds = ("mm", "mul", "sum", "exp", "mm")
    ops = tuple(Op(kind, (o - 1,) if o else (), (o,), 10, kind=kind) for o, kind in enumerate(kinds))
    chains = ContractChains.of(Graph(ops, tuple(Value(f"v{v}", 40, kept=v == 4) for v in range(5))), FUSIBLE)
    assert chains.parts == ((0,), (1, 2), (3,), (4,))
    assert chains.stored == (3,)


def row(*ops: Op, sizes: tuple[int, ...], order: tuple[tuple[int, int], ...] = (), views: tuple[int, ...] = ()) -> Graph:
    """A graph whose values have these sizes; views are of the value before them, and the last value is kept."""
    values = (Value(f"v{v}", size, v - 1 if v in views else None, v == len(sizes) - 1) for v, size in enumerate(sizes))
    return Graph(ops, tuple(values), order)


def test_a_chain_keeps_the_fields_of_its_last_op_and_takes_no_workspace() -> None:
    """A kernel works in registers, also where it is a single op; ops that do not fuse keep their workspace."""
    graph = row(
        Op("mm", (), (0,), 0, workspace_bytes=7, kind="mm"),
        Op("mul", (0,), (1,), 0, workspace_bytes=7, kind="mul"),
        Op("mm", (1,), (2,), 50, workspace_bytes=7, phase="loss", kind="mm"),
        Op("exp", (2,), (3,), 10, workspace_bytes=7, phase="backward", kind="exp", source="model.py:1"),
        Op("total", (3,), (4,), 4, workspace_bytes=7, replay_bytes=5, phase="backward", kind="sum", source="model.py:2"),
        sizes=(40, 40, 40, 40, 4),
    )
    chains = ContractChains.of(graph, FUSIBLE)
    assert chains.parts == ((0,), (1,), (2,), (3, 4))
    assert chains.contracted.ops == (
        Op("mm", (), (0,), 0, workspace_bytes=7, kind="mm"),
        Op("mul", (0,), (1,), 0, kind="mul"),
        Op("mm", (1,), (2,), 50, workspace_bytes=7, phase="loss", kind="mm"),
        # The sum moves 44 bytes at 1/11 a byte, and as many cross the border; exp costs 10 - 80/11 beyond its 80 bytes.
        Op("total", (2,), (3,), 7, replay_bytes=5, phase="backward", kind="sum", source="model.py:2"),
    )
    alone = ContractChains.of(row(Op("sum", (), (0,), 3, workspace_bytes=7, kind="sum"), sizes=(4,)), FUSIBLE)
    assert alone.contracted.ops == (Op("sum", (), (0,), 3, kind="sum"),)


def test_what_crosses_the_border_is_what_the_last_op_writes() -> None:
    """A sum of 4 bytes at the end of two ops that write 400: 404 bytes cross, at 1 a byte."""
    graph = row(
        Op("mm", (), (0,), 50, kind="mm"),
        Op("mul", (0,), (1,), 800, kind="mul"),
        Op("exp", (1,), (2,), 1000, kind="exp"),
        Op("sum", (2,), (3,), 404, kind="sum"),
        sizes=(400, 400, 400, 4),
    )
    chains = ContractChains.of(graph, FUSIBLE)
    assert chains.parts == ((0,), (1, 2, 3))
    assert chains.contracted.ops[1].cost == 404 + 200


def test_a_free_view_inside_a_chain_is_part_of_it_and_costs_nothing() -> None:
    """An op that allocates a byte and does not fuse is no view."""
    graph = row(
        Op("mm", (), (0,), 50, kind="mm"),
        Op("tiny", (0,), (1,), 50, kind="mm"),
        Op("mul", (1,), (2,), 41, kind="mul"),
        Op("transpose", (2,), (3,), 100, kind="view"),
        Op("exp", (3,), (4,), 80, kind="exp"),
        sizes=(40, 1, 40, 0, 40),
        views=(3,),
    )
    chains = ContractChains.of(graph, FUSIBLE)
    assert chains.parts == ((0,), (1,), (2, 3, 4))
    # The root of the view is made inside: one byte is read and 40 are written, at 1 a byte.
    assert chains.contracted.ops[2].cost == 41


def test_a_chain_that_moves_no_byte_costs_its_arithmetic() -> None:
    """Without a byte there is no rate."""
    graph = row(
        Op("empty", (), (0,), 5, kind="mul"),
        Op("effect", (0,), (1,), 9, recomputable=False, kind="mul"),
        sizes=(0, 0),
    )
    chains = ContractChains.of(graph, FUSIBLE)
    assert chains.parts == ((0, 1),)
    assert chains.contracted.ops[0].cost == 9


def in_order(*order: tuple[int, int], loss: int = 4) -> ContractChains:
    """The chains of mm, mul, exp, mm, a loss of two pointwise ops and an op after it, with an explicit order."""
    kinds = ("mm", "mul", "exp", "mm", "mul", "exp", "mm")
    ops = (
        Op(kind, (o - 1,) if o else (), (o,), 10, phase="loss" if o in (loss, loss + 1) else "forward", kind=kind)
        for o, kind in enumerate(kinds)
    )
    return ContractChains.of(row(*ops, sizes=(4,) * 7, order=order), FUSIBLE)


def test_an_op_that_has_its_place_in_the_order_is_inside_no_chain() -> None:
    """Its place would be that of the whole chain. Pairs with the loss only part forward from backward."""
    free = in_order()
    assert free.parts == ((0,), (1, 2), (3,), (4, 5), (6,))
    tied = in_order((1, 3))
    assert tied.parts == ((0,), (1,), (2,), (3,), (4, 5), (6,))
    assert tied.contracted.order == ((1, 3),)
    parted = in_order((1, 4))
    assert parted.parts == free.parts
    assert parted.contracted.order == ((1, 3),)


def test_an_order_inside_a_chain_is_dropped_and_pairs_are_ascending() -> None:
    """The chain is one op; two pairs that become one are listed once."""
    chains = in_order((2, 5), (4, 5), (1, 4), (0, 4))
    assert chains.parts == ((0,), (1, 2), (3,), (4, 5), (6,))
    assert chains.contracted.order == ((0, 3), (1, 3))
