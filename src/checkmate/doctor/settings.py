"""The device and the settings of PyTorch on which memory, bits and time depend."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any, Final

import torch

from checkmate.core.units import format_bytes
from checkmate.cost.processor import processor
from checkmate.doctor.caches import check_folder
from checkmate.doctor.check import Check
from checkmate.torch._compat.aot import inductor_cache_folder
from checkmate.torch.measure.allocator import allocator_settings, has_expandable_segments


def machine(device: str) -> dict[str, Any]:
    """Hardware and operating system, by name.

    Args:
        device: Type of the device.
    """
    found: dict[str, Any] = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "system": platform.system(),
        "release": platform.release(),
    }
    if device == "cuda" and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        found["gpu"] = {
            "name": properties.name,
            "memory_bytes": total,
            "free_bytes": free,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),
            "gpus": torch.cuda.device_count(),
            "allocator": {"backend": torch.cuda.get_allocator_backend(), **allocator_settings()},
        }
    return found


def check_device(device: str) -> Check:
    """Whether PyTorch can use the device.

    Args:
        device: Type of the device.
    """
    if device != "cuda":
        threads = torch.get_num_threads()
        return Check(name="device", verdict="ok", detail=f"CPU, {processor()}, {threads} thread{'s' * (threads > 1)}")
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            cure = "install a build of PyTorch with CUDA: https://pytorch.org/get-started"
            return Check(name="device", verdict="failed", detail=f"torch {torch.__version__} has no CUDA", cure=cure)
        return Check(
            name="device",
            verdict="failed",
            detail=f"torch {torch.__version__} finds no GPU: no driver, too old a driver, or CUDA_VISIBLE_DEVICES is empty",
            cure="look at `nvidia-smi`, and at CUDA_VISIBLE_DEVICES",
        )
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name(0)
    others = total - free - torch.cuda.memory_reserved(0)
    detail = f"{name}, {format_bytes(total)}, of which {format_bytes(free)} are free"
    if others > total // 10:
        return Check(
            name="device",
            verdict="note",
            detail=f"{detail}: {format_bytes(others)} are the context and other processes",
            cure="end other processes on the GPU before you measure: `nvidia-smi` lists them",
        )
    return Check(name="device", verdict="ok", detail=detail)


def check_allocator() -> Check:
    """Settings of the CUDA allocator."""
    backend = torch.cuda.get_allocator_backend()
    settings = ", ".join(f"{name}:{value}" for name, value in allocator_settings().items())
    if backend != "native":
        return Check(
            name="allocator",
            verdict="note",
            detail=f"{backend}: allocated bytes are as planned, reserved ones are not predicted",
            cure="leave out backend: in PYTORCH_CUDA_ALLOC_CONF for the native allocator",
        )
    if not has_expandable_segments():
        return Check(
            name="allocator",
            verdict="note",
            detail=f"native{', ' if settings else ''}{settings}: up to 1 MiB more a tensor, and segments that stay reserved",
            cure="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts",
        )
    return Check(name="allocator", verdict="ok", detail=f"native, {settings}")


def check_autotuning() -> Check:
    """The autotuner of cuDNN: it tries algorithms with large workspaces in the first step of each shape, above every plan."""
    if torch.backends.cudnn.benchmark:
        return Check(
            name="cuDNN",
            verdict="note",
            detail="benchmark is on: the first step of a shape tries algorithms of any workspace, above the budget, and a later "
            "process may choose others, with other bits",
            cure="set torch.backends.cudnn.benchmark = False where the budget has to hold in the first step",
        )
    return Check(name="cuDNN", verdict="ok", detail=f"version {torch.backends.cudnn.version()}, benchmark is off")


def check_precision() -> Check:
    """Precision of matrix products of float32: it changes time and bits, and not memory."""
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    capable = torch.cuda.get_device_capability(0) >= (8, 0)
    detail = f"float32 products {products}, TF32 in convolutions {'on' if convolutions else 'off'}"
    if products == "highest" and capable and torch.version.hip is None:
        return Check(
            name="precision",
            verdict="note",
            detail=f"{detail}: products of float32 do not use tensor cores",
            cure='call torch.set_float32_matmul_precision("high") if TF32 is precise enough; plans keep their bits either way',
        )
    return Check(name="precision", verdict="ok", detail=detail)


CUDA_CHECKS: Final[dict[str, Callable[[], Check]]] = {
    "allocator": check_allocator,
    "cuDNN": check_autotuning,
    "precision": check_precision,
}
"""Checks of settings that exist on a GPU alone, by name."""


def check_inductor_cache() -> Check:
    """The folder in which Inductor keeps the code that it builds."""
    other = "set TORCHINDUCTOR_CACHE_DIR to another one"
    return check_folder("Inductor cache", inductor_cache_folder(), other)
