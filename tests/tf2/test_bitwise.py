"""Whatever is in the step: the planned one leaves the same bits as the plain one."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import checkmate
from checkmate.tf2.op_properties import LOOPS
from tests.tf2.points import plain_step
from tests.tf2.steps import differing, forgetful, observe

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(16, 16, 16, 3)).astype("float32")
CLASSES = RNG.integers(0, 10, 16)
ROWS = RNG.normal(size=(256, 64)).astype("float32")
LABELS = RNG.integers(0, 10, 256)


def cnn() -> keras.Model:
    # In 16 bits and on processors with instructions for them, TensorFlow fuses a convolution with its bias and rounds once.
    bias = keras.config.dtype_policy().name == "float32"
    x = inputs = keras.Input((16, 16, 3))
    for width in (8, 16, 16):
        x = layers.Conv2D(width, 3, padding="same", kernel_regularizer="l2", use_bias=bias)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.Dropout(0.2)(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax", dtype="float32")(layers.Flatten()(x)))


def mlp() -> keras.Model:
    x = inputs = keras.Input((64,))
    for _ in range(4):
        x = layers.Dropout(0.3)(layers.Dense(128, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


def shared() -> keras.Model:
    """One layer used three times: its gradient is a sum."""
    x = inputs = keras.Input((64,))
    layer = layers.Dense(64, activation="gelu")
    for _ in range(3):
        x = layers.LayerNormalization()(layer(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam, clipped": lambda: keras.optimizers.Adam(1e-2, clipnorm=1.0),
    "adamw, decayed": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.1),
    "averaged": lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=2),
    "accumulated": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "scheduled": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10)),
    "lion": lambda: keras.optimizers.Lion(1e-3),
}


def planned_and_plain(make, optimizer, x, y, loss="sparse_categorical_crossentropy", more=1.2):
    """Observations of the planned step, and of what one writes without us."""
    found = []
    for kind in ("planned", "plain"):
        keras.utils.set_random_seed(1)
        model, mine = make(), optimizer()
        if kind == "planned":
            graph = checkmate.tf2.capture(model, loss, mine, x, y)
            plan = forgetful(graph)
            assert checkmate.validate(graph, plan) == ()
            assert len(plan.order) > more * len(graph.ops)
            step = checkmate.tf2.compile(model, loss, mine, x, y, plan=plan)
            mine = step.optimizer
        else:
            mine = keras.optimizers.LossScaleOptimizer(mine) if model.dtype_policy.name == "mixed_float16" else mine
            mine.build(model.trainable_variables)
            step = plain_step(model, loss, mine)
        found.append(observe(step, model, mine, tf.constant(x), tf.constant(y)))
    return found


def quick(names, *those):
    """Parameters of which only some run every time."""
    return [name if name in those else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick(OPTIMIZERS, "adamw, decayed"))
def test_optimizers(name):
    """Every slot, average, count and weight: an update reads what was there before it, exactly once."""
    planned, plain = planned_and_plain(mlp, OPTIMIZERS[name], ROWS, LABELS)
    assert differing(planned, plain) == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", quick(["float32", "mixed_bfloat16", "mixed_float16"], "mixed_float16"))
def test_statistics_masks_and_regularisers(policy):
    """BatchNorm's averages move once a step, dropout's masks are the same when computed again, losses of layers count."""
    keras.config.set_dtype_policy(policy)
    planned, plain = planned_and_plain(cnn, lambda: keras.optimizers.Adam(1e-3), IMAGES, CLASSES)
    assert differing(planned, plain) == 0


def test_shared_layers():
    """A weight that is read in several places is updated after the last of them."""
    planned, plain = planned_and_plain(shared, lambda: keras.optimizers.SGD(0.1), ROWS, LABELS)
    assert differing(planned, plain) == 0


class Finite(layers.Layer):
    """Rows without a NaN: how many is known at run time only, and gradients are views whose shapes the step computes."""

    def call(self, x):
        rows = tf.gather_nd(x, tf.where(tf.math.is_finite(tf.reduce_sum(x, -1))))
        return tf.ensure_shape(tf.squeeze(tf.nn.gelu(tf.expand_dims(rows, 1)), 1), x.shape)


def of_open_size() -> keras.Model:
    x = inputs = keras.Input((64,), batch_size=256)
    for _ in range(3):
        x = Finite()(layers.Dense(64)(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


def test_shapes_that_the_step_computes():
    """A view that reads a computed shape waits for the op that computes it: the op has a reader, in whatever order ops run."""
    graph = checkmate.tf2.capture(of_open_size(), "sparse_categorical_crossentropy", "sgd", ROWS, LABELS)
    shapes = [op for op in graph.ops if op.kind == "Shape"]
    assert shapes
    assert all(graph.readers[v] for op in shapes for v in op.outputs)
    planned, plain = planned_and_plain(of_open_size, OPTIMIZERS["sgd"], ROWS, LABELS)
    assert differing(planned, plain) == 0


def recurrent() -> keras.Model:
    x = inputs = keras.Input((8, 8))
    x = layers.Dropout(0.2)(layers.Dense(16, activation="tanh")(x))
    x = layers.GRU(16)(layers.LSTM(16, return_sequences=True)(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


class Mapped(layers.Layer):
    """One function of each example, as a loop."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        return tf.map_fn(lambda row: tf.tanh(row @ self.kernel), x)


