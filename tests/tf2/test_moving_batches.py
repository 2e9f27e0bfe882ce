"""What plans are measured on is placed as a data set places it."""

from __future__ import annotations

import itertools

import numpy as np
import tensorflow as tf

from checkmate.tf2._compat import trace_events
from checkmate.tf2.peak import moving_batches


def test_each_batch_is_a_copy_of_all_tensors():
    """Values and types are the batch's, and so is what has no samples."""
    batch = [tf.reshape(tf.range(12), (4, 3)), tf.constant(["a", "b", "c", "d"]), tf.constant(2.0)]
    for copies in itertools.islice(moving_batches(batch), 3):
        assert [c.dtype for c in copies] == [t.dtype for t in batch]
        assert all(np.array_equal(c.numpy(), t.numpy()) for c, t in zip(copies, batch, strict=True))


def test_samples_stay_between_the_batches():
    """They leave other free chunks to each step, as the shuffle buffer of a data set does."""
    batch = tf.zeros((8, 1000))
    batches = moving_batches([batch])
    assert [next(batches)[0] is batch for _ in range(3)] == [True, True, False]  # first where `fit` has it
    second = []
    events = trace_events(lambda: second.append(next(batches)))
    allocated = [e.stats["requested_bytes"] for e in events if e.name == "MemoryAllocation"]
    assert allocated.count(4000) == 8
    assert batch.numpy().tobytes() == second[0][0].numpy().tobytes()
