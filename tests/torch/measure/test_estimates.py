"""Estimated scratch memory is at least what kernels allocate."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from checkmate.torch import measure_peak
from checkmate.torch.graph.optimizer_ops import UPDATE, Updates, update_parameters
from checkmate.torch.measure.estimates import estimated_workspace_bytes

aten = torch.ops.aten
SHAPES = [  # channels, channels of the result, groups, transposed
    (24, 12, 1, False),
    (24, 3, 1, False),
    (16, 16, 4, False),
    (16, 8, 1, True),
    (128, 3, 1, False),
]


def estimated(op: Any, args: tuple[Any, ...]) -> int:
    """The estimate for a call."""
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes = [graph.placeholder("x") if isinstance(a, torch.Tensor) else a for a in args]
    for node, a in zip(nodes, args, strict=True):
        if isinstance(a, torch.Tensor):
            node.meta["val"] = mode.from_tensor(a)
    called = graph.call_function(op, tuple(nodes))
    with mode:
        called.meta["val"] = op(*(n.meta["val"] if isinstance(n, fx.Node) else n for n in nodes))
    return estimated_workspace_bytes(called)


def measured(op: Any, args: tuple[Any, ...]) -> int:
    """What a call allocates besides its results."""
    results = op(*args)
    made = sum(
        t.untyped_storage().nbytes() for t in ([results] if isinstance(results, torch.Tensor) else results) if t is not None
    )
    del results
    return measure_peak(lambda: op(*args)) - made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("shape", "rows"), [*itertools.product(SHAPES, (2, 4))])
def test_convolutions(shape: tuple[int, int, int, bool], rows: int, dtype: torch.dtype) -> None:
    """Where oneDNN has no kernel for a type the input is unfolded, which takes as many times more as the kernel is large."""
    channels, made, groups, transposed = shape
    x = torch.randn(rows, channels, 24, 24, dtype=dtype)
    weight = torch.randn(*((channels, made) if transposed else (made, channels // groups)), 3, 3, dtype=dtype)
    settings = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    forward = (x, weight, None, *settings)
    y = aten.convolution.default(*forward)
    backward = (torch.ones_like(y), x, weight, [0], *settings, [True, True, False])
    for op, args in ((aten.convolution.default, forward), (aten.convolution_backward.default, backward)):
        assert measured(op, args) <= estimated(op, args)


POINTWISE = [  # an op and its arguments; True for flags
    (aten.native_dropout_backward.default, (torch.float32, True, 1.25)),
    (aten.native_dropout_backward.default, (torch.bfloat16, True, 1.25)),
    (aten.native_dropout_backward.default, (torch.float64, True, 1.25)),
    (aten.sin.default, (torch.int64,)),
    (aten.mul.Tensor, (torch.float32, torch.float64)),
    (aten.add.Tensor, (torch.bfloat16, torch.float32)),
    (aten.ge.Tensor, (torch.float32, torch.float64)),
    (aten.abs.default, (torch.complex64,)),
    (aten.isinf.default, (torch.complex64,)),
    (aten.rad2deg.default, (torch.float32,)),
    (aten.ldexp.Tensor, (torch.float32, torch.float32)),
]


@pytest.mark.parametrize(("op", "types"), POINTWISE)
def test_pointwise_ops(op: Any, types: tuple[Any, ...]) -> None:
    """Operands of other types than the common one are copied, and some kernels make a temporary tensor."""
    args = tuple(a if isinstance(a, float) else torch.ones(32, 48, dtype=torch.bool if a is True else a) for a in types)
    assert 0 < measured(op, args) <= estimated(op, args)


@pytest.mark.parametrize("rows", [1, 2, 64])
def test_products(rows: int) -> None:
    """Matrices that are neither in rows nor in columns are copied, such as expanded ones; others are not."""
    wide, tall = torch.randn(rows, 96), torch.randn(96, rows)
    layouts = {"rows": wide, "columns": tall.t(), "row": wide[:1].expand(rows, -1), "column": wide[:, :1].expand(-1, 96)}
    layouts["every other"] = torch.randn(rows, 192)[:, ::2]
    for (name, left), (other, right) in itertools.product(layouts.items(), repeat=2):
        for args in ((left, right.t()), (left.t(), right)):
            assert measured(aten.mm.default, args) <= estimated(aten.mm.default, args)
            if {name, other} <= {"rows", "columns"}:
                assert estimated(aten.mm.default, args) <= 64


def test_the_common_pointwise_op_has_no_workspace() -> None:
    """A bound that counts too much would refuse budgets that hold."""
    x, mask = torch.ones(32, 48), torch.ones(32, 48, dtype=torch.bool)
    for op, args in (
        (aten.mul.Tensor, (x, x)),
        (aten.where.self, (mask, x, x)),
        (aten.tanh.default, (x,)),
        (aten.gt.Scalar, (x, 0)),
    ):
        assert estimated(op, args) <= 64


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "Adadelta", "Rprop", "ASGD"])
def test_updates(kind: str, foreach: bool) -> None:
    """Optimizers loop over parameters by expressions with temporary tensors, and most have more than one of them."""
    parameter, gradient = torch.nn.Parameter(torch.randn(256, 64)), torch.randn(256, 64)
    updates = Updates(getattr(torch.optim, kind)([parameter], foreach=foreach))
    update_parameters([gradient], updates.key, [0])  # makes the state
    graph, mode = fx.Graph(), FakeTensorMode()
    nodes = [graph.placeholder("parameter"), graph.placeholder("gradient")]
    for node in nodes:
        node.meta["val"] = mode.from_tensor(gradient)
    call = graph.call_function(UPDATE, (*nodes, updates.key, 0))
    assert measure_peak(lambda: update_parameters([gradient], updates.key, [0])) <= estimated_workspace_bytes(call)
