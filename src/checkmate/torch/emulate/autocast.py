"""CUDA's rules of `torch.autocast` where there is no CUDA: what runs in half precision, what in float32.

A processor's autocast has rules of its own: softmax and layer norms stay in half precision, where a CUDA device makes float32 of
them, which the backward keeps. The rules are those of PyTorch's ``aten/src/ATen/autocast_mode.h``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.torch._compat.autocast import autocast_kernels, autocast_off, replaced_autocast

LOWER_PRECISION_FP = frozenset([
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "cudnn_convolution", "cudnn_convolution_transpose",
    "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell",
    "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
])  # fmt: skip
"""Ops that read everything in half precision."""

PROMOTE = frozenset(
    ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add"]
)
"""Ops that read everything in the widest type among what they read."""

FP32_SET_OPT_DTYPE = frozenset([
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
])  # fmt: skip
"""Ops that read what there is and make float32 of it."""

FP32_APPEND_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Ops that do the same by another overload."""

BANNED = frozenset(["binary_cross_entropy"])
"""Ops that fail: their gradients do not fit half precision."""

# All others that CUDA has a rule for read float32.


@contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """Autocast for a processor follows CUDA's rules, in the whole process, for as long as a step is traced."""
    of_cuda = autocast_kernels("CUDA")
    kernels = {name: _kernel(name) if name in of_cuda else None for name in of_cuda | autocast_kernels("CPU")}
    with replaced_autocast(kernels):
        yield


def cast_if_autocast(device_type: str, tensors: Any) -> Any:
    """What an op of half precision reads, if autocast is on for a kind of device."""
    on = torch.is_autocast_enabled(device_type)
    return cast(tensors, torch.get_autocast_dtype(device_type)) if on else tensors


def _kernel(name: str) -> Callable[..., Any]:
    packet, _, overload = FP32_APPEND_DTYPE.get(name, name).partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    rule = next((rule for names, rule in _RULES if name in names), _read_float32)

    @functools.wraps(rule)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with autocast_off():
            return rule(op, *args, **kwargs)

    return kernel


def _read_half(op: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast((args, kwargs), torch.get_autocast_dtype("cpu"))
    return op(*args, **kwargs)


def _read_float32(op: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast((args, kwargs), torch.float32)
    return op(*args, **kwargs)


def _read_widest(op: Any, *args: Any, **kwargs: Any) -> Any:
    half = torch.get_autocast_dtype("cpu")
    widest = torch.float32 if any(t.dtype != half for t in pytree.tree_leaves((args, kwargs)) if _eligible(t)) else half
    args, kwargs = cast((args, kwargs), widest)
    return op(*args, **kwargs)


def _make_float32(op: Any, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    takes = [a.name for a in op._schema.arguments]
    if _eligible(first) and kwargs.get("dtype") is None and len(args) < takes.index("dtype"):
        kwargs["dtype"] = torch.float32
    return op(first, *args, **kwargs)


def _append_float32(op: Any, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return op(first, *args, **kwargs, dtype=torch.float32 if _eligible(first) else first.dtype)


def _refuse(op: Any, *_: Any, **__: Any) -> Any:
    raise RuntimeError(
        f"{op} is unsafe under autocast, and fails on a CUDA device: use binary_cross_entropy_with_logits, or BCEWithLogitsLoss"
    )


_RULES = (
    (LOWER_PRECISION_FP, _read_half),
    (PROMOTE, _read_widest),
    (FP32_SET_OPT_DTYPE, _make_float32),
    (FP32_APPEND_DTYPE, _append_float32),
    (BANNED, _refuse),
)


def _eligible(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def cast(values: Any, dtype: torch.dtype) -> Any:
    """The same values with their floating-point tensors in a type, but for those in double precision."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if _eligible(t) and t.dtype != dtype else t, values)
