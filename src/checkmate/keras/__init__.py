"""Keras: `model.fit` within a memory budget.

Examples:
    >>> import keras
    >>> import numpy as np
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    >>> model.compile(optimizer="sgd", loss="mse")
    >>> planned = fit_within(model, "1GiB")
    >>> history = model.fit(np.ones((6, 4)), np.zeros((6, 2)), batch_size=4, verbose=0)
    >>> [result.overhead for result in planned.results]
    [1.0, 1.0]
"""

from __future__ import annotations

from importlib.util import find_spec

from checkmate.core.errors import MissingExtraError

if find_spec("keras") is None:
    raise MissingExtraError("checkmate.keras needs Keras 3, which is not installed", hint='pip install "checkmate-remat[tf2]"')

from checkmate.keras.fit import PlannedFit, capture, fit_within

__all__ = ["PlannedFit", "capture", "fit_within"]
