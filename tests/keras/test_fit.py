"""`fit` under a budget is Keras's own `fit`: same bits, same callbacks, same files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import checkmate
from checkmate import InfeasibleBudgetError, OptionError
from checkmate.core.units import format_at_least
from checkmate.keras import PlannedFit, capture, fit_within
from checkmate.tf2._compat import grappler_off
from tests.keras.points import Peaks
from tests.tf2.steps import forgetful

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")  # of Keras

RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(20, 16, 16, 3)).astype("float32")
CLASSES = RNG.integers(0, 10, 20)
WEIGHTS = np.linspace(0, 2, 20).astype("float32")


def cnn(**options: Any) -> keras.Model:
    x = inputs = keras.Input((16, 16, 3))
    for width in (8, 16):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x)))
        x = layers.Dropout(0.2)(x)
    outputs = layers.Dense(10, activation="softmax", dtype="float32")(layers.Flatten()(x))
    model = keras.Model(inputs, outputs)
    compiled(model, **options)
    return model


def compiled(model: keras.Model, **options: Any) -> None:
    """Without XLA, whose bits are others."""
    loss = "sparse_categorical_crossentropy"
    chosen: dict[str, Any] = {"optimizer": "adam", "loss": loss, "metrics": ["accuracy"], "jit_compile": False, **options}
    model.compile(**chosen)


def dataset(batch: int = 5) -> tf.data.Dataset:
    """Four batches, shuffled."""
    return tf.data.Dataset.from_tensor_slices((IMAGES, CLASSES)).shuffle(20, seed=1).batch(batch).prefetch(2)


def bits(model: keras.Model) -> list[bytes]:
    """Weights, statistics, seeds, slots and metrics."""
    every = (*model.variables, *model.optimizer.variables, *model.metrics_variables)
    return [np.ascontiguousarray(v.numpy()).tobytes() for v in every]


def both(make: Callable[[], keras.Model], train: Callable[[keras.Model], Any], batch: Any = None) -> PlannedFit:
    """Train by a plan that computes nearly everything several times, and without one; the bits are the same."""
    keras.utils.set_random_seed(1)
    plain = make()
    with grappler_off():
        expected = train(plain)
    keras.utils.set_random_seed(1)
    model = make()
    graph = capture(model, next(iter(dataset())) if batch is None else batch)
    planned = fit_within(model, "1GiB", plan=forgetful(graph))
    assert train(model) == expected
    assert bits(model) == bits(plain)
    assert planned.results[0].overhead > 1.2
    return planned


def history(**options: Any) -> Callable[[keras.Model], Any]:
    def train(model: keras.Model) -> Any:
        source = {"x": dataset(), "shuffle": False} if "x" not in options else {}
        return model.fit(**{**source, **options}, epochs=2, verbose=0).history

    return train


def test_a_data_set_and_validation():
    """History, weights, slots and metrics are those of plain training; a learning rate that a callback changes is read."""
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
    planned = both(cnn, history(validation_data=(IMAGES, CLASSES), callbacks=[schedule]))
    assert float(planned.model.optimizer.learning_rate) == pytest.approx(0.05)


def test_metrics_do_not_keep_the_prediction_until_the_end():
    """Keras traces them after the update; they are listed before the backward pass, which needs less memory."""
    graph = capture(cnn(), (IMAGES, CLASSES), costs="estimated")
    phases = [op.phase for op in graph.ops]
    assert "loss" in phases
    assert "loss" not in phases[phases.index("backward") :]


@pytest.mark.slow
def test_a_smaller_last_batch_is_planned_within_the_same_budget():
    """Each shape has a plan, found when it first comes and kept; both are measured."""
    losses = []
    for budget in (None, "80%"):
        keras.utils.set_random_seed(1)
        model = cnn()
        planned = None if budget is None else fit_within(model, budget, time_limit_s=1)
        with grappler_off():
            losses.append(model.fit(dataset(8), shuffle=False, epochs=2, verbose=0).history)
    assert losses[0] == losses[1]
    assert planned is not None
    first, last = planned.results
    assert first.overhead > 1
    assert first.plan.graph_digest != last.plan.graph_digest
    assert planned.measured_bytes is not None


@pytest.mark.slow
def test_arrays_with_weights_of_samples():
    """Arrays are shuffled and cut into batches by Keras."""
    both(
        cnn,
        history(x=IMAGES, y=CLASSES, sample_weight=WEIGHTS, batch_size=10),
        (IMAGES[:10], CLASSES[:10], WEIGHTS[:10]),
    )


@pytest.mark.slow
def test_weights_of_classes():
    """Keras makes weights of samples from them."""
    both(cnn, history(class_weight={c: 1.0 + c for c in range(10)}), (IMAGES[:5], CLASSES[:5], WEIGHTS[:5]))


def test_several_steps_for_each_call_of_the_callbacks():
    """The planned step runs as many times, and the rest of an epoch is a shorter execution."""
    calls: list[int] = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: calls.append(batch))
    both(lambda: cnn(steps_per_execution=3), history(callbacks=[count]))
    assert calls == 4 * [2, 5]


@pytest.mark.slow
def test_mixed_precision_scales_the_loss():
    """Keras wraps the optimizer when it compiles; the plan has the scaled loss and the check of the gradients."""
    keras.config.set_dtype_policy("mixed_float16")

    def make() -> keras.Model:
        x = inputs = keras.Input((16, 16, 3))
        for _ in range(5):
            x = layers.Dropout(0.2)(layers.Dense(12, activation="gelu")(x))
        model = keras.Model(inputs, layers.Dense(10, activation="softmax", dtype="float32")(layers.GlobalMaxPooling2D()(x)))
        compiled(model)
        return model

    planned = both(make, history())
    assert isinstance(planned.model.optimizer, keras.optimizers.LossScaleOptimizer)


@pytest.mark.slow
def test_models_that_are_built_by_fit():
    """Keras defers building to the first trace."""

    def make() -> keras.Model:
        model = keras.Sequential(
            [
                *(
                    layer
                    for _ in range(3)
                    for layer in (layers.Conv2D(8, 3, activation="relu", padding="same"), layers.Dropout(0.1))
                ),
                layers.Flatten(),
                layers.Dense(10, activation="softmax"),
            ]
        )
        compiled(model)
        return model

    both(make, history())


class Penalised(keras.Model):
    """A model with a `train_step` of its own, as Keras's guide on customizing `fit` writes it."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=prediction) + 0.1 * tf.reduce_mean(tf.square(prediction))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, prediction)
        return {metric.name: metric.result() for metric in self.metrics}


