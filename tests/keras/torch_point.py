"""A network of Keras on PyTorch trained by `fit`, planned and plain.

KERAS_BACKEND=torch python -m tests.keras.torch_point BUDGET
"""

from __future__ import annotations

import json
import sys
from typing import Any

import keras
import numpy as np
import torch
from keras import layers

from checkmate.keras import fit_within

PIXELS = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
CLASSES = np.random.default_rng(1).integers(0, 10, 64)


def trained(budget: str | None) -> tuple[Any, list[bytes], list[str]]:
    """History, variables, and the names of what stands in for parts of Keras after `undo`."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((64,))
    for _ in range(4):
        x = layers.Dense(64, activation="gelu")(x)
    model = keras.Model(inputs, layers.Dense(10, activation="softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    planned = None if budget is None else fit_within(model, budget, time_limit_s=3)
    options: dict[str, Any] = {"batch_size": 32, "epochs": 2, "verbose": 0, "shuffle": False}
    history = model.fit(PIXELS, CLASSES, validation_data=(PIXELS, CLASSES), **options).history
    if planned is not None:
        planned.undo()
    left = [v.value.detach().numpy().tobytes() for v in (*model.variables, *model.optimizer.variables)]
    return history, left, [name for name in ("call", "make_train_function") if name in vars(model)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain, planned = trained(None), trained(sys.argv[1])
    sys.stdout.write("RESULT " + json.dumps({"equal": planned[:2] == plain[:2], "hooks": planned[2]}) + "\n")
