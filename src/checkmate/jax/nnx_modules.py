"""Modules of Flax NNX among the arguments of a function, which it changes in place, such as the statistics of BatchNorm."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def has_modules(arguments: Any) -> bool:
    """Whether a nest has modules or variables of Flax NNX."""
    return "flax.nnx" in sys.modules and any(map(_is_module, jax.tree.leaves(arguments, is_leaf=_is_module)))


def call_with_modules(
    transformed: Callable[[Callable[..., Any]], Callable[..., Any]],
    function: Callable[..., Any],
    positional: Sequence[Any],
    keywords: Mapping[str, Any],
) -> Any:
    """Call a transformed function that changes modules, and change the modules as it does.

    Args:
        transformed: A transformation of functions of arrays.
        function: The function.
        positional: Its arguments, with modules among them.
        keywords: The same.
    """
    from flax import nnx

    leaves, tree = jax.tree.flatten((tuple(positional), dict(keywords)), is_leaf=_is_module)
    modules = [leaf for leaf in leaves if _is_module(leaf)]
    others = [None if _is_module(leaf) else leaf for leaf in leaves]
    # Split together, so that a variable that two modules share stays one.
    definition, state = nnx.split(modules)

    def pure(state: Any, others: Sequence[Any]) -> tuple[Any, Any]:
        inside = nnx.merge(definition, state)
        remaining = iter(inside)
        merged = [next(remaining) if _is_module(leaf) else other for leaf, other in zip(leaves, others, strict=True)]
        arguments, named = jax.tree.unflatten(tree, merged)
        result = function(*arguments, **named)
        return result, nnx.state(inside)

    result, changed = transformed(pure)(state, others)
    nnx.update(modules, changed)
    return result


def _is_module(leaf: Any) -> bool:
    from flax import nnx

    return isinstance(leaf, (nnx.Module, nnx.Rngs, nnx.Variable, nnx.Optimizer))
