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
    for copies in itertools.islice(moving_batches(batch, 100), 3):
        assert [c.dtype for c in copies] == [t.dtype for t in batch]
        assert all(np.array_equal(c.numpy(), t.numpy()) for c, t in zip(copies, batch, strict=True))


def test_batches_lie_behind_free_chunks():
    """They leave other free chunks to each step, as data sets and other plans do, of up to the size of the largest tensor."""
    batch = tf.zeros((8, 1000))
    batches = moving_batches([batch], 1 << 20)
    assert [next(batches)[0] is batch for _ in range(3)] == [True, True, False]  # first where `fit` has it
    held, found = [], []
    events = trace_events(lambda: held.extend(itertools.islice(batches, 8)))
    for event in events:
        if event.name == "MemoryAllocation" and event.requested_bytes not in (0, 32000):
            found.append(event.requested_bytes)
    assert any(size > 1 << 18 for size in found)
    assert max(found) <= 1 << 20
    assert batch.numpy().tobytes() == held[-1][0].numpy().tobytes()