class Decorated(Penalised):
    """Many programs decorate it, although `fit` compiles it anyway."""

    train_step = tf.function(Penalised.train_step)


class Calling(Penalised):
    """Others call a function of `tf.function` in it."""

    inner = tf.function(Penalised.train_step)

    def train_step(self, data: Any) -> Any:
        return self.inner(data)


@pytest.mark.parametrize("kind", [pytest.param(Penalised, marks=pytest.mark.slow), Decorated, Calling])
def test_a_train_step_of_the_model_is_planned(kind):
    """What `fit` runs is the model's `train_step`, and that is what is traced, op by op."""

    def make() -> keras.Model:
        inner = cnn()
        model = kind(inner.input, inner.output)
        compiled(model)
        return model

    both(make, history())


def test_a_step_is_traced_once():
    """Slots made in the trace would be conditionals in it, and trace the step again: half of the time before the first step."""
    traced: list[int] = []

    class Counting(Penalised):
        def train_step(self, data: Any) -> Any:
            traced.append(1)
            return super().train_step(data)

    inner = cnn()
    model = Counting(inner.input, inner.output)
    compiled(model, optimizer=keras.optimizers.Adam(amsgrad=True))
    capture(model, (IMAGES, CLASSES), costs="estimated")
    assert traced == [1]
    assert len(model.optimizer.variables) == 2 + 3 * len(model.trainable_variables)
    assert not any(v.numpy().any() for v in model.optimizer.variables[2:])


