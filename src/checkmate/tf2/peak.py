"""Measures the peak of allocated memory while a function runs: a step on restored variables and moving batches, for example."""

from __future__ import annotations

import contextlib
import functools
import gc
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from checkmate.core.errors import CheckmateError
from checkmate.tf2._compat import memory_limit_bytes


class NoStatisticsError(CheckmateError, RuntimeError):
    """TensorFlow reports no memory statistics for a device."""


@functools.cache
def default_device() -> str:
    """Name of the first GPU, or of the CPU if there is no GPU."""
    return "GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"


def has_memory_stats(device: str) -> bool:
    """Whether TensorFlow reports memory statistics for a device, such as ``"GPU:0"``."""
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
    if not has_memory_stats(where):
        raise NoStatisticsError(
            f"TensorFlow reports no memory statistics for {where}",
            hint="set the environment variable TF_CPU_ALLOCATOR_USE_BFC=1 before TensorFlow starts, which then counts on the CPU "
            "too",
        )
    gc.collect()
    return peak_of(fn, where)


def peak_of(fn: Callable[[], object], device: str) -> int:
    """Peak bytes that a call allocates, for many calls: unreachable tensors that Python has not yet freed count as allocated."""
    tf.config.experimental.reset_memory_stats(device)
    before = tf.config.experimental.get_memory_info(device)["current"]
    fn()
    return tf.config.experimental.get_memory_info(device)["peak"] - before


def wait_until_quiet(device: str, quiet_s: float) -> None:
    """Wait until the allocated bytes were the same for some seconds, for at most a minute."""
    began = since = time.monotonic()
    found = 0
    while (now := time.monotonic()) < min(since + quiet_s, began + 60):
        if (latest := tf.config.experimental.get_memory_info(device)["current"]) != found:
            found, since = latest, now
        time.sleep(quiet_s / 10)


def reserve(size_bytes: int) -> None:
    """Let the allocator of a CPU take memory from the system at once: what is left of its regions is handed out too large."""
    device = default_device()
    if device.startswith("CPU") and has_memory_stats(device):
        with contextlib.suppress(tf.errors.ResourceExhaustedError, NoStatisticsError):
            tf.raw_ops.Empty(shape=[min(size_bytes, available_bytes(device) // 2) >> 10, 1 << 10], dtype=tf.uint8)
            _small_places()


@functools.cache
def _small_places() -> list[tf.Tensor]:
    """Make small free chunks, with tensors between them that are kept.

    The allocator takes the smallest chunk that is large enough. A scalar that stays, such as a metric, would otherwise divide a
    large free chunk, and half of it is then handed out whole: one in a network for digits made a plan of 30.8 MB take 38.
    """
    sizes = 512 * [256] + 64 * [4096] + 16 * [65536]
    pairs = [[tf.raw_ops.Empty(shape=[size], dtype=tf.uint8) for size in (place, 1)] for place in sizes]
    return [kept for _, kept in pairs]


def available_bytes(device: str) -> int:
    """Bytes that can still be allocated: up to TensorFlow's limit on a GPU, or the free memory of the machine on a CPU.

    Raises:
        NoStatisticsError: TensorFlow reports no limit for the GPU, or the system does not report free memory.
    """
    hint = "pass a budget, such as budget='8GiB'"
    if "GPU" in device:
        limit = memory_limit_bytes(device)
        if limit is None or not has_memory_stats(device):
            raise NoStatisticsError(f"TensorFlow does not report the memory of {device}", hint=hint)
        return max(0, limit - tf.config.experimental.get_memory_info(device)["current"])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        raise NoStatisticsError("this system does not report how much memory is free", hint=hint) from None


@contextlib.contextmanager
def restored(variables: Sequence[tf.Variable]) -> Generator[None]:
    """Save the values of all variables that the block changes, and restore them at its end."""
    # Copies: `numpy` can return the variable's buffer itself, and a second reference would make a step copy the variable.
    saved = [np.array(v.numpy()) for v in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, saved, strict=True):
            _restore(variable, value)


def _restore(variable: tf.Variable, value: np.ndarray) -> None:
    """Restore a variable in its current buffer, so that training runs with the free chunks that were measured.

    `assign` allocates a new buffer, and assigning to a slice makes the variable copy on every read. `assign_sub` works in
    place and is exact: x - x is 0, and 0 - (-v) is v. Values for which it is not exact (NaN, -0.0) are assigned.
    """
    if value.dtype.kind in "fiu" and value.size:
        variable.assign_sub(np.array(variable.numpy()))
        variable.assign_sub(np.negative(value))
        if np.array(variable.numpy()).tobytes() == value.tobytes():
            return
    variable.assign(value)


def moving_batches(batch: Sequence[tf.Tensor], largest_bytes: int) -> Iterator[list[tf.Tensor]]:
    """A batch where it is, twice, then copies without end, behind free chunks of random sizes. A caller may hold the last.

    Data sets, `fit` and other plans allocate on the CPU between the variables and buffers of the step, and leave free chunks. One
    that is less than twice as large as a request is handed out whole, which can then change every chunk of the step.
    """
    rng = np.random.default_rng(0)
    yield from (list(batch), list(batch))
    while True:
        found, free = list[tf.Tensor](), list[tf.Tensor]()
        for tensor in batch:
            sizes = largest_bytes * 2 ** rng.uniform(-8, 0, rng.integers(3))
            free += [tf.raw_ops.Empty(shape=[int(size)], dtype=tf.uint8) for size in sizes]
            found.append(tf.gather(tensor, tf.range(len(tensor))) if tensor.shape.rank else tensor)
        free.clear()
        yield found
