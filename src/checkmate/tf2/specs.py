"""Specifications (shape and type) of a batch, from samples or `tf.TensorSpec`, and the check of batches against them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from checkmate.core.errors import OptionError

ARGUMENTS = ("input_spec", "label_spec", "sample_weight_spec")
"""Names of the specifications of the arguments of a step."""


def specs_of(sample: Any, name: str, *, closed: bool = False) -> Any:
    """A nest of `tf.TensorSpec` from a nest of tensors, arrays or specifications.

    The name of the argument is for messages. With ``closed`` shapes may have no open dimensions, as in a graph.
    """
    specs = tf.nest.map_structure(lambda leaf: _spec(leaf, name), sample)
    for spec in tf.nest.flatten(specs) if closed else ():
        if not spec.shape.is_fully_defined():
            raise OptionError(
                f"{name} has the shape {spec.shape}, and a graph needs a shape without open dimensions",
                hint=f"pass a sample batch as {name}, or a tf.TensorSpec with a batch size",
            )
    return specs


def flat_batch(specs: Sequence[Any], arguments: Sequence[Any]) -> list[tf.Tensor]:
    """The tensors of a batch, flat: inputs, labels, and weights of samples if there are any.

    There is a nest of specifications for each argument. Only the first dimension of a tensor may differ from its specification.
    """
    flat: list[tf.Tensor] = []
    for argument, spec, given in zip(ARGUMENTS, specs, arguments, strict=False):
        name = argument.removesuffix("_spec")
        try:
            tf.nest.assert_same_structure(spec, given)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"the structure of the {name} differs from that of {argument}: {str(error).splitlines()[0]}",
                hint=f"pass the {name} in the structure of {argument}: a tensor, or the same list, tuple or mapping of tensors",
            ) from error
        wanted = tf.nest.flatten(spec)
        flat += [_tensor(name, s, g) for s, g in zip(wanted, tf.nest.flatten(given), strict=True)]
    return flat


def sample_batch(specs: Sequence[Any], samples: Sequence[Any]) -> list[tf.Tensor] | None:
    """The samples that the specifications were made from, as flat tensors; None if some are specifications themselves."""
    leaves = tf.nest.flatten(samples)
    if any(isinstance(leaf, tf.TensorSpec) or not hasattr(leaf, "__array__") for leaf in leaves):
        return None
    return flat_batch(specs, samples)


def _spec(leaf: Any, name: str) -> tf.TensorSpec:
    if leaf is None:
        raise OptionError(f"{name} is None", hint=f"pass a sample batch as {name}, or its tf.TensorSpec")
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    try:
        spec = tf.TensorSpec(leaf.shape, leaf.dtype)
    except TypeError as error:
        raise OptionError(
            f"{name}={leaf!r} is neither a tensor nor a specification", hint=f"pass a sample batch as {name}, or a tf.TensorSpec"
        ) from error
    _refuse_empty(name, spec.shape)
    return spec


def _tensor(name: str, spec: tf.TensorSpec, given: Any) -> tf.Tensor:
    if given is None:
        raise OptionError(f"the {name} is None, and {name}_spec is {spec.shape}", hint=f"pass a batch of {name}s")
    try:
        tensor = tf.convert_to_tensor(given, spec.dtype)
    except (TypeError, ValueError) as error:
        have = getattr(getattr(given, "dtype", None), "name", type(given).__name__)
        raise OptionError(
            f"the {name} is {have}, and {name}_spec says {spec.dtype.name}", hint=f"cast the {name} to {spec.dtype.name}"
        ) from error
    if spec.shape.rank not in (None, tensor.shape.rank) or not spec.shape[1:].is_compatible_with(tensor.shape[1:]):
        raise OptionError(
            f"the {name} has the shape {tensor.shape}, and the step is for {spec.shape}: only the batch size may differ",
            hint=f"compile another step with {name}_spec of the shape {tensor.shape}",
        )
    _refuse_empty(name, tensor.shape)
    return tensor


def _refuse_empty(name: str, shape: tf.TensorShape) -> None:
    """Refuse a batch without samples, whose mean loss is NaN."""
    if shape.rank is not None and 0 in shape.as_list():
        raise OptionError(f"{name} has the shape {shape}, which holds nothing", hint="leave out batches without samples")
