"""The kinds of ops that Inductor fuses, by the names that FX gives them."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from checkmate import Graph, Op, Value
from checkmate.torch.inductor.fusion import contract_fusible_chains, predicted_peak, trailing_reductions


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


def chain(*kinds: str, sizes: tuple[int, ...]) -> Graph:
    """Ops that each read the one before; the last value is kept."""
    ops = tuple(Op(f"op{o}", (o - 1,) if o else (), (o,), 10, kind=kind) for o, kind in enumerate(kinds))
    return Graph(ops, tuple(Value(f"v{v}", size, kept=v == len(sizes) - 1) for v, size in enumerate(sizes)))


def peak(graph: Graph, *trailing: int) -> int:
    chains = contract_fusible_chains(graph, trailing)
    return predicted_peak(chains, range(len(chains.contracted.ops)))


def test_a_pointwise_op_writes_over_an_operand_that_dies() -> None:
    """Of its own size; a matrix product does not."""
    mm, exp = "aten.mm.default", "aten.exp.default"
    assert peak(chain(mm, exp, mm, sizes=(40, 40, 8))) == 48
    assert peak(chain(mm, exp, mm, sizes=(40, 20, 8))) == 60
    assert peak(chain(mm, mm, mm, sizes=(40, 40, 8))) == 80


def test_what_is_read_between_two_kernels_only_is_not_stored() -> None:
    """A softmax: its exponentials are read by a sum over rows and by the division. Else they are written over the operand."""
    mm, exp, total, div = "aten.mm.default", "aten.exp.default", "aten.sum.dim_IntList", "aten.div.Tensor"
    ops = (
        Op("mm", (), (0,), 10, kind=mm),
        Op("exp", (0,), (1,), 10, kind=exp),
        Op("sum", (1,), (2,), 10, kind=total),
        Op("div", (1, 2), (3,), 10, kind=div),
    )
    values = (Value("x", 40), Value("e", 40), Value("s", 4), Value("y", 40, kept=True))
    graph = Graph(ops, values)
    assert peak(graph, 2) == 40
    assert peak(graph) == 40
    assert contract_fusible_chains(graph, (2,)).parts == ((0,), (1, 2, 3))


@pytest.mark.parametrize(
    ("dims", "rows"), [((-1,), True), ((1, 2), True), ((0, 1, 2), True), ((0,), False), ((0, 2), False), (None, True)]
)
def test_reductions_over_rows(dims: tuple[int, ...] | None, rows: bool) -> None:
    """Those of the last dimensions."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3, 4)
    node = (
        graph.call_function(torch.ops.aten.sum.dim_IntList, (x, list(dims)))
        if dims
        else graph.call_function(torch.ops.aten.sum.default, (x,))
    )
    assert trailing_reductions([None, node]) == ({1} if rows else set())


@pytest.mark.parametrize("op", [torch.ops.aten.cumsum.default, torch.ops.aten.max_pool2d.default])
def test_other_ops_with_numbers_after_a_tensor_are_no_reductions(op: object) -> None:
    """A running sum over rows, and a pooling whose window looks like dimensions, are kernels that store their results."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(2, 3, 8, 8)
    node = graph.call_function(op, (x, 3) if op is torch.ops.aten.cumsum.default else (x, [3, 3]))
    assert trailing_reductions([node]) == frozenset()
