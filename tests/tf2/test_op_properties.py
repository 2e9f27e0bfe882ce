"""What the table of forwarding ops says, TensorFlow does."""

from __future__ import annotations

import pytest
import tensorflow as tf

from checkmate.tf2._compat import grappler_off
from checkmate.tf2.op_properties import FORWARDS
from tests.tf2.steps import requested_peak

SIZE = 1 << 18
OTHERS = {
    "BiasAdd": {"bias": tf.zeros(4)},
    "ClipByValue": {"clip_value_min": 0.0, "clip_value_max": 1.0},
    "SoftmaxCrossEntropyWithLogits": {"labels": tf.zeros((SIZE // 4, 4))},
    "SparseSoftmaxCrossEntropyWithLogits": {"labels": tf.zeros(SIZE // 4, tf.int32)},
}
"""What some ops take beside what they overwrite."""

UNARY = sorted(op for op, positions in FORWARDS.items() if positions == (0,))
BINARY = sorted(op for op, positions in FORWARDS.items() if positions == (0, 1))


def asked(op: str, count: int, **options: tf.Tensor) -> int:
    """Bytes asked for at the peak by an op whose inputs are made for it and read by nobody else."""
    function = getattr(tf.raw_ops, op)
    names = [a for a in function.__signature__.parameters if a not in ("name", "alpha", "T")][:count]

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((SIZE // 4, 4))] * count)
    def run(*given):
        fresh = [tf.reverse(g, [0]) for g in given]  # not an elementwise op: a buffer of its own
        return function(**dict(zip(names, fresh, strict=True)), **OTHERS.get(op, {}), **options)

    batch = [tf.fill((SIZE // 4, 4), 0.25) for _ in range(count)]
    with grappler_off():
        run(*batch)
        return requested_peak(lambda: run(*batch))


@pytest.mark.parametrize("op", UNARY)
def test_unary_ops_write_into_their_dying_input(op):
    """Then the op asks for nothing, and the peak is its input alone."""
    assert asked(op, 1) < 1.9 * 4 * SIZE  # some have rows of scratch


@pytest.mark.parametrize("op", BINARY)
def test_binary_ops_write_into_a_dying_input(op):
    """Then the peak is the two inputs alone."""
    assert asked(op, 2) < 2.5 * 4 * SIZE


def test_other_ops_do_not():
    """The check above can fail: an op that is not in the table asks for its output."""
    assert "Cumprod" not in FORWARDS
    assert asked("Cumprod", 1, axis=tf.constant(0)) > 1.5 * 4 * SIZE
