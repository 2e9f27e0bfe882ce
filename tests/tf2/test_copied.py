"""Plans are measured on copies of a batch, which lie where a data set could place its next batch."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from checkmate.tf2._compat import trace_events
from checkmate.tf2.peak import copied


@pytest.mark.parametrize("tensor", [tf.reshape(tf.range(12), (4, 3)), tf.constant(["a", "b"]), tf.constant(2.0)])
def test_a_copy_has_the_values_of_the_batch(tensor):
    """And its type; what has no samples, too."""
    found = copied(tensor)
    assert found.dtype == tensor.dtype
    assert np.array_equal(found.numpy(), tensor.numpy())


def test_a_copy_has_a_buffer_of_its_own():
    """A step that runs on the same buffer every time finds the same free chunks every time."""
    batch, held = tf.zeros((8, 1000)), []
    events = trace_events(lambda: held.append(copied(batch)))
    assert 32_000 in [event.requested_bytes for event in events if event.name == "MemoryAllocation"]
