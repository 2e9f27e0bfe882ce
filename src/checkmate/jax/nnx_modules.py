"""Modules of Flax NNX among the arguments of a function, which it changes in place, such as the statistics of BatchNorm."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def has_modules(arguments: Any) -> bool:
    """Whether a nest has modules or variables of Flax NNX. A state that `nnx.split` returned is data, as for `jax.jit`."""
    return "flax.nnx" in sys.modules and any(map(_is_module, jax.tree.leaves(arguments, is_leaf=_is_whole)))


def call_with_modules(
    transformed: Callable[[Callable[..., Any]], Callable[..., Any]],
    function: Callable[..., Any],
    positional: Sequence[Any],
    keywords: Mapping[str, Any],
) -> Any:
    """Call a transformed function that changes modules, and change the modules as it does.

    Only what the function changes is a result of the transformed function: every result has a cotangent and a buffer.

    Args:
        transformed: A transformation of functions of arrays.
        function: The function.
        positional: Its arguments, with modules among them.
        keywords: The same.
    """
    from flax import nnx

    leaves, tree = jax.tree.flatten((tuple(positional), dict(keywords)), is_leaf=_is_whole)
    modules = [leaf for leaf in leaves if _is_module(leaf)]
    others = [None if _is_module(leaf) else leaf for leaf in leaves]
    # Split together, so that a variable that two modules share stays one.
    definition, state = nnx.split(modules)

    def pure(state: Any, others: Sequence[Any]) -> tuple[Any, Any]:
        before = _values(state)  # the function may change these very variables
        inside = nnx.merge(definition, state)
        remaining = iter(inside)
        merged = [next(remaining) if _is_module(leaf) else other for leaf, other in zip(leaves, others, strict=True)]
        arguments, named = jax.tree.unflatten(tree, merged)
        result = function(*arguments, **named)
        return result, _changes(before, nnx.state(inside))

    result, changed = transformed(pure)(state, others)
    if jax.tree.leaves(changed):
        nnx.update(modules, changed)
    return result


def _values(state: Any) -> dict[Any, list[Any]]:
    """The arrays of each variable, by its path."""
    from flax import nnx

    return {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(state)}


def _changes(before: Mapping[Any, Sequence[Any]], state: Any) -> Any:
    """The variables of a state whose arrays are not the very ones that they were before."""
    from flax import nnx

    after = _values(state)
    kept = {p for p, new in after.items() if len(new) == len(old := before.get(p, ())) and all(map(operator.is_, new, old))}
    return nnx.from_flat_state([(path, variable) for path, variable in nnx.to_flat_state(state) if path not in kept])


def _is_module(leaf: Any) -> bool:
    from flax import nnx

    return isinstance(leaf, (nnx.Module, nnx.Rngs, nnx.Variable, nnx.Optimizer))


def _is_whole(leaf: Any) -> bool:
    from flax import nnx

    return _is_module(leaf) or isinstance(leaf, nnx.State)
