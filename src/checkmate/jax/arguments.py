"""Arguments of a user's function, split into the arrays that are traced and everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from checkmate.core.errors import GraphError

_HOLE = object()


@dataclass(frozen=True, slots=True, eq=False)
class Arguments:
    """The arguments of one call. Numbers of Python, functions, strings and the like stay as they are: only arrays are traced.

    Attributes:
        arrays: The arrays, tracers or `jax.ShapeDtypeStruct` among the leaves, in order.
        rest: The leaves, with a hole for each array.
        tree: The nest of positional and keyword arguments.
    """

    arrays: tuple[Any, ...]
    rest: tuple[Any, ...]
    tree: Any

    @classmethod
    def of(cls, positional: Sequence[Any], keywords: Mapping[str, Any]) -> Arguments:
        """The arguments of a call.

        Raises:
            GraphError: An array has a dimension of unknown size.
        """
        leaves, tree = jax.tree.flatten((tuple(positional), dict(keywords)))
        arrays = tuple(leaf for leaf in leaves if is_array(leaf))
        for array in arrays:
            if not all(isinstance(size, int) for size in array.shape):
                raise GraphError(
                    f"an argument has the shape {tuple(map(str, array.shape))}, and a plan needs the size of every dimension",
                    hint="plan for one size: pass arrays, or jax.ShapeDtypeStruct with numbers only",
                )
        return cls(arrays, tuple(_HOLE if is_array(leaf) else leaf for leaf in leaves), tree)

    def called_with(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments with other arrays.

        Args:
            arrays: One for each of `arrays`.
        """
        return jax.tree.unflatten(self.tree, filled(self.rest, arrays))


class FlatFunction:
    """A function of flat arrays that returns flat arrays; everything else that it returns is kept in `results`.

    Args:
        function: The user's function.
        arguments: Arguments of one call.
    """

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
        """The results of the last trace, with some arrays in place of those that were traced.

        Args:
            arrays: The arrays among the results.
        """
        return jax.tree.unflatten(self._tree, filled(self._rest, arrays))


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array, a tracer, or the shape and type of one."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


def filled(rest: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
    """Leaves whose holes are filled.

    Args:
        rest: The leaves.
        arrays: An array for each hole.
    """
    source = iter(arrays)
    return [next(source) if leaf is _HOLE else leaf for leaf in rest]
