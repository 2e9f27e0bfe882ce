"""Measures the peak of allocated memory while a function runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tensorflow as tf

from checkmate.core.errors import CheckmateError
from checkmate.tf2._compat import TraceEvent, memory_limit_bytes, trace_events

_HINT = "set the environment variable TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow starts, which then counts on the CPU too"
_BUDGET_HINT = "pass a budget, such as budget='8GiB'"


class NoStatisticsError(CheckmateError, RuntimeError):
    """TensorFlow reports no memory statistics for a device."""


def default_device() -> str:
    """Name of the first GPU, or of the CPU if there is no GPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def has_memory_stats(device: str) -> bool:
    """Whether TensorFlow reports memory statistics for a device.

    Args:
        device: Name of the device, such as ``"GPU:0"``.
    """
    try:
        tf.config.experimental.get_memory_info(device)
    except ValueError:
        return False
    return True


def measure_peak(fn: Callable[[], object], *, device: str | None = None) -> int:
    """Peak bytes that a call allocates, above the bytes allocated before it.

    The bytes are those of the allocator's chunks, which can be up to twice the requested size. Call a `tf.function` once
    before measuring it, since its first call traces it.

    Args:
        fn: The function, called once without arguments. Its result is freed before the call returns.
        device: Name of the device, such as ``"GPU:0"``; the first GPU by default, or the CPU if there is none.

    Raises:
        NoStatisticsError: TensorFlow reports no memory statistics for this device.

    Examples:
        >>> import tensorflow as tf
        >>> measure_peak(lambda: tf.zeros(1_000_000)) >= 4_000_000
        True
    """
    where = device or default_device()
    _require_memory_stats(where)
    gc.collect()
    tf.config.experimental.reset_memory_stats(where)
    before = tf.config.experimental.get_memory_info(where)["current"]
    fn()
    return tf.config.experimental.get_memory_info(where)["peak"] - before


class AllocationPeaks(NamedTuple):
    """Peaks of one run in TensorFlow's allocator, above the bytes allocated before it.

    Attributes:
        requested_bytes: Peak of the requested bytes.
        chunk_bytes: Peak of the bytes of the chunks allocated for them.
        measured_bytes: Peak by the allocator's memory statistics.
    """

    requested_bytes: int
    chunk_bytes: int
    measured_bytes: int


def trace_allocations(fn: Callable[[], object], *, device: str | None = None) -> AllocationPeaks:
    """Peaks of one call, from the profiler's trace of its allocations and from the allocator's statistics.

    Both are of the same call, since two calls need not get the same chunks.

    Args:
        fn: The function, called once without arguments.
        device: As in `measure_peak`.

    Raises:
        NoStatisticsError: TensorFlow reports no memory statistics for this device.
    """
    events: list[TraceEvent] = []
    measured = measure_peak(lambda: events.extend(trace_events(fn)), device=device)
    requested = chunks = requested_peak = chunks_peak = 0
    for event in events:
        sign = {"MemoryAllocation": 1, "MemoryDeallocation": -1}.get(event.name, 0)
        if sign:
            requested += sign * int(event.stats.get("requested_bytes") or 0)
            chunks += sign * int(event.stats.get("allocation_bytes") or 0)
            requested_peak, chunks_peak = max(requested_peak, requested), max(chunks_peak, chunks)
    return AllocationPeaks(requested_peak, chunks_peak, measured)


def available_bytes(device: str) -> int:
    """Bytes that can still be allocated: up to TensorFlow's limit on a GPU, or the free memory of the machine on a CPU.

    Args:
        device: Name of the device, such as ``"GPU:0"``.

    Raises:
        NoStatisticsError: TensorFlow reports no limit for the GPU, or the system does not report free memory.
    """
    if "GPU" in device:
        limit = memory_limit_bytes(device)
        if limit is None or not has_memory_stats(device):
            raise NoStatisticsError(f"TensorFlow does not report the memory of {device}", hint=_BUDGET_HINT)
        return max(0, limit - tf.config.experimental.get_memory_info(device)["current"])
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # its MemAvailable includes page caches, which the kernel frees on demand
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    if not free:
        raise NoStatisticsError("this system does not report how much memory is free", hint=_BUDGET_HINT)
    return free


def _require_memory_stats(device: str) -> None:
    if not has_memory_stats(device):
        raise NoStatisticsError(f"TensorFlow reports no memory statistics for {device}", hint=_HINT)
