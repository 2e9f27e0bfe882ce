"""Whole networks of Keras: two epochs of a data set within a budget, bit by bit, and the example."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BUDGETS = {"resnet50": "80%", "mobilenet": "80%", "transformer": "60%", "lstm": "80%"}


def child(*arguments: str, **variables: str) -> str:
    """What a script prints in a fresh process."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **variables,
    }
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGETS)
def test_two_epochs_within_a_budget(name: str) -> None:
    """History, weights, slots and metrics are those of the chained step and of Keras's own, and every measured step fits."""
    said = child("-m", "tests.keras.points", name, BUDGETS[name])
    point: dict[str, Any] = json.loads(said.rpartition("RESULT ")[2])
    assert point["chained"]
    assert point["plain"]
    assert max(point["overheads"]) > 1
    assert point["measured_bytes"] <= point["budget_bytes"]
    assert point["peak_bytes"] <= point["budget_bytes"]


ON_TORCH = """
import keras
import numpy as np
import torch
from keras import layers

import checkmate
from checkmate.keras import fit_within
from checkmate.torch import last_plan

torch.set_num_threads(1)
x, y = np.random.default_rng(0).normal(size=(192, 64)).astype("float32"), np.random.default_rng(1).integers(0, 10, 192)
left = []
for budget in ("80%", None):
    keras.utils.set_random_seed(0)
    body = [layer for _ in range(4) for layer in (layers.Dense(64, activation="gelu"), layers.Dropout(0.1))]
    model = keras.Sequential([keras.Input((64,)), *body, layers.Dense(10, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy")
    if budget is not None:
        try:
            fit_within(model, budget)
        except checkmate.OptionError as error:
            exec("\\n".join(line.strip() for line in error.hint.splitlines()[1:]))
    model.fit(x, y, batch_size=64, epochs=2, verbose=0, shuffle=False, validation_data=(x, y))
    left.append([v.value.detach().numpy().tobytes() for v in (*model.variables, *model.optimizer.variables)])
assert left[0] == left[1]
result = last_plan().result
assert result.overhead > 1
assert result.peak_bytes <= result.budget_bytes
"""


@pytest.mark.slow
def test_the_lines_that_the_hint_names_plan_a_fit_on_pytorch() -> None:
    """`fit_within` refuses Keras on PyTorch. The lines of its hint give a planned step, with the bits of a plain one."""
    child("-c", ON_TORCH, KERAS_BACKEND="torch")


ON_JAX = """
import keras
import numpy as np
import pytest
from keras import layers

from checkmate import OptionError
from checkmate.keras import capture, fit_within

x, y = np.random.default_rng(0).normal(size=(320, 16)).astype("float32"), np.random.default_rng(1).integers(0, 10, 320)
losses = []
for budget in ("60%", None):
    keras.utils.set_random_seed(0)
    body = [layer for _ in range(3) for layer in (layers.Dense(64, activation="gelu"), layers.Dropout(0.1))]
    model = keras.Sequential([keras.Input((16,)), *body, layers.Dense(10, activation="softmax")])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    planned = None if budget is None else fit_within(model, budget, time_limit_s=2)
    history = model.fit(x, y, batch_size=256, epochs=2, verbose=0, shuffle=False, validation_data=(x, y)).history
    losses.append([history[name] for name in ("loss", "accuracy", "val_loss")])
    if planned is not None:
        assert len(planned.results) == 2
        assert planned.results[0].overhead > 1
        assert planned.measured_bytes <= planned.budget_bytes
        with pytest.raises(OptionError, match="checkmate.jax.capture"):
            capture(model, (x, y))
        planned.undo()
        assert "make_train_function" not in vars(model)
np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
"""


@pytest.mark.slow
def test_fit_keeps_a_budget_on_jax() -> None:
    """The step of Keras's trainer for JAX is planned for each shape of a batch, as XLA compiles it."""
    child("-c", ON_JAX, KERAS_BACKEND="jax")


@pytest.mark.slow
def test_the_example_runs() -> None:
    """It asserts itself that losses are equal and that the peak is within the budget."""
    assert "within the budget" in child(str(ROOT / "examples" / "keras_fit.py"))
