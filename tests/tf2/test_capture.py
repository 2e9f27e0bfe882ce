"""What the graph of a Keras step says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from keras import layers

import checkmate
from checkmate.tf2 import profiler
from checkmate.tf2.profiler import environment
from tests.tf2.steps import differing, observe

X = np.random.default_rng(0).normal(size=(32, 64)).astype("float32")
Y = np.random.default_rng(1).integers(0, 10, 32)


def net() -> keras.Model:
    x = inputs = keras.Input((64,))
    for _ in range(4):
        x = layers.Dropout(0.2)(layers.Dense(64, activation="relu")(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


@pytest.fixture(scope="module")
def graph() -> checkmate.Graph:
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.1)
    return checkmate.tf2.capture(net(), "sparse_categorical_crossentropy", optimizer, X, Y, costs="estimated")


def test_updates_are_listed_where_gradients_are_born(graph):
    """So that gradients die one by one: the first update comes long before the last gradient."""
    phases = [op.phase for op in graph.ops]
    last_gradient = len(phases) - 1 - phases[::-1].index("backward")
    assert phases.index("optimizer") > phases.index("backward")
    assert sum(p == "optimizer" for p in phases[:last_gradient]) > 0.5 * phases.count("optimizer")


def test_who_reads_a_weight_runs_before_its_update(graph):
    """The graph forbids to compute a layer again after its weight has changed, on which TensorFlow would copy the weight."""
    readers = [op for op in graph.ops if op.kind == "MatMul" and op.phase == "forward"]
    assert readers
    assert all(op.clobbered_by for op in readers)
    assert all(graph.ops[c].phase == "optimizer" for op in readers for c in op.clobbered_by)


def test_what_counts_once_is_run_once(graph):
    """Seeds and slots: every op with an effect, and nothing else of the step, is not recomputable."""
    effects = [op for op in graph.ops if op.kind.startswith("Assign")]
    assert effects
    assert not any(op.recomputable for op in effects)
    assert all(
        op.recomputable for op in graph.ops if op.phase in ("forward", "backward") and not op.kind.startswith(("Assign", "Read"))
    )


def test_resident_bytes_are_weights_slots_and_batch(graph):
    """Three times the weights for Adam, and the batch; counters and constants are small."""
    weights = sum(v.numpy().nbytes for v in net().trainable_variables)
    assert 0 <= graph.resident_bytes - (3 * weights + X.nbytes + Y.nbytes) < 4096


def test_steps_run_in_threads():
    """The scope without Grappler is the calling thread's own."""

    def train(_: int) -> list[np.ndarray]:
        return [*observe(step, step.model, step.optimizer, X, Y)][:2]

    keras.utils.set_random_seed(0)
    step = checkmate.tf2.compile(net(), "sparse_categorical_crossentropy", keras.optimizers.SGD(0.0), X, Y)
    state = [v.numpy() for v in step.model.variables]
    alone = train(0)
    for variable, value in zip(step.model.variables, state, strict=True):
        variable.assign(value)
    with ThreadPoolExecutor(1) as pool:
        assert differing(alone, pool.submit(train, 1).result()) == 0


def test_costs_are_kept_for_the_kernels_that_were_measured(environ: dict[str, str]) -> None:
    """A home folder is shared by machines, and a cache by programs with other settings."""
    before = environment()
    assert profiler.processor() in before
    environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
    assert environment() != before
