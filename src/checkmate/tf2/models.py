"""Checks that the training step of a model can be planned in this process."""

from __future__ import annotations

import keras
import tensorflow as tf

from checkmate.core.errors import CheckmateError, OptionError


class NotBuiltError(CheckmateError, ValueError):
    """A model that is not built: it has no variables yet."""


def check_model(model: keras.Model) -> None:
    """Check that a model is built and that its steps can be planned.

    Raises:
        NotBuiltError: The model has no variables yet.
        OptionError: As in `check_environment`.
    """
    check_environment(model)
    if not model.built:
        raise NotBuiltError(
            f"model {model.name!r} is not built: it has no variables yet",
            hint="call the model once on a batch, or call model.build(input_shape)",
        )


def check_environment(model: keras.Model) -> None:
    """Check that steps of a model, which need not be built yet, can be planned in this process.

    Raises:
        OptionError: The backend, a distribution strategy, eager mode or frozen weights rule it out.
    """
    if keras.config.backend() != "tensorflow":
        raise OptionError(
            f"Keras runs on {keras.config.backend()}, not on TensorFlow",
            hint="set the environment variable KERAS_BACKEND=tensorflow before Keras is imported; for torch use checkmate.torch",
        )
    if not isinstance(model, keras.Model):
        raise OptionError(
            f"model={type(model).__name__} is not a keras.Model",
            hint="pass a keras.Model; wrap layers in keras.Sequential",
        )
    if model.built and not model.trainable_variables:
        raise OptionError(
            f"model {model.name!r} has no trainable weights, so that a step would change nothing",
            hint="set `trainable = True` on the model or on some of its layers",
        )
    strategy = model.distribute_strategy
    if strategy is not tf.distribute.get_strategy():
        raise OptionError(
            f"model {model.name!r} was created in the scope of a {type(strategy).__name__}, and a step is planned for one device",
            hint="build and compile the model outside of `strategy.scope()`",
        )
    if tf.distribute.has_strategy():
        raise OptionError(
            "a step is planned for one device, and this call is inside the scope of a tf.distribute strategy",
            hint="make this call outside of `strategy.scope()`",
        )
    if tf.config.functions_run_eagerly():
        raise OptionError(
            "tf.config.run_functions_eagerly(True) is set, and only a graph can be planned",
            hint="call tf.config.run_functions_eagerly(False)",
        )