@pytest.mark.slow
def test_training_on_single_batches():
    """`train_on_batch` runs the same function."""
    both(cnn, lambda model: [model.train_on_batch(IMAGES, CLASSES) for _ in range(2)], (IMAGES, CLASSES, None))


def test_a_checkpoint_of_each_side_is_read_by_the_other(tmp_path):
    """State is in the model's own variables: a planned model continues a plain one, and the reverse, from files of Keras."""

    def train(model: keras.Model) -> Any:
        path = tmp_path / f"{model.name}.keras"
        model.fit(dataset(), shuffle=False, epochs=1, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(path)])
        restored = keras.models.load_model(path)
        assert "make_train_function" not in vars(restored)
        for ours, theirs in ((model.weights, restored.weights), (model.optimizer.variables, restored.optimizer.variables)):
            assert [v.numpy().tobytes() for v in ours] == [v.numpy().tobytes() for v in theirs]
        model.load_weights(path)
        return model.fit(dataset(), shuffle=False, epochs=1, verbose=0).history

    both(cnn, train)


@pytest.mark.slow
def test_another_compile_is_planned_again_and_undo_returns_to_keras():
    """A new optimizer is another step; without the budget Keras makes its own function, and nothing of ours stays."""
    model = cnn()
    planned = fit_within(model, "1GiB")
    model.fit(dataset(), shuffle=False, verbose=0)
    (first,) = planned.results
    compiled(model, optimizer="sgd")
    model.fit(dataset(), shuffle=False, verbose=0)
    (second,) = planned.results
    assert second.plan.graph_digest != first.plan.graph_digest
    again = fit_within(model, "2GiB")
    planned.undo()  # it was replaced, so that there is nothing to undo
    model.fit(dataset(), shuffle=False, verbose=0)
    assert [result.overhead for result in again.results] == [1.0]
    again.undo()
    assert "make_train_function" not in vars(model)
    model.fit(dataset(), shuffle=False, verbose=0)
    assert model.train_function.__module__.startswith("keras.")


def test_a_budget_that_no_plan_keeps_is_an_error_of_fit():
    """It is raised by `fit`, with a budget that suffices, and the weights are as before."""
    model = cnn()
    before = [v.numpy().tobytes() for v in model.variables]
    fit_within(model, "10KiB")
    with pytest.raises(InfeasibleBudgetError) as caught:
        model.fit(dataset(), shuffle=False, verbose=0)
    assert caught.value.smallest_bytes is not None  # what the hint names, and not the peak without its margin
    assert f"raise the budget to at least {format_at_least(caught.value.smallest_bytes)}" in caught.value.hint
    assert caught.value.__notes__ == ["This is for a batch of (5, 16, 16, 3), (5,)."]
    assert caught.value.binding_op in str(caught.value)
    assert [v.numpy().tobytes() for v in model.variables] == before


