"""Workspace of ops on a CUDA device, modelled after the source of their kernels in PyTorch 2.13.

Workspace that a library decides at run time (cuDNN's algorithms, CUB's sorts and scans) is unknown; `fits` reports the
number of these ops. Sources:

- flash attention: ``mha_bwd`` in ``flash_api.cpp`` of flash-attention 2, which PyTorch builds from ``third_party``;
- memory-efficient attention: ``_efficient_attention_backward`` in
  ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``, and the kernel's ``Params::workspace_size`` in
  ``mem_eff_attention/kernel_backward.h``;
- optimizer updates: `checkmate.torch.graph.optimizer_ops.temporary_count`.
"""

from __future__ import annotations

import torch
from torch import fx

from checkmate.torch.graph.optimizer_ops import UPDATE, temporary_count, updates_of
from checkmate.torch.graph.storages import concrete, leaves, storage_bytes

aten = torch.ops.aten

# Ops whose library decides on the workspace at run time.
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
    aten._batch_norm_with_update.default,
    aten._batch_norm_with_update_functional.default,
    aten.batch_norm_backward.default,
    aten._cudnn_rnn.default,
    aten._fft_r2c.default,
    aten._fft_c2r.default,
    aten._fft_c2c.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
)

EFFICIENT_TILES = ((64, 64, 32), (64, 64, 64), (128, 64, 96), (128, 128, 128), (128, 64, 128), (64, 64, 128),
                   (128, 64, 65536), (64, 64, 65536))  # fmt: skip
"""Kernels of the efficient backward from compute capability 7.0 on: rows and columns of a tile, and the largest head dimension
(``mem_eff_attention/kernels/cutlassB.h``)."""

_MOST_SPLITS = 200
"""Tiles of key and value gradients that all heads together stage at once (``attention_backward.cu``)."""


def modelled_workspace_bytes(node: fx.Node) -> int | None:
    """Bytes of workspace of an op on a CUDA device; None if it is decided at run time.

    Matrix products count as 0: the workspace of cuBLAS is allocated once and resident (``blas_workspace_bytes`` of the profile).
    """
    target = node.target
    if target is aten._scaled_dot_product_flash_attention_backward.default:
        return _flash_backward(node)
    if target is aten._scaled_dot_product_efficient_attention_backward.default:
        return _efficient_backward(node)
    if target is UPDATE:
        parameter, _, optimizer, which = node.args
        updates = updates_of(optimizer)  # type: ignore[arg-type]
        made = temporary_count(updates.optimizer, updates.group(which))  # type: ignore[arg-type]
        return None if made is None else made * storage_bytes(leaves(parameter.meta["val"])[0])  # type: ignore[union-attr]
    return None if target in _CHOSEN_AT_RUN_TIME else 0


def _flash_backward(node: fx.Node) -> int:
    """Workspace of ``mha_bwd``: query gradient accumulated in float32, one float per row, and key and value gradients per head.

    Rows are rounded up to 128 and head dimensions to 32 (64 above 128), the tile sizes of the kernel. With grouped-query
    attention the gradients of key and value are computed for every query head and then summed over each group.
    """
    _, query, key, value = (leaves(n.meta["val"])[0] for n in node.args[:4])  # type: ignore[union-attr]
    batch, heads, q_len, head_dim = map(concrete, query.shape)
    rows = _up(q_len, 128)
    held = 4 * batch * heads * rows * (_up(head_dim, 32 if head_dim <= 128 else 64) + 1)
    if heads != concrete(key.shape[1]):
        expanded = batch * heads * concrete(key.shape[2])
        held += expanded * (concrete(key.shape[3]) + concrete(value.shape[3])) * key.element_size()
    return held


def _efficient_backward(node: fx.Node) -> int:
    """Workspace of ``_efficient_attention_backward``: one float per row, and tiles that stage gradients in float32.

    The query's gradient is always staged, because several blocks add to it. Gradients of key and value are staged in half
    precision, unless a row of them fits the registers of a tile. The shared memory of the device decides which of several tiles
    runs; the largest workspace of the possible tiles is returned.
    """
    _, query, key, value = (leaves(n.meta["val"])[0] for n in node.args[:4])  # type: ignore[union-attr]
    batch, heads, q_len, head_dim = map(concrete, query.shape)
    kv_len, value_dim = concrete(key.shape[2]), concrete(value.shape[3])
    largest = max(head_dim, value_dim)
    limit = next(limit for limit in (32, 64, 128, 65536) if largest <= limit)
    staged = 0
    for rows, columns, most in EFFICIENT_TILES:
        if not largest <= most <= limit:
            continue
        elements = _tiles(q_len, rows) * _tiles(head_dim, columns) * (rows * columns + 4)  # 4: the lock of a tile
        if query.element_size() < 4 and most > rows:
            splits = max(1, min(_tiles(kv_len, columns), _MOST_SPLITS // (batch * heads)))
            elements += splits * columns * (_up(head_dim, rows) + _up(value_dim, rows))
        staged = max(staged, _up(elements, 4))
    return 4 * batch * heads * (q_len + staged)


def _tiles(number: int, size: int) -> int:
    return -(-number // size)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
