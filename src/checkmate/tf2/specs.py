"""Specifications (shape and type) of a batch, from samples or `tf.TensorSpec`, and the check of batches against them."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from checkmate.core.errors import OptionError


def specs_of(sample: Any, name: str) -> Any:
    """A nest of `tf.TensorSpec` from a nest of samples or specifications.

    Args:
        sample: Tensors, arrays or `tf.TensorSpec`, or lists, tuples and mappings of them.
        name: Name of the argument, for messages.

    Raises:
        OptionError: A dimension is open, or an element is neither a tensor nor a specification.
    """
    return tf.nest.map_structure(lambda leaf: _spec(leaf, name), sample)


def flat_batch(specs: Any, inputs: Any, labels: Any) -> list[tf.Tensor]:
    """The tensors of a batch, flat: inputs, then labels.

    Args:
        specs: Pair of nests of `tf.TensorSpec`: inputs and labels.
        inputs: Inputs of the batch.
        labels: Labels of the batch.

    Raises:
        OptionError: The structure, a type or a shape differs from the specification; only the first dimension may differ.
    """
    flat: list[tf.Tensor] = []
    for name, spec, given in (("input", specs[0], inputs), ("label", specs[1], labels)):
        try:
            tf.nest.assert_same_structure(spec, given)
        except (TypeError, ValueError) as error:
            raise OptionError(
                f"the structure of the {name} differs from that of {name}_spec: {str(error).splitlines()[0]}",
                hint=f"pass the {name} in the structure of {name}_spec: a tensor, or the same list, tuple or mapping of tensors",
            ) from error
        wanted = tf.nest.flatten(spec)
        flat += [_tensor(name, s, g) for s, g in zip(wanted, tf.nest.flatten(given), strict=True)]
    return flat


def sample_batch(specs: Any, inputs: Any, labels: Any) -> list[tf.Tensor] | None:
    """The samples that the specifications were made from, as flat tensors; None if some are specifications themselves."""
    leaves = [*tf.nest.flatten(inputs), *tf.nest.flatten(labels)]
    if any(isinstance(leaf, tf.TensorSpec) or not hasattr(leaf, "__array__") for leaf in leaves):
        return None
    return flat_batch(specs, inputs, labels)


def specs_like(specs: Any, flat: list[tf.Tensor]) -> Any:
    """The specification of a flat batch.

    Args:
        specs: Specification of the same structure.
        flat: The tensors: inputs, then labels.
    """
    return tf.nest.pack_sequence_as(specs, [tf.TensorSpec(t.shape, t.dtype) for t in flat])


def _spec(leaf: Any, name: str) -> tf.TensorSpec:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    try:
        spec = tf.TensorSpec(leaf.shape, leaf.dtype)
    except TypeError as error:
        raise OptionError(
            f"{name}={leaf!r} is neither a tensor nor a specification", hint=f"pass a sample batch as {name}, or a tf.TensorSpec"
        ) from error
    if not spec.shape.is_fully_defined():
        raise OptionError(
            f"{name} has the shape {spec.shape}, and a plan needs a shape without open dimensions",
            hint=f"pass a sample batch as {name}, or a tf.TensorSpec with a batch size; others are planned at their first call",
        )
    return spec


def _tensor(name: str, spec: tf.TensorSpec, given: Any) -> tf.Tensor:
    try:
        tensor = tf.convert_to_tensor(given, spec.dtype)
    except (TypeError, ValueError) as error:
        have = getattr(getattr(given, "dtype", None), "name", type(given).__name__)
        raise OptionError(
            f"the {name} is {have}, and {name}_spec says {spec.dtype.name}", hint=f"cast the {name} to {spec.dtype.name}"
        ) from error
    if tensor.shape.rank != spec.shape.rank or tensor.shape[1:] != spec.shape[1:]:
        raise OptionError(
            f"the {name} has the shape {tensor.shape}, and the step is for {spec.shape}: only the batch size may differ",
            hint=f"compile another step with {name}_spec of the shape {tensor.shape}",
        )
    return tensor