@pytest.mark.slow
def test_a_refusal_names_a_budget_that_works_at_the_next_try():
    """The smallest measured peak with a margin, for the chunks that differ from one calibration to the next."""
    model = cnn()
    fit_within(model, "10KiB", time_limit_s=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        model.fit(dataset(), shuffle=False, verbose=0)
    assert caught.value.smallest_bytes is not None
    planned = fit_within(model, caught.value.smallest_bytes, time_limit_s=1)
    model.fit(dataset(), shuffle=False, verbose=0)
    assert planned.measured_bytes is not None
    assert planned.measured_bytes <= caught.value.smallest_bytes


def test_a_refusal_names_no_more_than_what_keeping_everything_takes():
    """A plan that keeps everything always works; a third above the smallest plan was named, which could be more."""
    model = keras.Sequential([keras.Input((16,)), layers.Dense(512, activation="softmax")])
    compiled(model, optimizer="sgd", metrics=None)
    x, y = RNG.normal(size=(4096, 16)).astype("float32"), RNG.integers(0, 10, 4096)
    fit_within(model, "20%", time_limit_s=1)
    with pytest.raises(InfeasibleBudgetError) as caught:
        model.fit(x, y, batch_size=4096, verbose=0)
    everything = fit_within(model, "100%", time_limit_s=1)
    model.fit(x, y, batch_size=4096, verbose=0)
    variables = sum(v.numpy().nbytes for v in (*model.variables, *model.optimizer.variables, *model.metrics_variables))
    fixed = variables + x.nbytes + 4 * y.nbytes
    assert everything.measured_bytes is not None
    assert caught.value.smallest_bytes is not None
    assert caught.value.smallest_bytes <= 1.25 * (everything.measured_bytes - fixed) + fixed


def test_a_share_of_100_percent_always_works():
    """It is what TensorFlow takes to keep everything: its chunks are larger than a plan's bytes, of which 100 % were refused."""
    inputs = keras.Input((28, 28, 1))
    h = layers.Conv2D(16, 3, activation="relu")(inputs)
    h = layers.MaxPooling2D()(layers.Conv2D(32, 3, activation="relu")(layers.MaxPooling2D()(h)))
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(layers.Dropout(0.5)(layers.Flatten()(h))))
    compiled(model)
    x, y = RNG.normal(size=(44, 28, 28, 1)).astype("float32"), RNG.integers(0, 10, 44)
    planned = fit_within(model, "100%", time_limit_s=1)
    model.fit(x, y, batch_size=32, verbose=0, shuffle=False)
    assert [result.overhead for result in planned.results] == [1.0, 1.0]
    assert planned.budget_bytes == planned.measured_bytes


def test_batches_that_a_data_set_makes_ahead_are_within_the_budget():
    """It makes them while a step runs: the first step of each epoch took the bytes of three batches more than planned."""
    inputs = h = keras.Input((512,))
    for _ in range(6):
        h = layers.Dense(256, activation="gelu")(h)
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(h))
    compiled(model, metrics=None)
    x, y, peaks = RNG.normal(size=(2048, 512)).astype("float32"), RNG.integers(0, 10, 2048), Peaks()
    planned = fit_within(model, "70%", time_limit_s=2)
    model.fit(x, y, batch_size=512, epochs=4, verbose=0, callbacks=[peaks])
    held = sum(v.numpy().nbytes for v in (*model.variables, *model.optimizer.variables))
    assert planned.budget_bytes is not None
    assert held + max(peaks.bytes[1:]) <= planned.budget_bytes  # the first step plans


