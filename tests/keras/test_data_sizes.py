"""Data whose sizes no shape tells, such as texts and ragged rows: what `fit` runs keeps the budget."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from checkmate import InfeasibleBudgetError
from checkmate.keras import capture, fit_within
from checkmate.tf2._compat import grappler_off
from tests.keras.test_fit import bits, compiled

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")  # of Keras

RNG = np.random.default_rng(0)


def test_texts_are_planned_although_strings_have_no_sizes():
    """Ops on strings lose the number of examples: what follows counts as for the batch, and is planned."""
    texts = np.array([[f"word{i} and word{i % 7} there"] for i in range(64)])
    words = layers.TextVectorization(200, output_sequence_length=32)
    words.adapt(texts)
    strings = keras.Input((1,), dtype="string")
    h = layers.Embedding(200, 16)(words(strings))
    for _ in range(2):
        h = layers.Conv1D(16, 5, activation="relu")(h)
    model = keras.Model(strings, layers.Dense(2, activation="softmax")(layers.GlobalMaxPooling1D()(h)))
    compiled(model)
    data = tf.data.Dataset.from_tensor_slices((texts, np.arange(64) % 2)).batch(32)
    graph = capture(model, next(iter(data)))
    embedded = [value for value in graph.values if value.size_bytes == 32 * 32 * 16 * 4]
    assert embedded
    assert all(graph.readers[v] for op in graph.ops if op.kind == "Shape" for v in op.outputs)
    fit_within(model, "100%", time_limit_s=2)
    model.fit(data, verbose=0, shuffle=False)


class Padding(keras.Model):
    """Pads rows of different lengths in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = [layers.Embedding(50, 32), *(layers.Dense(64, activation="gelu") for _ in range(3)), layers.Dense(2)]

    def call(self, inputs: Any) -> Any:
        x = inputs.to_tensor()
        for layer in self.stack:
            x = layer(x)
        return tf.reduce_mean(x, 1)


def rows(longest: int) -> tuple[tf.RaggedTensor, tf.Tensor]:
    lengths = np.linspace(longest // 2, longest, 16).astype(int)
    return tf.RaggedTensor.from_row_lengths(tf.constant(RNG.integers(0, 50, lengths.sum())), lengths), tf.range(16) % 2


def test_rows_longer_than_those_that_were_planned_keep_the_budget(caplog):
    """Their batch has the same signature; the plan for shorter rows would take more than the budget, twice as much for 40."""
    model = Padding()
    model(rows(20)[0])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    planned = fit_within(model, "80%", time_limit_s=1)
    for longest, plans in ((20, 1), (10, 1), (26, 2), (20, 2), (26, 2)):
        model.train_on_batch(*rows(longest))
        assert len(planned.results) == plans
    assert planned.measured_bytes is not None
    assert planned.budget_bytes is not None
    assert planned.measured_bytes <= planned.budget_bytes
    assert planned.results[1].overhead > planned.results[0].overhead
    assert "the step needed" not in caplog.text
    before = [v.numpy().tobytes() for v in model.variables]
    with pytest.raises(InfeasibleBudgetError) as caught:
        model.train_on_batch(*rows(400))
    assert [v.numpy().tobytes() for v in model.variables] == before
    assert planned.measured_bytes <= planned.budget_bytes < caught.value.smallest_bytes


class Tokens(keras.Model):
    """Convolutions over texts of any length, given as ragged tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(100, 16)
        self.convolutions = [layers.Conv1D(16, 5, padding="same", activation="gelu") for _ in range(3)]
        self.classes = layers.Dense(2, activation="softmax")

    def call(self, tokens: Any) -> Any:
        x = self.embedding(tokens.to_tensor() if isinstance(tokens, tf.RaggedTensor) else tokens)
        for convolution in self.convolutions:
            x = convolution(x)
        return self.classes(tf.reduce_max(x, 1))


def test_ragged_batches_are_planned_by_the_sizes_of_the_first():
    """No shape says how long the longest text is; the step says it when it runs, and the budget counts it."""
    lengths = [1 + (7 * i) % 48 for i in range(32)]
    tokens = tf.RaggedTensor.from_row_lengths(tf.range(sum(lengths)) % 100, lengths)
    data = tf.data.Dataset.from_tensors((tokens, np.arange(32) % 2))
    left = []
    for budget in (None, "70%"):
        keras.utils.set_random_seed(0)
        model = Tokens()
        compiled(model)
        planned = None if budget is None else fit_within(model, budget, time_limit_s=2)
        with grappler_off():
            model.fit(data, epochs=2, verbose=0, shuffle=False)
        left.append(bits(model))
    assert left[0] == left[1]
    assert planned is not None
    assert planned.budget_bytes is not None
    assert planned.measured_bytes is not None
    assert planned.measured_bytes <= planned.budget_bytes
    graph = capture(model, next(iter(data)))
    convolved = [graph.values[v].size_bytes for op in graph.ops if op.kind == "Conv2D" for v in op.outputs]
    assert convolved == 3 * [32 * max(lengths) * 16 * 4]
    assert graph.resident_bytes > sum(lengths) * 4
