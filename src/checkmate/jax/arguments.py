"""Arguments of a user's function: arrays are traced, modules of Flax NNX can change in place, other arguments are constant.

For a whole step Python numbers are arrays too, as they are for `jax.jit`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkmate.core.errors import GraphError

_HOLE = object()
_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The arguments of one call. Only arrays are traced; functions, strings and the like stay as they are."""

    arrays: tuple[Any, ...]  # arrays, tracers or `jax.ShapeDtypeStruct` among the leaves, in order
    rest: tuple[Any, ...]  # the leaves, with a hole for each array
    tree: Any  # the nest of positional and keyword arguments

    @classmethod
    def of(cls, positional: Sequence[Any], keywords: Mapping[str, Any], *, trace_numbers: bool = False) -> Arguments:
        """The arguments of a call. If `trace_numbers`, each Python number is an array of JAX's weak type.

        Raises:
            GraphError: An array has a dimension of unknown size.
        """
        leaves, tree = jax.tree.flatten((tuple(positional), dict(keywords)))
        if trace_numbers:
            leaves = [jnp.asarray(leaf) if isinstance(leaf, _NUMBERS) else leaf for leaf in leaves]
        arrays = tuple(leaf for leaf in leaves if is_array(leaf))
        for array in arrays:
            if not all(isinstance(size, int) for size in array.shape):
                raise GraphError(
                    f"an argument has the shape {tuple(map(str, array.shape))}, and a plan needs the size of every dimension",
                    hint="plan for one size: pass arrays, or jax.ShapeDtypeStruct with numbers only",
                )
        return cls(arrays, tuple(_HOLE if is_array(leaf) else leaf for leaf in leaves), tree)

    @property
    def weak(self) -> tuple[bool, ...]:
        """Whether each array has JAX's weak type, which yields to the types of other operands."""
        return tuple(getattr(array, "weak_type", False) for array in self.arrays)

    def called_with(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with other arrays."""
        return jax.tree.unflatten(self.tree, _filled(self.rest, arrays))


class FlatFunction:
    """A user's function as a function from flat arrays to flat arrays; `results` restores the other values that it returns."""

    def __init__(self, function: Callable[..., Any], arguments: Arguments) -> None:
        self._function, self._arguments = function, arguments
        self._rest: tuple[Any, ...] = ()
        self._tree: Any = None

    def __call__(self, *arrays: Any) -> list[Any]:
        """The arrays among the results."""
        positional, keywords = self._arguments.called_with(arrays)
        leaves, self._tree = jax.tree.flatten(self._function(*positional, **keywords))
        self._rest = tuple(_HOLE if is_array(leaf) else leaf for leaf in leaves)
        return [leaf for leaf, rest in zip(leaves, self._rest, strict=True) if rest is _HOLE]

    def results(self, arrays: Sequence[Any]) -> Any:
        """The results of the last trace, with `arrays` in place of the traced ones."""
        return jax.tree.unflatten(self._tree, _filled(self._rest, arrays))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, a tracer, or the shape and type of one."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def has_numbers(arguments: Any) -> bool:
    """Whether a nest has Python numbers among its leaves."""
    return any(isinstance(leaf, _NUMBERS) and not is_array(leaf) for leaf in jax.tree.leaves(arguments))


def _filled(rest: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    source = iter(arrays)
    return [next(source) if leaf is _HOLE else leaf for leaf in rest]


def has_modules(arguments: Any) -> bool:
    """Whether a nest has modules or variables of Flax NNX. A state that `nnx.split` returned is data, as for `jax.jit`."""
    return "flax.nnx" in sys.modules and any(map(_is_module, jax.tree.leaves(arguments, is_leaf=_is_whole)))


def call_with_modules(
    transformed: Callable[[Callable[..., Any]], Callable[..., Any]],
    function: Callable[..., Any],
    positional: Sequence[Any],
    keywords: Mapping[str, Any],
) -> Any:
    """Call a transformed function, and apply its changes to the modules among the arguments.

    Only variables that the function changes are results of the transformed function: every result has a cotangent and a buffer.
    """
    from flax import nnx

    leaves, tree = jax.tree.flatten((tuple(positional), dict(keywords)), is_leaf=_is_whole)
    modules = [leaf for leaf in leaves if _is_module(leaf)]
    others = [None if _is_module(leaf) else leaf for leaf in leaves]
    # The modules are split together, to keep a variable that two modules share as one.
    definition, state = nnx.split(modules)

    def pure(state: Any, others: Sequence[Any]) -> tuple[Any, Any]:
        before = {path: jax.tree.leaves(variable) for path, variable in nnx.to_flat_state(state)}  # the function may change them
        inside = nnx.merge(definition, state)
        remaining = iter(inside)
        merged = [next(remaining) if _is_module(leaf) else other for leaf, other in zip(leaves, others, strict=True)]
        arguments, named = jax.tree.unflatten(tree, merged)
        result = function(*arguments, **named)
        after = [(path, variable, jax.tree.leaves(variable)) for path, variable in nnx.to_flat_state(nnx.state(inside))]
        changed = [(path, v) for path, v, new in after if list(map(id, new)) != list(map(id, before.get(path, ())))]
        return result, nnx.from_flat_state(changed)

    result, changed = transformed(pure)(state, others)
    if jax.tree.leaves(changed):
        nnx.update(modules, changed)
    return result


def _is_module(leaf: Any) -> bool:
    from flax import nnx

    return isinstance(leaf, (nnx.Module, nnx.Rngs, nnx.Variable, nnx.Optimizer))


def _is_whole(leaf: Any) -> bool:
    from flax import nnx

    return _is_module(leaf) or isinstance(leaf, nnx.State)
