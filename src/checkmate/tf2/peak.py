"""The true peak of allocated memory while something runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from checkmate.core.errors import CheckmateError
from checkmate.tf2._compat import TraceEvent, memory_limit_bytes, trace_events

_HINT = "set the environment variable TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow starts: it then counts on the CPU too"


class NoStatisticsError(CheckmateError, RuntimeError):
    """TensorFlow does not count what it allocates on a device."""


def default_device() -> str:
    """The first GPU, else the CPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def counts(device: str) -> bool:
    """Whether TensorFlow counts what it allocates on a device."""
    try:
        tf.config.experimental.get_memory_info(device)
    except ValueError:
        return False
    return True


def measure_peak(fn: Callable[[], object], *, device: str | None = None) -> int:
    """Bytes that a call allocates at its peak, over what was there when it began.

    This is what TensorFlow's allocator hands out: whole chunks, which may be up to twice what was asked
    for. Call a function once before measuring it: the first call traces.

    Args:
        fn: What to run, once. Its peak is over when it returns; what it returns is let go.
        device: Whose memory, such as ``"GPU:0"``; the first GPU if there is one, else the CPU.

    Raises:
        NoStatisticsError: TensorFlow does not count on this device.

    Examples:
        >>> import tensorflow as tf
        >>> measure_peak(lambda: tf.zeros(1_000_000)) >= 4_000_000
        True
    """
    where = device or default_device()
    _must_count(where)
    gc.collect()
    tf.config.experimental.reset_memory_stats(where)
    before = tf.config.experimental.get_memory_info(where)["current"]
    fn()
    return tf.config.experimental.get_memory_info(where)["peak"] - before


class Allocated(NamedTuple):
    """What an allocator was asked for and handed out while something ran once, over what was there before.

    Attributes:
        asked_bytes: Peak of the bytes asked for.
        chunk_bytes: Peak of the chunks handed out for them.
        measured_bytes: Peak by the allocator's own count.
    """

    asked_bytes: int
    chunk_bytes: int
    measured_bytes: int


def trace_allocations(fn: Callable[[], object], *, device: str | None = None) -> Allocated:
    """The peaks of what a call asks the allocator for and of the chunks that it gets, from TensorFlow's profiler.

    The same run is measured by the allocator's count: two steps need not get the same chunks.

    Raises:
        NoStatisticsError: TensorFlow does not count on this device.
    """
    events: list[TraceEvent] = []
    measured = measure_peak(lambda: events.extend(trace_events(fn)), device=device)
    asked = chunks = most_asked = most_chunks = 0
    for event in events:
        sign = {"MemoryAllocation": 1, "MemoryDeallocation": -1}.get(event.name, 0)
        if sign:
            asked += sign * int(event.facts.get("requested_bytes") or 0)
            chunks += sign * int(event.facts.get("allocation_bytes") or 0)
            most_asked, most_chunks = max(most_asked, asked), max(most_chunks, chunks)
    return Allocated(most_asked, most_chunks, measured)


def available_bytes(device: str) -> int:
    """What a device has left: what TensorFlow may still take of a GPU, or the memory that the machine has free.

    Raises:
        NoStatisticsError: The GPU's limit is not known.
    """
    if "GPU" in device:
        limit = memory_limit_bytes(device)
        if limit is None or not counts(device):
            raise NoStatisticsError(f"TensorFlow does not say how much memory {device} has", hint="give a budget, such as '8GiB'")
        return max(0, limit - tf.config.experimental.get_memory_info(device)["current"])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    for path in (Path("/proc/meminfo"),):  # counts what caches would give back
        if path.exists():
            lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
            free = int(lines["MemAvailable"].split()[0]) * 1024
    if not free:
        raise NoStatisticsError("this system does not say how much memory is free", hint="give a budget, such as '8GiB'")
    return free


def _must_count(device: str) -> None:
    if not counts(device):
        raise NoStatisticsError(f"TensorFlow does not count what it allocates on {device}", hint=_HINT)
