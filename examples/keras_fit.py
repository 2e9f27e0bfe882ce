"""`model.fit` under a budget: one line after `model.compile`, and the loop of Keras is unchanged.

Needs the `tf2` extra. The environment variables count allocations on a CPU; on a GPU TensorFlow always counts.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import checkmate


def classifier() -> keras.Model:
    x = inputs = keras.Input((128,))
    for _ in range(6):
        x = layers.Dropout(0.1)(layers.Dense(256, activation="gelu")(x))
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(x))
    model.compile(optimizer="sgd", loss="sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    return model


def batches() -> tf.data.Dataset:
    rng = np.random.default_rng(0)
    pixels, classes = rng.normal(size=(6144, 128)).astype("float32"), rng.integers(0, 10, 6144)
    return tf.data.Dataset.from_tensor_slices((pixels, classes)).batch(2048)


def train(budget: str | None) -> tuple[dict[str, list[float]], checkmate.keras.PlannedFit | None]:
    """The history of two epochs, and what was planned."""
    keras.utils.set_random_seed(0)
    model = classifier()
    planned = None if budget is None else checkmate.keras.fit_within(model, budget, time_limit_s=5)
    history = model.fit(batches(), shuffle=False, epochs=2, verbose=0).history
    return history, planned


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    # Grappler, TensorFlow's graph optimizer, changes bits; it is off for both so that they can be compared.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    (plain, _), (history, planned) = train(None), train("60%")
    assert planned is not None
    assert planned.budget_bytes is not None
    assert planned.measured_bytes is not None
    print("losses", *[f"{loss:.6f}" for loss in history["loss"]])
    measured, budget = checkmate.format_bytes(planned.measured_bytes), checkmate.format_bytes(planned.budget_bytes)
    print(f"peak   {measured}, within the budget of {budget}")
    assert history == plain, "every loss and metric is the same"
    assert planned.measured_bytes <= planned.budget_bytes, "and the peak is within the budget"