class Counted(Mapped):
    """A loop that changes a variable."""

    def build(self, shape):
        super().build(shape)
        self.runs = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x):
        def body(i, x):
            self.runs.assign_add(1.0)
            return i + 1, tf.tanh(x @ self.kernel) + self.runs

        return tf.while_loop(lambda i, _: i < 3, body, [0, x])[1]


def of_loops(layer: type[layers.Layer]) -> keras.Model:
    x = inputs = keras.Input(batch_shape=(256, 8, 8))
    x = layer()(layer()(layers.Dense(8, activation="tanh")(x)))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.Flatten()(x)))


@pytest.mark.parametrize(
    ("make", "again"),
    [(recurrent, True), (lambda: of_loops(Mapped), True), (lambda: of_loops(Counted), False)],
    ids=["recurrent", "mapped", "counted"],
)
def test_loops(make, again):
    """Loops run again, each with the lists that it is given and variables as they were; one that changes a variable runs once."""
    x = ROWS.reshape(256, 8, 8)
    model = make()
    graph = checkmate.tf2.capture(model, "sparse_categorical_crossentropy", "sgd", x, LABELS)
    loops = [o for o, op in enumerate(graph.ops) if op.kind in LOOPS and op.phase == "forward"]
    assert len(loops) == 2
    assert [forgetful(graph).order.count(o) > 1 for o in loops] == [again] * 2
    planned, plain = planned_and_plain(make, lambda: keras.optimizers.Adam(1e-2), x, LABELS)
    assert differing(planned, plain) == 0


def grouped() -> keras.Model:
    """Convolutions with groups, which Keras lets XLA compile on a CPU, and a function of the user that XLA compiles."""

    class Compiled(layers.Layer):
        def call(self, x):
            return tf.function(lambda y: tf.nn.gelu(y) * 2.0, jit_compile=True)(x)

    x = inputs = keras.Input((16, 16, 3))
    x = layers.Conv2D(8, 3, padding="same")(x)
    for groups in (2, 8):
        x = Compiled()(layers.Conv2D(8, 3, groups=groups, padding="same", activation="relu")(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.Flatten()(x)))


def test_functions_that_xla_compiles():
    """Each is one op, which runs once if it takes a variable."""
    planned, plain = planned_and_plain(grouped, lambda: keras.optimizers.SGD(0.1), IMAGES, CLASSES, more=1.0)
    assert differing(planned, plain) == 0
    graph = checkmate.tf2.capture(grouped(), "sparse_categorical_crossentropy", "sgd", IMAGES, CLASSES)
    calls = [op for op in graph.ops if op.kind == "StatefulPartitionedCall" and op.phase == "forward"]
    assert len(calls) >= 2
    assert not any(op.recomputable for op in calls)


def test_the_comparison_can_fail():
    """Another seed gives other masks, and every array shows it."""
    keras.utils.set_random_seed(1)
    one, first = mlp(), keras.optimizers.SGD(0.1)
    keras.utils.set_random_seed(2)
    other, second = mlp(), keras.optimizers.SGD(0.1)
    steps = [
        checkmate.tf2.compile(m, "sparse_categorical_crossentropy", o, ROWS, LABELS) for m, o in ((one, first), (other, second))
    ]
    seen = [observe(s, m, s.optimizer, ROWS, LABELS, steps=1) for s, m in zip(steps, (one, other), strict=True)]
    assert differing(*seen) > 3
