"""The attention kernel that PyTorch selects on a CUDA device, from nothing but a device profile and the inputs.

On a CPU ``scaled_dot_product_attention`` dispatches to another op, which saves other tensors, and with dropout or some masks it
materialises the whole matrix of attention weights. The graph of Dynamo is therefore changed to call the op of the CUDA device:
its shapes and derivatives are registered in every build of PyTorch.

Modelled after PyTorch 2.13:

- kernel selection: ``select_sdp_backend`` and the ``can_use_*`` functions in
  ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and ``sdp_utils_cpp.h``;
- padding, mask conversion and scale: ``scaled_dot_product_attention`` in ``aten/src/ATen/native/transformers/attention.cpp``.

Only the second header is installed with PyTorch, and it lacks the rules by architecture: a test cannot compare them. PyTorch
itself cannot be asked: ``torch._fused_sdp_choice`` answers for a device that is present, and "math" for
meta tensors. Not modelled: nested tensors, and backends that the user disables by ``torch.nn.attention.sdpa_kernel``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from checkmate.cost.device import Device
from checkmate.torch.emulate.autocast import cast

Kernel = Literal["cudnn", "flash", "efficient", "math"]
aten = torch.ops.aten

_HALF = (torch.float16, torch.bfloat16)


def attention_for(device: Device) -> Callable[..., Tensor]:
    """A replacement for ``scaled_dot_product_attention`` that calls the op of a CUDA device."""

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        here, mask = query.device.type, attn_mask
        # The dispatcher casts before it selects a kernel; the ops below must not be cast a second time.
        if torch.is_autocast_enabled(here):
            query, key, value, mask = cast((query, key, value, mask), torch.get_autocast_dtype(here))
        with torch.autocast(here, enabled=False):
            kernel = select_kernel(device, query, key, value, mask, dropout_p, is_causal)
            if kernel == "math":
                return aten._scaled_dot_product_attention_math(
                    query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )[0]
            head_dim = query.shape[-1]
            scale = 1 / math.sqrt(head_dim) if scale is None else scale
            if kernel == "flash":
                query, key, value = map(_padded, (query, key, value))
                out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
                return out if out.shape[-1] == head_dim else out[..., :head_dim]
            if mask is not None and mask.dtype is torch.bool:
                mask = torch.where(mask, 0.0, -math.inf).to(query.dtype)
            if mask is not None:  # a view of padded rows, like `pad_bias` in `attention.cpp`
                padded = _padded(mask)
                mask = mask if padded is mask else padded[..., : mask.shape[-1]]
                mask = mask.expand(*query.shape[:-1], key.shape[-2])
            op = aten._scaled_dot_product_cudnn_attention
            op = op if kernel == "cudnn" else aten._scaled_dot_product_efficient_attention
            return op(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]

    return attention


def _padded(tensor: Tensor) -> Tensor:
    """A tensor with rows padded to a multiple of eight elements: in half precision, one access of 16 bytes."""
    missing = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, missing)) if missing else tensor


def select_kernel(
    device: Device,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> Kernel:
    """The attention kernel that PyTorch selects: the first, in order of preference, that supports the inputs.

    They are ``[batch, heads, length, dim]``. The mask is true for allowed attention, or has values to be added.
    """
    version = device.compute_capability
    recent = version is None or version >= (8, 0)  # None for ROCm, whose kernels support the same as Ampere's
    half, sizes = query.dtype in _HALF, (query.shape[-1], value.shape[-1])
    square = not is_causal or query.shape[-2] == key.shape[-2]
    if query.dim() != 4 or (attn_mask is not None and (is_causal or (attn_mask.requires_grad and not half))):
        return "math"
    # cuDNN comes first on Hopper, compute capability 9 (`check_prefer_cudnn_attention`, `check_cudnn_deterministic`).
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if version is not None and version[0] == 9 and half and not strict and not any(n % 8 or n > 128 for n in sizes):
        short = key.shape[-2] == 1 or (dropout_p and query.shape[-2] == 1)
        if not short and (dropout_p * 16).is_integer() and square:
            return "cudnn"
    # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89`: no backward of flash attention above 192 there.
    narrow = sizes[0] <= (192 if version in ((8, 6), (8, 9)) else 256)
    same = query.shape[-1] == key.shape[-1]
    if half and recent and same and sizes[0] == sizes[1] and narrow and attn_mask is None and square:
        return "flash"
    multiple = 8 if half else 4 if recent else 1  # `minimum_gemm_alignment`
    known = half or query.dtype is torch.float32
    aligned = same and not any(n % multiple for n in sizes)
    if aligned and known and query.shape[1] == key.shape[1] and (recent or query.dtype is not torch.bfloat16):
        return "efficient"
    return "math"
