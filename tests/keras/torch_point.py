"""A network of Keras on PyTorch trained by `fit`, planned and plain.

``KERAS_BACKEND=torch python -m tests.keras.torch_point NAME BUDGET`` trains one, and ``... clipped BUDGET`` the dense one with an
optimizer whose update needs more than any plan.
"""

from __future__ import annotations

import gc
import inspect
import json
import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import torch
from keras import layers

from checkmate.core.units import parse_bytes
from checkmate.keras import fit_within
from checkmate.torch._compat.profiler import memory_trace
from checkmate.torch.steps.coordinator import coordinator

EPOCHS, BATCHES = 3, 3
BEGIN, END = "a step of fit begins", "a step of fit ends"


def dense() -> keras.Model:
    """Its weights take more than its activations, so that the update is the largest part of a step."""
    x = inputs = keras.Input((64,))
    for _ in range(4):
        x = layers.Dense(64, activation="gelu")(x)
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x))


def mobilenet() -> keras.Model:
    return keras.applications.MobileNet(weights=None, input_shape=(32, 32, 3), classes=10)


def mobilenet_v3() -> keras.Model:
    """It has a `Rescaling` layer, which can also run in a data set."""
    return keras.applications.MobileNetV3Small(weights=None, input_shape=(32, 32, 3), classes=10)


@dataclass(frozen=True, slots=True)
class Network:
    """A network, and the shape of its batch."""

    make: Callable[[], keras.Model]
    shape: tuple[int, ...]
    batch: int


NETWORKS = {
    "dense": Network(dense, (64,), 32),
    "mobilenet": Network(mobilenet, (32, 32, 3), 64),
    "mobilenet_v3": Network(mobilenet_v3, (32, 32, 3), 64),
}


class Peaks(keras.callbacks.Callback):
    """Measures the steps of `fit` from the fourth on, each with its update and its metrics.

    The first two steps compile and plan, which the profiler would disturb, so that it runs from the third step to the last. It
    does not see that a tensor is freed which it did not see allocated, such as gradients before the third step. All of these are
    gone when the fourth begins, so that counting back from the end gives what each later step holds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self._steps, self._profiler = 0, ExitStack()
        self._trace: Any = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps == 3:
            self._trace = self._profiler.enter_context(memory_trace())
        if self._steps > 3:
            mark(BEGIN)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._steps > 3:
            mark(END)
        if self._steps == EPOCHS * BATCHES:
            held = existing_bytes()
            self._profiler.close()
            self.bytes = step_peaks(self._trace.events, held)


def existing_bytes() -> int:
    """Bytes of all tensors that exist."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and t.device.type == "cpu"]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def mark(what: str) -> None:
    """Write a name into the trace."""
    with torch.profiler.record_function(what):
        pass


def step_peaks(events: list[tuple[str, Any]], held_at_the_end: int) -> list[int]:
    """The most bytes held in each step."""
    held = held_at_the_end - sum(amount for what, amount in events if what == "alloc")
    peaks: list[int] = []
    inside = False
    for what, amount in events:
        if what == "alloc":
            held += amount
        elif amount == BEGIN:
            inside = True
            peaks.append(held)
        elif amount == END:
            inside = False
        if inside:
            peaks[-1] = max(peaks[-1], held)
    return peaks


def trained(network: Network, budget: str | None, optimizer: Any = "adam") -> tuple[dict[str, Any], Peaks]:
    """Train; what is left, and the peaks."""
    keras.utils.set_random_seed(0)
    model = network.make()
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    planned = None if budget is None else fit_within(model, budget, time_limit_s=15)
    count, peaks = BATCHES * network.batch, Peaks()
    x = np.random.default_rng(0).normal(size=(count, *network.shape)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, count)
    options: dict[str, Any] = {"batch_size": network.batch, "epochs": EPOCHS, "verbose": 0, "shuffle": False}
    history = model.fit(x, y, validation_data=(x, y), callbacks=[peaks] if planned else [], **options).history
    if planned is not None:
        planned.undo()
    left = [v.value.detach().numpy().tobytes() for v in (*model.variables, *model.optimizer.variables)]
    owners, names = (model, model.optimizer), ("call", "train_step", "compute_loss", "apply", "_parallel_update_step")
    hooks = [name for owner in owners for name in names if name in vars(owner)]
    hooks += [layer.name for layer in model._flatten_layers() if type(layer._call_signature) is not inspect.Signature]
    return {"history": history, "left": left, "hooks": hooks}, peaks


def warned(budget: str) -> tuple[list[str], int]:
    """Warnings about the update of an optimizer that clips all gradients at once, and the measured peak."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("checkmate.keras")
    log.addHandler(handler)
    _, peaks = trained(NETWORKS["dense"], budget, keras.optimizers.Adam(global_clipnorm=1.0))
    log.removeHandler(handler)
    torch._dynamo.reset()
    return said, max(peaks.bytes)


def clipped(budget: str) -> dict[str, Any]:
    """The warning under a budget, and whether there is one under the budget that it names."""
    said, measured = warned(budget)
    named = said[0].partition("to at least ")[2].partition(",")[0]
    again, _ = warned(named)
    return {"said": said, "named_bytes": parse_bytes(named), "measured_bytes": measured, "again": again}


def point(name: str, budget: str) -> dict[str, Any]:
    """Train a network within a budget, and plainly."""
    network = NETWORKS[name]
    found, peaks = trained(network, budget)
    result, step = coordinator().result, coordinator().step
    assert result is not None
    return {
        "hooks": found["hooks"],
        "equal": found == trained(network, None)[0],
        "graphs": 1 if step is None else len(step.graphs),
        "overhead": result.overhead,
        "budget_bytes": result.budget_bytes,
        "planned_bytes": result.peak_bytes,
        "measured_bytes": peaks.bytes,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, budget = sys.argv[1:]
    sys.stdout.write(f"RESULT {json.dumps(clipped(budget) if name == 'clipped' else point(name, budget))}\n")
