"""The attention kernel that PyTorch selects on a CUDA device, from a device profile and the inputs alone.

On a CPU ``scaled_dot_product_attention`` dispatches to another op, which saves other tensors, and with dropout or some masks it
materialises the whole matrix of attention weights. So the graph of Dynamo is changed to call the op of the CUDA device: its
shapes and derivatives are registered in every build of PyTorch.

Modelled after PyTorch 2.13:

- kernel selection: ``select_sdp_backend`` and the ``can_use_*`` functions in
  ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.h``;
- padding, mask conversion and scale: ``scaled_dot_product_attention`` in ``aten/src/ATen/native/transformers/attention.cpp``.

Only the second header is installed with PyTorch, and it does not contain the rules by architecture, so that a test cannot
compare them. Not modelled: nested tensors, and backends that the user disables by ``torch.nn.attention.sdpa_kernel``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from checkmate.cost.device import Device
from checkmate.torch.emulate.autocast import cast_if_autocast

Kernel = Literal["cudnn", "flash", "efficient", "math"]
aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)
_ALIGNED = 8
"""Elements of half precision in one 16-byte access: multiples to which head dimensions and masks are padded."""


def attention_for(device: Device) -> Callable[..., Tensor]:
    """A replacement for ``scaled_dot_product_attention`` that calls the op of a CUDA device.

    Args:
        device: Profile of the device.
    """

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        here = query.device.type
        # The dispatcher casts before it selects a kernel; the ops below must not be cast a second time.
        cast = cast_if_autocast(here, (query, key, value, attn_mask))
        with torch.autocast(here, enabled=False):
            return _attention(device, *cast, *args, **kwargs)

    return attention


def _attention(
    device: Device,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    kernel = select_kernel(device, query, key, value, attn_mask, dropout_p, is_causal)
    if kernel == "math":
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.where(attn_mask, 0.0, -math.inf).to(query.dtype)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if kernel == "flash":
        head_dim = query.shape[-1]
        padding = (0, -head_dim % _ALIGNED)
        query, key, value = (F.pad(t, padding) if padding[1] else t for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :head_dim] if padding[1] else out
    if attn_mask is not None:
        attn_mask = _aligned(attn_mask).expand(*query.shape[:-1], key.shape[-2])
    run = aten._scaled_dot_product_cudnn_attention if kernel == "cudnn" else aten._scaled_dot_product_efficient_attention
    return run(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


def select_kernel(
    device: Device,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> Kernel:
    """The attention kernel that PyTorch selects: the first in order of preference that supports the inputs.

    Args:
        device: Profile of a CUDA device.
        query: Query tensor, ``[batch, heads, q_len, head_dim]``.
        key: Key tensor, ``[batch, kv_heads, kv_len, head_dim]``.
        value: Value tensor, ``[batch, kv_heads, kv_len, value_dim]``.
        attn_mask: Boolean mask, true where attention is allowed, or values added to the scores; broadcastable to
            ``[batch, heads, q_len, kv_len]``. None for no mask.
        dropout_p: Probability with which an attention weight is dropped.
        is_causal: Whether a query attends only to keys at its own and earlier positions.

    Returns:
        ``"cudnn"``, ``"flash"``, ``"efficient"`` or ``"math"``; the last supports everything.
    """
    version = device.compute_capability
    recent = version is None or version >= (8, 0)  # None for ROCm, whose kernels support what Ampere's do
    head_dim, half = query.shape[-1], query.dtype in _HALF
    same_head_dim = head_dim == key.shape[-1] == value.shape[-1]
    grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
    square = not is_causal or query.shape[-2] == key.shape[-2]
    if query.dim() != 4 or (attn_mask is not None and (is_causal or (attn_mask.requires_grad and not half))):
        return "math"
    # cuDNN comes first on Hopper, compute capability 9 (`check_prefer_cudnn_attention`).
    if version is not None and version[0] == 9 and half and head_dim % _ALIGNED == 0 and value.shape[-1] % _ALIGNED == 0:
        short = key.shape[-2] == 1 or (dropout_p and query.shape[-2] == 1)
        if max(head_dim, value.shape[-1]) <= 128 and not short and (dropout_p * 16).is_integer() and square:
            return "cudnn"
    # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89`: no backward of flash attention above 192 there.
    narrow = head_dim <= (192 if version in ((8, 6), (8, 9)) else 256)
    if half and recent and same_head_dim and narrow and attn_mask is None and square:
        return "flash"
    aligned = head_dim == key.shape[-1] and all(n % _alignment(query.dtype, recent) == 0 for n in (head_dim, value.shape[-1]))
    if aligned and not grouped and query.dtype in (*_HALF, torch.float32) and (recent or query.dtype is not torch.bfloat16):
        return "efficient"
    return "math"


def _alignment(dtype: torch.dtype, recent: bool) -> int:
    """Elements of which the efficient kernel needs head dimensions to be multiples (``minimum_gemm_alignment``)."""
    if dtype in _HALF:
        return _ALIGNED
    return 4 if recent else 1


def _aligned(mask: Tensor) -> Tensor:
    """A mask with rows padded to a multiple of 16 bytes, as ``pad_bias`` in ``attention.cpp`` does; the result is a view."""
    missing = -mask.shape[-1] % _ALIGNED
    return F.pad(mask, (0, missing))[..., : mask.shape[-1]] if missing else mask
