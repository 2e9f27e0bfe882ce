"""Upper estimate of the scratch memory of an op on a CPU, where it is not measured.

Rules for the kernels of PyTorch 2.13, each with what was measured for it. An op without a rule counts with its largest
argument or all of its results, whatever is more: kernels copy an argument that is not contiguous, or compute a result in a wider
type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from checkmate.torch.graph.op_properties import PIECES, makes_views
from checkmate.torch.graph.storages import concrete, leaves, storage_bytes, storage_key
from checkmate.torch.measure.piece_memory import pieces_workspace_bytes

aten = torch.ops.aten

_SCALARS = 64
"""Numbers that an op makes into tensors: 8 to 16 bytes were measured."""

_BLOCK = 16
"""Channels of a block, with AVX-512."""


def estimated_workspace_bytes(node: fx.Node) -> int:
    """Bytes that an op is estimated to allocate besides its results, while it runs on a CPU.

    Args:
        node: The op, with traced values.
    """
    if PIECES in node.meta:
        return pieces_workspace_bytes(node, estimated_workspace_bytes)
    if makes_views(node):
        return 0
    target: Any = node.target
    given, made = _bytes(node.all_input_nodes), _bytes([node])
    rule = _RULES.get(getattr(target, "overloadpacket", None))
    if rule is not None:
        return rule(node, given, made) + _SCALARS
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return _SCALARS
    return max([sum(made), *given]) + _SCALARS


def _bytes(nodes: list[fx.Node]) -> list[int]:
    return [*{storage_key(t): storage_bytes(t) for n in nodes for t in leaves(n.meta.get("val"))}.values()]


_Rule = Callable[[fx.Node, list[int], list[int]], int]


def _nothing(node: fx.Node, given: list[int], made: list[int]) -> int:
    return 0


def _copies(node: fx.Node, given: list[int], made: list[int]) -> int:
    """Arguments that are not contiguous are copied."""
    values = {t for n in node.all_input_nodes for t in leaves(n.meta.get("val"))}
    return sum(concrete(t.numel()) * t.element_size() for t in values if not _is_contiguous(t))


def _is_contiguous(value: torch.Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if concrete(size) > 1 and concrete(stride) != expected:
            return False
        expected *= max(1, concrete(size))
    return True


def _convolution(node: fx.Node, given: list[int], made: list[int]) -> int:
    """OneDNN keeps tensors in blocked layouts: it copies arguments, and results afterwards, with channels rounded up.

    Other types than float32, for which it has no kernel on some processors, are products of the unfolded input there.
    """
    values = {storage_key(t): t for n in (node, *node.all_input_nodes) for t in leaves(n.meta.get("val"))}
    blocked = 2 * sum(t.element_size() * concrete(t.numel()) * _rounded(t) for t in values.values())
    return max(blocked, 0 if all(t.dtype is torch.float32 for t in values.values()) else _unfolded(node))


def _unfolded(node: fx.Node) -> int:
    backward = node.target is aten.convolution_backward.default
    operands: tuple[Any, ...] = (*node.args[:3], node.args[7]) if backward else (node, *node.args[:2], node.args[6])
    result, given, weight, transposed = (n.meta["val"] if isinstance(n, fx.Node) else n for n in operands)
    rows, columns = (result, given) if transposed else (given, result)
    sizes = (*rows.shape[:2], *weight.shape[2:], *columns.shape[2:])
    return rows.element_size() * math.prod(map(concrete, sizes))


def _rounded(value: torch.Tensor) -> int:
    """How many times as many channels a blocked layout has."""
    channels = concrete(value.shape[1]) if value.dim() > 2 else _BLOCK
    return -(-_BLOCK // channels) if 0 < channels < _BLOCK else 2 if channels % _BLOCK else 1


def _results(node: fx.Node, given: list[int], made: list[int]) -> int:
    return sum(made) + _copies(node, given, made)


def _indices(node: fx.Node, given: list[int], made: list[int]) -> int:
    """Indices are copied or counted."""
    values = [t for n in node.all_input_nodes for t in leaves(n.meta.get("val")) if not t.is_floating_point()]
    return 2 * sum(concrete(t.numel()) * t.element_size() for t in values)


def _product(node: fx.Node, given: list[int], made: list[int]) -> int:
    """MKL takes matrices by rows or by columns, and copies others; oneDNN, for half precision, copies all."""
    if any(t.dtype in (torch.bfloat16, torch.float16) for t in leaves(node.meta.get("val"))):
        return sum(given) + sum(made)
    values = [t for n in node.all_input_nodes for t in leaves(n.meta.get("val")) if t.dim() > 1]
    return sum(concrete(t.numel()) * t.element_size() for t in values if not any(concrete(s) == 1 for s in t.stride()[-2:]))


def _of_channels(node: fx.Node, given: list[int], made: list[int]) -> int:
    """Statistics or gradients of channels, which each thread sums by itself."""
    small = [concrete(t.numel()) for t in leaves(node.meta.get("val")) if t.dim() <= 2]
    return 8 * (1 + torch.get_num_threads()) * max(small, default=0) + _copies(node, given, made)


def _tiles(node: fx.Node, given: list[int], made: list[int]) -> int:
    """Each thread has tiles of scores and results: ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``."""
    backward = node.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    query, key = (n.meta["val"].shape for n in node.args[backward : backward + 2])  # type: ignore[union-attr]
    length, width, keys = concrete(query[2]), concrete(query[3]), min(512, concrete(key[2]))
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    halves = 1 + any(t.dtype in (torch.bfloat16, torch.float16) for t in leaves(node.meta.get("val")))
    return 4 * halves * torch.get_num_threads() * rows * ((1 + backward) * keys + width + 4)


_RULES: dict[Any, _Rule] = {
    **dict.fromkeys((aten.convolution, aten.convolution_backward), _convolution),
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _product),
    **dict.fromkeys(
        (
            aten.native_layer_norm, aten.native_layer_norm_backward, aten.native_group_norm,
            aten._native_batch_norm_legit, aten._native_batch_norm_legit_functional,
        ),
        _of_channels,
    ),
    **dict.fromkeys((aten.embedding, aten.embedding_dense_backward, aten.scatter, aten.scatter_add), _indices),
    **dict.fromkeys(
        (aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward), _tiles
    ),
    **dict.fromkeys(
        (aten.native_dropout, aten.native_dropout_backward, aten._safe_softmax, aten.cumsum, aten.native_group_norm_backward),
        _results,
    ),
    **dict.fromkeys(
        (
            aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data, aten.nll_loss_forward,
            aten.nll_loss_backward, aten.max_pool2d_with_indices,
        ),
        _copies,
    ),
    **dict.fromkeys(
        (
            aten.clone, aten._to_copy, aten.cat, aten.stack, aten.fill, aten.full, aten.zeros, aten.ones, aten.empty, aten.arange,
            aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_empty, aten.new_zeros, aten.new_full,
            aten.scalar_tensor, aten.rand, aten.randn, aten.rand_like, aten.randn_like, aten.sum, aten.mean, aten.gather,
            aten.constant_pad_nd, aten.select_backward, aten.slice_backward, aten.tril, aten.triu, aten.softplus_backward,
        ),
        _nothing,
    ),
}  # fmt: skip
