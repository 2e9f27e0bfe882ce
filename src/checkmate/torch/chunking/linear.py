"""Which ops are linear in tensors that depend on one input.

The backward of a network is linear in its tangents, but a custom `torch.autograd.Function` may do what it likes with a gradient.
An op counts as linear here only if it is known to be, and only where nothing is added that does not depend on the input.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Final

import torch
from torch import fx

from checkmate.torch.chunking.graph_values import inputs
from checkmate.torch.graph.op_properties import makes_views

aten = torch.ops.aten


def is_linear(op: fx.Node, dependent: Set[fx.Node]) -> bool:
    """Whether all that an op returns is linear, without a constant term, in the inputs that depend on something.

    Args:
        op: The op.
        dependent: The tensors that depend on it; at least one is read by the op.
    """
    read = [value in dependent for value in inputs(op)]
    if makes_views(op) or op.target in _IN_FIRST:
        return read[0] and not any(read[1:])
    if op.target in _IN_EACH:
        return sum(read) == 1
    if op.target in _IN_ALL:
        return all(read) and all(isinstance(a, (fx.Node, list, tuple)) for a in op.args[: len(read)])
    if op.target is aten.where.self:
        return not read[0] and any(read[1:]) and all(depends or _is_zero(op.args[i]) for i, depends in enumerate(read) if i)
    if op.target in _WITH_ZERO:
        filled = op.args[_WITH_ZERO[op.target] :]  # left out where it is the default, zero
        return read[0] and not any(read[1:]) and all(value == 0 for value in (*filled, *op.kwargs.values()))
    return False


def _is_zero(value: object) -> bool:
    """Whether a node makes zeros and nothing else."""
    filled = {aten.full.default: 1, aten.scalar_tensor.default: 0}
    return isinstance(value, fx.Node) and value.target in filled and value.args[filled[value.target]] == 0  # type: ignore[index]


_IN_FIRST: Final[frozenset[object]] = frozenset(
    {
        *(aten.neg.default, aten._to_copy.default, aten.clone.default, aten.view.default, aten._unsafe_view.default),
        *(torch.ops.prims.convert_element_type.default, aten.mul.Scalar, aten.div.Scalar, aten.div.Tensor),
        *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.expand.default),
        *(aten.slice_backward.default, aten.select_backward.default, aten.embedding_dense_backward.default),
        *(aten.nll_loss_backward.default, aten._log_softmax_backward_data.default, aten._softmax_backward_data.default),
        *(aten.tanh_backward.default, aten.sigmoid_backward.default, aten.gelu_backward.default, aten.silu_backward.default),
        *(aten.threshold_backward.default, aten.native_dropout_backward.default),
    }
)
"""Ops that are linear in their first argument."""

_IN_EACH: Final[frozenset[object]] = frozenset(
    {aten.mm.default, aten.bmm.default, aten.mul.Tensor, aten.mv.default, aten.dot.default}
)
"""Products, which are linear in each factor."""

_IN_ALL: Final[frozenset[object]] = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default})
"""Ops that are linear in all of their tensors together."""

_WITH_ZERO: Final[dict[object, int]] = {aten.masked_fill.Scalar: 2, aten.constant_pad_nd.default: 2}
"""Ops that are linear in their first argument if what they fill in is zero, with the position of that."""
