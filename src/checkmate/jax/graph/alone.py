"""Ops that stand alone between barriers, so that XLA compiles each to the same instructions whatever is around it.

The reasons are in docs/decisions/0010.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from checkmate.jax._compat import varying_axes
from checkmate.jax.graph.trace import result, trace_flat


def behind_barriers(values: Mapping[int, Any], numbers: Sequence[int]) -> dict[int, Any]:
    """Some values behind a barrier, so that XLA fuses what reads them with nothing before it.

    In `jax.shard_map` a barrier makes all its outputs differ along the axes along which one of its inputs does. There is one
    barrier for each set of axes.

    Args:
        values: Values by their numbers.
        numbers: Those to put behind a barrier.
    """
    by_axes: dict[frozenset[str], list[int]] = {}
    for v in numbers:
        by_axes.setdefault(varying_axes(values[v]), []).append(v)
    found: dict[int, Any] = {}
    for some in by_axes.values():
        found.update(zip(some, jax.lax.optimization_barrier(tuple(values[v] for v in some)), strict=True))
    return found


def each_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that computes the same, each equation alone.

    Args:
        function: A function of nests of arrays.
    """

    def run(*arguments: Any) -> Any:
        given, nest = jax.tree.flatten(arguments)
        answer: Any = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal answer
            leaves, answer = jax.tree.flatten(function(*jax.tree.unflatten(nest, arrays)))
            return leaves

        trace = trace_flat(flat, *given)
        values = dict(zip(trace.arguments, given, strict=True)) | dict(trace.constants)
        for equation in trace.equations:
            values.update(equation.computed(behind_barriers(values, equation.read)))
        numbers = dict.fromkeys(v for v in trace.results if isinstance(v, int))
        values.update(behind_barriers(values, list(numbers)))
        return jax.tree.unflatten(answer, [result(values, v) for v in trace.results])

    return run
