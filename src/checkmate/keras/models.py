"""Checks that the steps of a model's `fit` can be planned."""

from __future__ import annotations

import keras

from checkmate.core.errors import OptionError

_BACKENDS = ("tensorflow", "torch")


def check_fit(model: keras.Model) -> None:
    """Check that the steps of a model's `fit` can be planned.

    Raises:
        OptionError: They cannot.
    """
    if keras.config.backend() not in _BACKENDS:
        raise OptionError(
            f"Keras runs on {keras.config.backend()}, and its steps can be planned on {' and '.join(_BACKENDS)}",
            hint="set the environment variable KERAS_BACKEND=tensorflow, or torch, before Keras is imported",
        )
    if not isinstance(model, keras.Model):
        raise OptionError(
            f"model={type(model).__name__} is not a keras.Model",
            hint="pass a keras.Model; wrap layers in keras.Sequential",
        )
    if not model.compiled or model.optimizer is None:
        raise OptionError(
            f"model {model.name!r} is not compiled with an optimizer, and a step applies one",
            hint="call model.compile(optimizer=..., loss=...) before fit_within(model, ...)",
        )
    if model.run_eagerly:
        raise OptionError(
            f"model {model.name!r} is compiled with run_eagerly=True, and only a graph can be planned",
            hint="compile the model without run_eagerly=True",
        )
    if not type(model).make_train_function.__module__.startswith("keras."):
        raise OptionError(
            f"the class {type(model).__name__} has its own make_train_function, which fit_within would replace",
            hint="remove it and write a train_step instead, which is planned as it is",
        )
