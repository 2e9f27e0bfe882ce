"""The allocator's free chunks: what stays allocated leaves the large ones whole."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import tensorflow as tf

from checkmate.tf2 import peak
from checkmate.tf2.peak import measure_peak, reserve

MIB = 1 << 20


def empty(size_bytes: int) -> tf.Tensor:
    return tf.raw_ops.Empty(shape=[size_bytes], dtype=tf.uint8)


def address(tensor: tf.Tensor) -> int:
    return np.asarray(memoryview(tensor)).ctypes.data


def scalars_beside_a_large_chunk() -> int:
    """Bytes that 12 MiB take of a large free chunk, after scalars were allocated and stay."""
    reserve(64 * MIB)
    first, others = empty(20 * MIB), list[tf.Tensor]()
    for size in (MIB, 4096, 1):  # until no smaller chunk is free
        others.append(empty(size))
        while not 20 * MIB <= address(others[-1]) - address(first) < 64 * MIB:
            others.append(empty(size))
        del others[-1]
    del first
    peak._small_places.cache_clear()
    reserve(MIB)
    first, scalars = empty(20 * MIB), [empty(1) for _ in range(400)]
    del first
    taken = measure_peak(lambda: empty(12 * MIB))
    assert len(scalars) == 400
    return taken


def test_scalars_that_stay_divide_no_large_chunk() -> None:
    """A smaller request would take one half of the chunk whole, up to twice its bytes; in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "tests.tf2.test_free_chunks"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 13 * MIB


if __name__ == "__main__":
    sys.stdout.write(str(scalars_beside_a_large_chunk()))
