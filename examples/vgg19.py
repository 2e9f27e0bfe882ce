"""Train Keras's VGG19 on small images, with a plan: the call has the signature of the original Checkmate.

Needs `pip install "checkmate-remat[tf2]"`. Run it with `python examples/vgg19.py`, or within a budget:
`TF_CPU_ALLOCATOR_USE_BFC=1 python examples/vgg19.py 600MiB` (the variable makes TensorFlow count allocations on a CPU).
"""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf

import checkmate

BATCH = 8


def digits() -> tf.data.Dataset:
    """Random images of ten classes, told apart by their brightness; the last batch is smaller than the others."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 3 * BATCH + 3)
    images = rng.normal(size=(len(labels), 32, 32, 3)) * 0.1 + labels[:, None, None, None] / 10
    return tf.data.Dataset.from_tensor_slices((images.astype("float32"), labels)).batch(BATCH)


def main() -> None:
    tf.keras.utils.set_random_seed(0)
    train_ds = digits()
    sample_input = next(iter(train_ds))
    loss = tf.keras.losses.SparseCategoricalCrossentropy()
    optimizer = tf.keras.optimizers.SGD(learning_rate=0.01)

    model = tf.keras.applications.vgg19.VGG19(weights=None, input_shape=(32, 32, 3), classes=10)
    train_iteration_fn = checkmate.tf2.compile(model, loss, optimizer, input_spec=sample_input[0], label_spec=sample_input[1])
    for image, label in train_ds:
        prediction, loss = train_iteration_fn(image, label)
        print(f"{prediction.shape[0]} images, loss {loss:.4f}")

    for budget in sys.argv[1:]:
        image, label = sample_input
        step = checkmate.tf2.compile(model, "sparse_categorical_crossentropy", optimizer, image, label, budget=budget)
        prediction, loss = step(image, label)
        peak = step.graph.resident_bytes + checkmate.tf2.measure_peak(lambda: step(image, label))  # noqa: B023
        print(f"within {budget}: loss {loss:.4f}, measured {checkmate.format_bytes(peak)}, {step.result.overhead:.3f}x the cost")


if __name__ == "__main__":
    main()
