"""One network trained by `fit` in a process of its own: planned, chained and plain.

``python -m tests.keras.points NAME BUDGET`` trains one.
"""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from checkmate.keras import PlannedFit, capture, fit_within
from checkmate.tf2._compat import grappler_off
from checkmate.tf2.peak import default_device
from tests.tf2.networks import CASES, Case
from tests.tf2.steps import keep_all

EPOCHS, BATCHES = 2, 3


def lstm() -> keras.Model:
    """Two recurrent layers, one in both directions, with dense layers between them, on embedded tokens."""
    ids = keras.Input((24,), dtype="int32")
    x = layers.Embedding(200, 64)(ids)
    x = layers.Bidirectional(layers.LSTM(16, return_sequences=True))(x)
    for _ in range(3):
        x = layers.Dropout(0.2)(layers.Dense(256, activation="gelu")(x))
    return keras.Model(ids, layers.Dense(10, activation="softmax")(layers.LSTM(16)(x)), name="lstm")


NETWORKS = {
    **{name: CASES[name] for name in ("resnet50", "mobilenet", "transformer")},
    "lstm": Case(
        lstm,
        lambda batch: np.random.default_rng(0).integers(0, 200, (batch, 24)).astype("int32"),
        lambda batch: np.random.default_rng(1).integers(0, 10, batch),
        64,
    ),
}


class Peaks(keras.callbacks.Callback):
    """Measures every step of `fit` with TensorFlow's own statistics: all that a step allocates, its batch included."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self._before = 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        tf.config.experimental.reset_memory_stats(default_device())
        self._before = tf.config.experimental.get_memory_info(default_device())["current"]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.bytes.append(tf.config.experimental.get_memory_info(default_device())["peak"] - self._before)


def trained(name: str, kind: str, budget: str) -> tuple[dict[str, Any], Peaks, PlannedFit | None]:
    """Train a network; what it leaves, as hashes."""
    case = NETWORKS[name]
    keras.utils.set_random_seed(1)
    model = case.model()
    model.compile(case.optimizer(), case.loss, metrics=["accuracy"], jit_compile=False)
    count = case.batch * BATCHES
    data = tf.data.Dataset.from_tensor_slices((case.inputs(count), case.labels(count))).shuffle(count, seed=1).batch(case.batch)
    planned, peaks = None, Peaks()
    if kind == "planned":
        planned = fit_within(model, budget, time_limit_s=15)
    elif kind == "chained":
        graph = capture(model, (case.inputs(case.batch), case.labels(case.batch)))
        planned = fit_within(model, "1TiB", plan=keep_all(graph))
    with grappler_off():  # plain training is compared under the same option
        history = model.fit(data, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=[peaks]).history
    every = (*model.variables, *model.optimizer.variables, *model.metrics_variables)
    left = [hashlib.sha256(np.ascontiguousarray(v.numpy()).tobytes()).hexdigest()[:16] for v in every]
    return {"history": history, "left": left}, peaks, planned


def point(name: str, budget: str) -> dict[str, Any]:
    """Train a network within a budget first, while the process is fresh, and compare."""
    found, peaks, planned = trained(name, "planned", budget)
    assert planned is not None
    variables = (*planned.model.variables, *planned.model.optimizer.variables, *planned.model.metrics_variables)
    held = sum(int(np.prod(v.shape)) * tf.as_dtype(v.dtype).size for v in variables)
    return {
        "chained": found == trained(name, "chained", budget)[0],
        "plain": found == trained(name, "plain", budget)[0],
        "overheads": [result.overhead for result in planned.results],
        "budget_bytes": planned.budget_bytes,
        "measured_bytes": planned.measured_bytes,
        "peak_bytes": held + max(peaks.bytes[1:]),  # the first step plans
    }


if __name__ == "__main__":
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    sys.stdout.write("RESULT " + json.dumps(point(sys.argv[1], sys.argv[2])) + "\n")
