"""Buffers that the pieces of a program share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate.torch.chunking.buffers import _BY_ROWS, out_variant, share_buffers

aten = torch.ops.aten
SHAPE = (32, 24)
HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def shared(function: Callable[..., Any], *shapes: tuple[int, ...]) -> tuple[int, fx.GraphModule]:
    """How many buffers the ops of a function share, and its graph, which writes into them."""
    module = make_fx(function, tracing_mode="fake")(*(torch.randn(shape) for shape in shapes))
    buffers = share_buffers(module.graph)
    module.recompile()
    inputs = [torch.randn(shape) for shape in shapes]
    assert torch.equal(module(*inputs, *(buffer.empty() for buffer in buffers)), function(*inputs))
    return len(buffers), module


def test_a_loss_and_its_gradient_take_two_buffers() -> None:
    """The log softmax is written over the logits, and their gradient over that of the log softmax."""

    def gradient(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logs = aten._log_softmax(x @ weight, 1, False)
        return aten._log_softmax_backward_data(logs.tanh(), logs, 1, torch.float32).sum()

    assert shared(gradient, (32, 8), (8, 24))[0] == 2


def test_a_chain_of_pointwise_ops_takes_one_buffer() -> None:
    assert shared(lambda x: (x.exp() * 2).tanh().sum(), SHAPE)[0] == 1


def test_strides_of_dimensions_with_one_element_count() -> None:
    """Contiguous, in the same places, and refused by torch (found by random regions)."""
    assert shared(lambda x: x.exp().permute(2, 1, 0).sigmoid().sum(), (4, 1, 1))[0] == 2


def test_a_reshaped_tensor_is_written_over() -> None:
    assert shared(lambda x: x.exp().view(24, 32).sigmoid().sum(), SHAPE)[0] == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((y := x.exp()).tanh() * y).sum(),  # read again
        lambda x: (x.exp().t().contiguous().tanh() + x.exp().t()).sum(),  # in other places
        lambda x: (x / x.exp()).sum(),  # its second operand
        lambda x: aten.cumsum(x.exp(), 0).sum(),  # neither by numbers nor by rows
    ],
    ids=["read again", "transposed", "second operand", "cumulative"],
)
def test_what_is_still_to_be_read_is_not_written_over(function: Callable[..., Any]) -> None:
    assert shared(function, SHAPE)[0] == 2


@pytest.mark.parametrize("dtype", [HALF, FLOAT, DOUBLE])
@pytest.mark.parametrize("shape", [(3, 5), (64, 1000), (5, 70_001), (4, 33, 65)])
@pytest.mark.parametrize(
    "op", [*sorted(_BY_ROWS, key=str), aten.gelu.default, aten.tanh.default, aten.mul.Tensor, aten.gelu_backward.default], ids=str
)
def test_an_op_that_writes_over_its_first_operand_gives_the_same_bits(
    op: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(shape).to(dtype) for _ in range(2))
    overload, name = out_variant(op)  # type: ignore[misc]
    for dim in range(len(shape)) if op in _BY_ROWS else [None]:
        backward = "backward_data" in str(op)
        rest: tuple[Any, ...] = () if op in (aten.gelu.default, aten.tanh.default) else (y,)
        if dim is not None:
            rest = (y.softmax(dim), dim, dtype) if backward else (dim, False)
        expected, there = op(x, *rest), x.clone()
        overload(there, *rest, **{name: there})
        assert torch.equal(there.view(torch.uint8), expected.view(torch.uint8))