class Allocating(keras.Model):
    """A model whose step allocates bytes that calibration has not seen."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.extra: list[int] = []  # of the next steps

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        tf.py_function(lambda: tf.size(tf.zeros([self.extra.pop() if self.extra else 0])), [], tf.int32)
        return logs


def test_a_share_of_100_percent_is_what_the_steps_take():
    """Steps took more than was measured, and nothing said so."""
    inputs = keras.Input((64,))
    model = Allocating(inputs, layers.Dense(10, activation="softmax")(inputs))
    compiled(model, optimizer="sgd", metrics=None)
    x, y = RNG.normal(size=(512, 64)).astype("float32"), RNG.integers(0, 10, 512)
    planned = fit_within(model, "100%", time_limit_s=1)
    model.fit(x, y, batch_size=512, verbose=0)
    before = planned.budget_bytes
    assert before is not None
    model.extra.append(500_000)
    model.fit(x, y, batch_size=512, verbose=0)
    assert planned.budget_bytes == planned.measured_bytes
    assert planned.budget_bytes > before + 1_000_000


def test_a_step_that_exceeds_the_budget_is_planned_again(caplog):
    """Other free chunks than those of calibration can add bytes to any step; the next plan leaves them free."""
    inputs = h = keras.Input((64,))
    for _ in range(4):
        h = layers.Dense(64, activation="gelu")(h)
    model = Allocating(inputs, layers.Dense(10, activation="softmax")(h))
    compiled(model, optimizer="sgd", metrics=None)
    x, y = RNG.normal(size=(512, 64)).astype("float32"), RNG.integers(0, 10, 512)
    planned = fit_within(model, "90%", time_limit_s=1)
    model.fit(x, y, batch_size=512, epochs=6, verbose=0)
    first, measured, budget = planned.results[0].peak_bytes, planned.measured_bytes, planned.budget_bytes
    assert measured is not None
    assert budget is not None
    model.extra.append((budget - measured) // 4 + 200_000)
    model.fit(x, y, batch_size=512, verbose=0)
    assert planned.results[0].peak_bytes < first
    assert "planned again within" in caplog.text


class Noisy(keras.Model):
    """Adds noise from an op whose random stream belongs to the function that it is in."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x + 0.1 * tf.random.uniform(tf.shape(x), seed=7), y))


def test_random_streams_that_start_again_are_reported(caplog):
    """A function for each size of a batch, and a stream for each function, where `fit` has one."""
    inputs = keras.Input((4,))
    model = Noisy(inputs, layers.Dense(1)(inputs))
    compiled(model, loss="mse", metrics=None)
    fit_within(model, "1GiB", time_limit_s=1)
    x = np.ones((8, 4), "float32")
    for size, said in ((8, 0), (4, 1), (8, 1)):
        model.fit(x[:size], x[:size, :1], batch_size=size, verbose=0)
        assert sum("draw from their start again" in record.message for record in caplog.records) == said


def test_an_error_of_a_layer_is_whole():
    """Keras names the layer first, and what is wrong in a later line."""
    model = keras.Sequential([keras.Input((32,)), layers.Dense(4)])
    compiled(model, loss="mse", metrics=None)
    fit_within(model, "1GiB")
    with pytest.raises(checkmate.GraphError, match="expected axis -1 of input shape to have value 32"):
        model.fit(np.ones((8, 3), "float32"), np.ones((8, 4), "float32"), verbose=0)


def test_a_compile_that_cannot_be_planned_is_an_error_of_the_next_fit():
    """Keras would otherwise train without the budget, or the planned step would hide that eager mode was asked for."""
    model = cnn()
    fit_within(model, "1GiB")
    compiled(model, run_eagerly=True)
    with pytest.raises(OptionError, match="run_eagerly=True"):
        model.fit(dataset(), shuffle=False, verbose=0)


class OwnFunction(keras.Model):
    def make_train_function(self, force: bool = False) -> Any:
        return super().make_train_function(force)


def own_function() -> keras.Model:
    inner = cnn()
    model = OwnFunction(inner.input, inner.output)
    compiled(model)
    return model


def of_strategy() -> keras.Model:
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        return cnn()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: layers.Dense(3), r"not a keras\.Model"),
        (lambda: keras.Sequential([layers.Dense(3)]), "not compiled"),
        (lambda: cnn(run_eagerly=True), "run_eagerly"),
        (lambda: cnn(optimizer=None), "not compiled with an optimizer"),
        (own_function, "make_train_function"),
        (of_strategy, "MirroredStrategy"),
    ],
    ids=["layer", "not-compiled", "eager", "no-optimizer", "own-function", "strategy"],
)
def test_models_that_cannot_be_planned_are_refused_with_a_hint(make, says):
    """Before `fit`, where the call is."""
    with pytest.raises(OptionError, match=says) as caught:
        checkmate.keras.fit_within(make(), "1GiB")
    assert caught.value.hint
