"""Copies of a batch at changing places of the allocator's memory, as the batches of a data set are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

_SAMPLES = 64
"""The most samples of which a data set is imitated."""


def moving_batches(batch: Sequence[tf.Tensor]) -> Iterator[list[tf.Tensor]]:
    """Copies of a batch without end. The next one is made while the caller may still hold the last.

    `tf.data` allocates on the CPU each sample that it shuffles, and each batch, between the variables and buffers of the step.
    A chunk of the step is up to twice as large as requested, which depends on the free chunks that these leave: the same plan of
    ResNet50 took 285 to 292 MB in 30 steps of `fit`.

    Args:
        batch: The flat tensors.
    """
    rng = np.random.default_rng(0)
    samples: list[tf.Tensor] = []
    while True:
        yield [_rows(t, range(len(t))) if t.shape.rank else t for t in batch]
        for t in batch:
            if t.shape.rank:
                samples += [_rows(t, [int(i)]) for i in rng.permutation(range(len(t)))[:_SAMPLES]]
        order = rng.permutation(len(samples))[: rng.integers(len(samples) + 1)]
        samples = [samples[i] for i in order]


def _rows(tensor: tf.Tensor, rows: Sequence[int]) -> tf.Tensor:
    """A copy of some rows of a tensor; a slice would share its buffer."""
    return tf.gather(tensor, tf.constant(rows, tf.int32))
