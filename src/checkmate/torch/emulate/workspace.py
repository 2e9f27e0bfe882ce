"""Bytes that ops of a CUDA device take only while they run, from the source of their kernels, where that can be read.

What a library chooses when it runs (cuDNN for convolutions, sorts, scans) is not known before; it is said of how many
ops that is so.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from checkmate.torch.graph.optimizer_ops import UPDATE, updates_of
from checkmate.torch.graph.storages import concrete, leaves, storage_bytes

aten = torch.ops.aten

_CHOSEN_AT_RUN_TIME = (
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.embedding_dense_backward.default,
    aten.index_put.default,
    aten.index_put_.default,
    aten.sort.default,
    aten.sort.stable,
    aten.topk.default,
    aten.cumsum.default,
    aten.cumprod.default,
    aten.nonzero.default,
    aten._cudnn_rnn.default,
    aten._fft_r2c.default,
    aten._fft_c2r.default,
    aten._fft_c2c.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)


def modelled_workspace_bytes(node: fx.Node) -> int | None:
    """Workspace of an op on a CUDA device; None where nobody knows it before it runs.

    Args:
        node: The op. Products count as zero: the matrix library's workspace is resident.
    """
    target = node.target
    if target is aten._scaled_dot_product_flash_attention_backward.default:
        return _flash_backward(node)
    if target is aten._scaled_dot_product_efficient_attention_backward.default:
        return _efficient_backward(node)
    if target is UPDATE:
        parameter, _, optimizer, which = node.args
        made = updates_of(optimizer).temporary_count(which)  # type: ignore[arg-type]
        return None if made is None else made * storage_bytes(leaves(parameter.meta["val"])[0])  # type: ignore[union-attr]
    return None if target in _CHOSEN_AT_RUN_TIME else 0


def _flash_backward(node: fx.Node) -> int:
    """``mha_bwd`` of flash attention 2: the query's gradient in float32, a number a row, and grouped heads expanded."""
    _, query, key, value = (leaves(n.meta["val"])[0] for n in node.args[:4])  # type: ignore[union-attr]
    batch, heads, length, width = map(concrete, query.shape)
    rows = _up(length, 128)
    held = 4 * batch * heads * rows * (_up(width, 32 if width <= 128 else 64) + 1)
    if heads != concrete(key.shape[1]):
        expanded = batch * heads * concrete(key.shape[2])
        held += expanded * (concrete(key.shape[3]) + concrete(value.shape[3])) * key.element_size()
    return held


def _efficient_backward(node: fx.Node) -> int:
    """``_efficient_attention_backward``: a number a row, and gradients in float32 where they are summed in lower precision."""
    _, query, key, value = (leaves(n.meta["val"])[0] for n in node.args[:4])  # type: ignore[union-attr]
    batch, heads, length, width = map(concrete, query.shape)
    held = 4 * batch * heads * _up(length, 16)
    if query.element_size() < 4:
        held += 4 * math.prod((batch, heads, _up(length, 64), _up(width, 16)))
        held += 4 * batch * heads * _up(concrete(key.shape[2]), 64) * (_up(width, 16) + _up(concrete(value.shape[3]), 16))
    return held


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
