"""The device and the settings of PyTorch on which memory, bits and time depend."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch

from checkmate.core.units import format_bytes
from checkmate.cost.store import processor
from checkmate.doctor.check import Check
from checkmate.doctor.installation import check_folder
from checkmate.torch._compat.aot import inductor_cache_folder
from checkmate.torch.measure.allocator import allocator_settings, has_expandable_segments


def machine(device: str) -> dict[str, Any]:
    """Hardware and operating system, by name."""
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
    """Whether PyTorch can use the device."""
    if device != "cuda":
        threads = torch.get_num_threads()
        return Check("device", "ok", f"CPU, {processor()}, {threads} thread{'s' * (threads > 1)}")
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            cure = "install a build of PyTorch with CUDA: https://pytorch.org/get-started"
            return Check("device", "failed", f"torch {torch.__version__} has no CUDA", cure)
        detail = f"torch {torch.__version__} finds no GPU: no driver, too old a driver, or CUDA_VISIBLE_DEVICES is empty"
        return Check("device", "failed", detail, "look at `nvidia-smi`, and at CUDA_VISIBLE_DEVICES")
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved(0)
    detail = f"{torch.cuda.get_device_name(0)}, {format_bytes(total)}, of which {format_bytes(free)} are free"
    if others > total // 10:
        detail += f": {format_bytes(others)} are the context and other processes"
        return Check("device", "note", detail, "end other processes on the GPU before you measure: `nvidia-smi` lists them")
    return Check("device", "ok", detail)


def check_allocator() -> Check:
    """Settings of the CUDA allocator."""
    backend = torch.cuda.get_allocator_backend()
    settings = "".join(f", {name}:{value}" for name, value in allocator_settings().items())
    if backend != "native":
        detail = f"{backend}: allocated bytes are as planned, reserved ones are not predicted"
        return Check("allocator", "note", detail, "leave out backend: in PYTORCH_CUDA_ALLOC_CONF for the native allocator")
    if not has_expandable_segments():
        detail = f"native{settings}: up to 1 MiB more a tensor, and segments that stay reserved"
        return Check("allocator", "note", detail, "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before Python starts")
    return Check("allocator", "ok", f"native{settings}")


def check_autotuning() -> Check:
    """The autotuner of cuDNN: it tries algorithms with large workspaces in the first step of each shape, above every plan."""
    if torch.backends.cudnn.benchmark:
        detail = (
            "benchmark is on: the first step of a shape tries algorithms of any workspace, above the budget, and a later "
            "process may choose others, with other bits"
        )
        cure = "set torch.backends.cudnn.benchmark = False where the budget has to hold in the first step"
        return Check("cuDNN", "note", detail, cure)
    return Check("cuDNN", "ok", f"version {torch.backends.cudnn.version()}, benchmark is off")


def check_precision() -> Check:
    """Precision of matrix products of float32: it changes time and bits, and not memory."""
    products = torch.get_float32_matmul_precision()
    detail = f"float32 products {products}, TF32 in convolutions {'on' if torch.backends.cudnn.allow_tf32 else 'off'}"
    if products == "highest" and torch.cuda.get_device_capability(0) >= (8, 0) and torch.version.hip is None:
        cure = 'call torch.set_float32_matmul_precision("high") if TF32 is precise enough; plans keep their bits either way'
        return Check("precision", "note", f"{detail}: products of float32 do not use tensor cores", cure)
    return Check("precision", "ok", detail)


def check_inductor_cache() -> Check:
    """The folder in which Inductor keeps the code that it builds."""
    return check_folder("Inductor cache", inductor_cache_folder(), "set TORCHINDUCTOR_CACHE_DIR to another one")
