"""Measured peak of allocated memory while a function runs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from checkmate.core.errors import CheckmateError, OptionError
from checkmate.torch._compat.profiler import memory_trace, profiler_running

_MARK = "checkmate::mark"


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
    if where.type != "cuda" and profiler_running():
        raise ProfilerBusyError(
            "the peak cannot be measured while a torch profiler is active", hint="call measure_peak outside of the profiler"
        )
    with peaks(where) as found:
        fn()
    return found.parts[0][0]


class Peaks:
    """The peak of each part of a block, and the bytes that are held at its end, above those allocated when the block begins."""

    def __init__(self, device: torch.device) -> None:
        self.parts: list[tuple[int, int]] = []
        self._device, self._before = device, 0

    def mark(self) -> None:
        """End a part."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak, held = torch.cuda.max_memory_allocated(self._device), torch.cuda.memory_allocated(self._device)
            self.parts.append((peak - self._before, held - self._before))
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            with torch.profiler.record_function(_MARK):
                pass


@contextmanager
def peaks(device: torch.device) -> Iterator[Peaks]:
    """Measure the peaks of a block on a device; they are known when it is over."""
    found = Peaks(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        found._before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        yield found
        found.mark()
        return
    with memory_trace() as trace:
        yield found
        found.mark()
    held = peak = 0
    for what, amount in trace.events:
        if what == "push" and amount == _MARK:
            found.parts.append((peak, held))
            peak = held
        elif what == "alloc":
            held += amount  # type: ignore[operator]
            peak = max(peak, held)
