"""Measured peak of allocated memory while a function runs."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from checkmate.core.errors import CheckmateError, OptionError
from checkmate.torch._compat.profiler import memory_trace, profiler_running


class ProfilerBusyError(CheckmateError, RuntimeError):
    """Memory on the CPU cannot be measured while another torch profiler is active."""


def measure_peak(fn: Callable[[], object], *, device: str | torch.device | None = None) -> int:
    """Peak of allocated bytes during a call, above those allocated when it begins.

    On the CPU this comes from the allocator's reports to torch's profiler, on CUDA from
    ``torch.cuda.max_memory_allocated``; both are exact. Call a compiled function once or twice before
    measuring it: the first call compiles.

    Args:
        fn: The function; it is called once, without arguments.
        device: The device whose memory is measured; CUDA if it is in use, else the CPU.

    Returns:
        Bytes.

    Raises:
        ProfilerBusyError: The device is the CPU and another torch profiler is active.
        OptionError: It is no function.

    Examples:
        >>> import torch
        >>> measure_peak(lambda: torch.ones(1000))
        4000
    """
    if not callable(fn):
        raise OptionError(f"{type(fn).__name__} cannot be called", hint="give a function: measure_peak(lambda: step(x, y))")
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    where = torch.device(device) if device is not None else torch.device("cuda" if in_use else "cpu")
    gc.collect()
    if where.type == "cuda":
        torch.cuda.synchronize(where)
        before = torch.cuda.memory_allocated(where)
        torch.cuda.reset_peak_memory_stats(where)
        fn()
        torch.cuda.synchronize(where)
        return torch.cuda.max_memory_allocated(where) - before
    if profiler_running():
        raise ProfilerBusyError(
            "the peak cannot be measured while a torch profiler is active", hint="call measure_peak outside of the profiler"
        )
    with memory_trace() as trace:
        fn()
    return trace.peak()
