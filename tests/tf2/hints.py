"""Whether the budget that a refusal names is kept at the first try, for random networks.

``python -m tests.tf2.hints FIRST LAST`` follows the hints of a range of seeds.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import keras
import numpy as np
from keras import layers

import checkmate
from checkmate import InfeasibleBudgetError


def network(seed: int) -> tuple[keras.Model, Any, Any]:
    """A random network with a batch: dense, convolutional or recurrent layers, with and without statistics and masks."""
    rng = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)
    kind = ("dense", "convolutional", "recurrent")[rng.integers(3)]
    batch, width = int(rng.integers(1, 65)), int(rng.integers(4, 65))
    shape = {"dense": (width,), "convolutional": (16, 16, 3), "recurrent": (int(rng.integers(3, 12)), width)}[kind]
    x = inputs = keras.Input(shape)
    for _ in range(int(rng.integers(1, 6))):
        units = int(rng.integers(4, 65))
        if kind == "convolutional":
            x = layers.Conv2D(units, 3, padding="same", activation="relu")(x)
        elif kind == "recurrent":
            x = (layers.LSTM, layers.GRU)[rng.integers(2)](units, return_sequences=True)(x)
        else:
            x = layers.Dense(units, activation=("relu", "gelu", "tanh")[rng.integers(3)])(x)
        if rng.random() < 0.4:
            x = layers.BatchNormalization()(x)
        if rng.random() < 0.4:
            x = layers.Dropout(0.2)(x)
    model = keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.Flatten()(x)), name=f"random{seed}")
    return model, rng.normal(size=(batch, *shape)).astype("float32"), rng.integers(0, 5, batch)


def follow(seed: int) -> dict[str, Any]:
    """Ask for a budget that is too small, and then for the one that the refusal names."""
    model, x, y = network(seed)
    optimizer = ("sgd", "adam")[seed % 2]
    graph = checkmate.tf2.capture(model, "sparse_categorical_crossentropy", optimizer, x, y)
    share = float(np.random.default_rng(seed).uniform(0, 1.0))
    budget: Any = max(1, int(graph.resident_bytes + share * (checkmate.min_budget(graph).peak_bytes - graph.resident_bytes)))
    said = []
    for _ in range(3):
        try:
            checkmate.tf2.compile(model, "sparse_categorical_crossentropy", optimizer, x, y, budget=budget, time_limit_s=1.0)
        except InfeasibleBudgetError as error:
            budget = re.findall(r"at least (\S+),", error.hint or "")[0]
            said.append(budget)
        else:
            break
    return {"seed": seed, "ops": len(graph.ops), "hints": said}


if __name__ == "__main__":
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        sys.stdout.write("RESULT " + json.dumps(follow(seed)) + "\n")
        sys.stdout.flush()
