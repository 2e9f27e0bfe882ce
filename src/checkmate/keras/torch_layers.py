"""Layers of Keras in a form that Dynamo traces without a graph break."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import keras
import torch
from keras.src.backend import torch as torch_backend
from keras.src.utils import backend_utils

from checkmate.keras.replaced import Replaced


class _Signature(inspect.Signature):
    """A signature whose parameters are a dict."""

    def __init__(self, like: inspect.Signature) -> None:
        super().__init__(list(like.parameters.values()), return_annotation=like.return_annotation)
        self._by_name = dict(like.parameters)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:  # type: ignore[override]
        """The parameters by name."""
        return self._by_name


class _Backend(backend_utils.DynamicBackend):
    """The functions that a layer calls, by its tensors; those of torch without an import, which Dynamo cannot trace."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch_backend, name) if self._backend == "torch" else super().__getattr__(name)


def make_traceable(model: keras.Model, replaced: Replaced) -> None:
    """Replace what Dynamo cannot trace in the layers of a model by equal values that it can.

    Each `BatchNormalization` broke the graph twice. MobileNet was then 40 graphs and more, until Dynamo reached its limit of 8
    compilations for one function and ran the rest without a plan; now it is one graph.

    - A list of axes that Keras wraps in its ``TrackedList`` is no argument of an op for Dynamo (its message gb0055).
    - ``Layer.__call__`` binds its arguments by the layer's signature, whose parameters are a mapping proxy. Dynamo does not read
      one after any dict was changed (gb0198), and a layer that updates its statistics changes one.
    - Layers that can also run in a data set, such as `Rescaling`, ask TensorFlow in each call whether it builds a graph, where it
      was imported (gb0007), and import the functions that they use. MobileNetV3 has one.

    Args:
        model: The model, which is built.
        replaced: Takes note of what was replaced.
    """
    torch._dynamo.assume_constant_result(backend_utils.in_tf_graph)
    for layer in model._flatten_layers():
        for name, value in list(vars(layer).items()):
            if isinstance(value, list) and type(value) is not list and value and all(isinstance(item, int) for item in value):
                replaced.put(layer, name, list(value))
        if type(vars(layer).get("backend")) is backend_utils.DynamicBackend:
            replaced.put(layer, "backend", _Backend(layer.backend.name))
        signature: Any = vars(layer).get("_call_signature")
        if isinstance(signature, inspect.Signature):
            replaced.put(layer, "_call_signature", _Signature(signature))
