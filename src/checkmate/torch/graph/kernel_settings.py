"""Hardware, versions and settings of the process: with the op and its inputs, they choose the kernel of an op.

Costs, and the bits of an op in pieces, are kept from one process to the next. They hold only for the same kernels: another path
of a convolution has other workspace, three times the bytes or none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import backends

from checkmate.cost.processor import library_variables, processor


def kernel_settings(device: torch.device) -> str:
    """Text of everything that chooses the kernel on a device."""
    settings = _cuda_settings(device) if device.type == "cuda" else _cpu_settings() if device.type == "cpu" else []
    found = (
        device.type,
        torch.__version__,
        torch.are_deterministic_algorithms_enabled(),
        _precision(backends),
        # The attention kernel is chosen at tracing, and again by kernels that call each other.
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        *settings,
        *(f"{name}={value}" for name, value in library_variables().items()),
    )
    return " ".join(map(str, found))


def _cpu_settings() -> list[Any]:
    onednn: Any = backends.mkldnn
    return [
        processor(),
        backends.cpu.get_cpu_capability(),
        f"threads={torch.get_num_threads()}",
        onednn.enabled,
        onednn.deterministic,
        _precision(onednn.matmul),
        _precision(onednn.conv),
        _precision(onednn.rnn),
    ]


def _cuda_settings(device: torch.device) -> list[Any]:
    cudnn: Any = backends.cudnn
    products: Any = backends.cuda.matmul
    return [
        torch.cuda.get_device_name(device),
        torch.version.cuda or torch.version.hip,
        cudnn.version(),
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.benchmark_limit,
        cudnn.deterministic,
        # Not `allow_tf32`, which raises an error if precisions were set by name.
        _precision(cudnn.conv),
        _precision(cudnn.rnn),
        _precision(products),
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        products.allow_fp16_accumulation,
        backends.cuda.preferred_blas_library(),
        backends.cuda.preferred_linalg_library(),
    ]


def _precision(of: Any) -> str:
    """Precision of products of 32-bit numbers: "none" stands for the precision of the format."""
    return "ieee" if of.fp32_precision == "none" else of.fp32_precision
