"""CUDA's rules of `torch.autocast`, for a step traced on a CPU.

The CPU has different rules: softmax and layer norm stay in half precision, but CUDA computes them in float32 and saves twice the
bytes for the backward. The lists are in PyTorch's ``aten/src/ATen/autocast_mode.h`` under the same names; the header
is installed with PyTorch, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.torch._compat.dispatch import autocast_kernels, autocast_off, replaced_autocast

LOWER_PRECISION_FP = frozenset([
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "cudnn_convolution", "cudnn_convolution_transpose",
    "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm",
    "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell",
    "rnn_tanh_cell", "rnn_relu_cell", "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
])  # fmt: skip
"""Ops that cast floating-point inputs to half precision."""

PROMOTE = frozenset(
    ["addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add"]
)
"""Ops that cast floating-point inputs to the widest type among them."""

FP32_SET_OPT_DTYPE = frozenset([
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
])  # fmt: skip
"""Ops that keep the types of their inputs and return float32, by their own argument ``dtype``."""

FP32_APPEND_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
"""Ops that return float32 by another overload, which has an argument ``dtype``."""

BANNED = frozenset(["binary_cross_entropy"])
"""Ops that raise an error: their gradients overflow in half precision."""

# All other ops with a rule for CUDA cast floating-point inputs to float32 (the list FP32 of the header).


@contextmanager
def cuda_autocast_rules() -> Iterator[None]:
    """Make the CPU's autocast follow CUDA's rules in the whole process while the context is open."""
    of_cuda = autocast_kernels("CUDA")
    kernels = {name: _kernel(name) if name in of_cuda else None for name in of_cuda | autocast_kernels("CPU")}
    with replaced_autocast(kernels):
        yield


def _kernel(name: str) -> Callable[..., Any]:
    """An op by CUDA's rule: the rule of the first list above that names it, else float32."""
    packet, _, overload = FP32_APPEND_DTYPE.get(name, name).partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        half, dtype = torch.get_autocast_dtype("cpu"), torch.float32
        with autocast_off():
            if name in BANNED:
                raise RuntimeError(
                    f"{op} is unsafe under autocast and raises on a CUDA device: replace it and the sigmoid before it by "
                    "binary_cross_entropy_with_logits or BCEWithLogitsLoss"
                )
            if name in FP32_APPEND_DTYPE:
                return op(*args, **kwargs, dtype=dtype if _eligible(args[0]) else args[0].dtype)
            if name in FP32_SET_OPT_DTYPE:
                position = [a.name for a in op._schema.arguments].index("dtype")
                if _eligible(args[0]) and kwargs.get("dtype") is None and len(args) <= position:
                    kwargs["dtype"] = dtype
                return op(*args, **kwargs)
            widens = any(t.dtype != half for t in pytree.tree_leaves((args, kwargs)) if _eligible(t))
            if name in LOWER_PRECISION_FP or (name in PROMOTE and not widens):
                dtype = half
            args, kwargs = cast((args, kwargs), dtype)
            return op(*args, **kwargs)

    return kernel


def _eligible(value: Any) -> bool:
    """Whether autocast casts a value: a floating-point tensor, except in double precision."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dtype != torch.float64


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors among values, except those in double precision."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if _eligible(t) and t.dtype != dtype else t, values)
