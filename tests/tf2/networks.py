"""Small real networks, built from configurations with random weights; the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers


@dataclass(frozen=True)
class Case:
    """A model and how it is trained."""

    model: Callable[[], keras.Model]
    inputs: Callable[[int], Any]
    labels: Callable[[int], Any]
    batch: int
    loss: Any = "sparse_categorical_crossentropy"
    optimizer: Callable[[], Any] = lambda: keras.optimizers.Adam(1e-3)


def vgg19() -> keras.Model:
    return keras.applications.vgg19.VGG19(weights=None, input_shape=(32, 32, 3), classes=10)


def resnet50() -> keras.Model:
    return keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)


def mobilenet() -> keras.Model:
    return keras.applications.MobileNet(weights=None, input_shape=(64, 64, 3), classes=10)


def unet() -> keras.Model:
    def block(x: Any, width: int) -> Any:
        for _ in range(2):
            x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(x)))
        return x

    x = inputs = keras.Input((48, 48, 3))
    skips = []
    for width in (8, 16, 32):
        x = block(x, width)
        skips.append(x)
        x = layers.MaxPooling2D()(x)
    x = layers.Dropout(0.2)(block(x, 64))
    for width, skip in zip((32, 16, 8), reversed(skips), strict=True):
        x = layers.Concatenate()([layers.UpSampling2D()(x), skip])
        x = block(x, width)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x), name="unet")


def transformer() -> keras.Model:
    ids = keras.Input((64,), dtype="int32")
    x = layers.Embedding(200, 64)(ids)
    for _ in range(3):
        normed = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(4, 16, dropout=0.1)(normed, normed, use_causal_mask=True)
        hidden = layers.Dense(256, activation="gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dropout(0.1)(layers.Dense(64)(hidden))
    return keras.Model(ids, layers.Dense(200, activation="softmax")(x), name="transformer")


def dropout() -> keras.Model:
    x = inputs = keras.Input((128,))
    for _ in range(6):
        x = layers.Dropout(0.3)(layers.Dense(256, activation="relu", kernel_regularizer="l2")(x))
    return keras.Model(inputs, layers.Dense(10, activation="softmax")(x), name="dropout")


def _images(size: int) -> Callable[[int], Any]:
    return lambda batch: np.random.default_rng(0).normal(size=(batch, size, size, 3)).astype("float32")


def _classes(batch: int) -> Any:
    return np.random.default_rng(1).integers(0, 10, batch)


CASES: dict[str, Case] = {
    "vgg19": Case(vgg19, _images(32), _classes, 64, optimizer=lambda: keras.optimizers.SGD(0.01, momentum=0.9)),
    "resnet50": Case(resnet50, _images(64), _classes, 16, optimizer=lambda: keras.optimizers.SGD(0.01, momentum=0.9)),
    "mobilenet": Case(mobilenet, _images(64), _classes, 16),
    "unet": Case(
        unet,
        _images(48),
        lambda batch: (np.random.default_rng(1).random((batch, 48, 48, 1)) > 0.5).astype("float32"),
        32,
        loss="binary_crossentropy",
        optimizer=lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.01),
    ),
    "transformer": Case(
        transformer,
        lambda batch: np.random.default_rng(0).integers(0, 200, (batch, 64)).astype("int32"),
        lambda batch: np.random.default_rng(1).integers(0, 200, (batch, 64)),
        32,
        optimizer=lambda: keras.optimizers.Adam(1e-3, global_clipnorm=1.0),
    ),
    "dropout": Case(dropout, lambda batch: np.random.default_rng(0).normal(size=(batch, 128)).astype("float32"), _classes, 4096),
}


def build(name: str) -> tuple[keras.Model, Any, Any, Any, Any]:
    """Model, loss, optimizer, inputs and labels of a case."""
    case = CASES[name]
    keras.utils.set_random_seed(0)
    return case.model(), case.loss, case.optimizer(), case.inputs(case.batch), case.labels(case.batch)
