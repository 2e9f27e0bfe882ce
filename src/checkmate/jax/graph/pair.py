"""A function together with its derivative, as one function of arguments and tangents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkmate.jax.graph.capture import Boundary
from checkmate.jax.graph.trace import Trace, flattened

Pure = Callable[..., list[Any]]
"""A function of flat arrays that closes over none."""


def is_inexact(array: Any) -> bool:
    """Whether an array, or the shape and type of one, can have a gradient."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


def derivative(pure: Pure, primals: Sequence[Any], wanted: Sequence[int]) -> tuple[list[Any], Callable[..., Any]]:
    """The results of a function, and the function that pulls their cotangents back to some of its arguments.

    Args:
        pure: The function.
        primals: Its arguments.
        wanted: Positions of the arguments whose gradients are computed.
    """

    def of_wanted(*some: Any) -> list[Any]:
        merged = list(primals)
        for i, value in zip(wanted, some, strict=True):
            merged[i] = value
        return pure(*merged)

    return jax.vjp(of_wanted, *(primals[i] for i in wanted))


def with_derivative(pure: Pure, wanted: Sequence[int]) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """A function that returns the results of another one, then the gradients of some of its arguments.

    Args:
        pure: The function.
        wanted: Positions of the arguments whose gradients are computed.

    Returns:
        A function of the arguments, and of the tangents of all results that can have one.
    """

    def pair(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        results, pull = derivative(pure, primals, wanted)
        remaining = iter(tangents)
        cotangents = [next(remaining) if is_inexact(r) else np.zeros(r.shape, jax.dtypes.float0) for r in results]
        return [*results, *pull(cotangents)]

    return pair


def trace_pair(pure: Pure, values: Sequence[Any], wanted: Sequence[int]) -> tuple[Trace, Boundary]:
    """Trace a function together with its derivative.

    Args:
        pure: The function.
        values: Its arguments, or their shapes and types.
        wanted: Positions of the arguments whose gradients are computed.
    """
    results = jax.eval_shape(pure, *values)
    tangents = [spec for spec in results if is_inexact(spec)]
    trace = flattened(jax.make_jaxpr(with_derivative(pure, wanted))(list(values), tangents))
    return trace, Boundary(results=len(results), tangents=trace.arguments[len(values) :])
