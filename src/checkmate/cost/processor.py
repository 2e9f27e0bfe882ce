"""The processor of this machine, and settings of the process that its libraries read: both choose the kernels that run."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path


@cache
def processor() -> str:
    """Name of the processor: kernels are chosen by what it can do and by the size of its caches."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def library_variables(*prefixes: str) -> dict[str, str]:
    """Environment variables by which libraries of kernels choose what runs, and those that begin with a prefix of a framework.

    Examples:
        >>> os.environ["ONEDNN_MAX_CPU_ISA"], os.environ["ONEDNN_VERBOSE"] = "AVX2", "1"
        >>> known = library_variables()
        >>> known["ONEDNN_MAX_CPU_ISA"], "ONEDNN_VERBOSE" in known
        ('AVX2', False)
        >>> del os.environ["ONEDNN_MAX_CPU_ISA"], os.environ["ONEDNN_VERBOSE"]
    """
    libraries = ("ONEDNN_", "DNNL_", "MKL_", "CUDNN_", "CUBLAS", "TORCH_CUDNN_", "NVIDIA_TF32_", "ATEN_", *prefixes)
    # Variables named VERBOSE or LOG change only what a library prints.
    known = (name for name in os.environ if name.startswith(libraries) and "VERBOSE" not in name and "LOG" not in name)
    return {name: os.environ[name] for name in sorted(known)}
