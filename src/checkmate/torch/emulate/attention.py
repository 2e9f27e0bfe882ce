"""The attention that PyTorch runs on a CUDA device, chosen from a device profile where there is no device.

On a processor ``scaled_dot_product_attention`` becomes another op, which saves other tensors, and with dropout or some masks
it makes the whole matrix of weights. The rules are those of ``select_sdp_backend`` in PyTorch's
``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp``; the ops exist, with shapes and derivatives, without a device.
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
_ALIGNED = 8  # elements in half precision; four of float32


def attention_for(device: Device) -> Callable[..., Tensor]:
    """``scaled_dot_product_attention`` as it is on a CUDA device, in terms of the op that runs there."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        here = query.device.type
        read = cast_if_autocast(here, (query, key, value, attn_mask))
        with torch.autocast(here, enabled=False):
            return _attention(device, *read, *args, **kwargs)

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
        width = query.shape[-1]
        padding = (0, -width % _ALIGNED)
        query, key, value = (F.pad(t, padding) if padding[1] else t for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if padding[1] else out
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
    """The kernel that PyTorch prefers, of those that can run. Shapes are ``[batch, heads, length, width]``.

    Args:
        device: A CUDA device.
        query: What asks.
        key: What is looked at.
        value: What is taken.
        attn_mask: What may be looked at, or what is added to the weights.
        dropout_p: Probability that a weight is dropped.
        is_causal: Whether nothing later may be looked at.
    """
    version = device.compute_capability
    recent = version is None or version >= (8, 0)  # ROCm has no such version, and its kernels are recent
    width, half = query.shape[-1], query.dtype in _HALF
    same_width = width == key.shape[-1] == value.shape[-1]
    grouped = query.dim() == 4 and query.shape[1] != key.shape[1]
    square = not is_causal or query.shape[-2] == key.shape[-2]
    if query.dim() != 4 or (attn_mask is not None and (is_causal or (attn_mask.requires_grad and not half))):
        return "math"
    if version is not None and version[0] == 9 and half and width % _ALIGNED == 0 and value.shape[-1] % _ALIGNED == 0:
        short = key.shape[-2] == 1 or (dropout_p and query.shape[-2] == 1)
        if max(width, value.shape[-1]) <= 128 and not short and (dropout_p * 16).is_integer() and square:
            return "cudnn"
    narrow = width <= (192 if version in ((8, 6), (8, 9)) else 256)
    if half and recent and same_width and narrow and attn_mask is None and square:
        return "flash"
    aligned = width == key.shape[-1] and all(n % _alignment(query.dtype, recent) == 0 for n in (width, value.shape[-1]))
    if aligned and not grouped and query.dtype in (*_HALF, torch.float32) and (recent or query.dtype is not torch.bfloat16):
        return "efficient"
    return "math"


def _alignment(dtype: torch.dtype, recent: bool) -> int:
    """Elements that the efficient kernel reads at once."""
    if dtype in _HALF:
        return _ALIGNED
    return 4 if recent else 1


def _aligned(mask: Tensor) -> Tensor:
    """A mask whose rows begin where the efficient kernel can read them."""
    missing = -mask.shape[-1] % _ALIGNED
    return F.pad(mask, (0, missing))[..., : mask.shape[-1]] if missing else mask
