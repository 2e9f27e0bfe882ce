"""The values that the derivative of a layer reads: those to save if nothing is to be computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from checkmate.jax.graph.trace import Source, flattened, result
from checkmate.jax.scan.named_block import NAME

Derivative = Callable[[Sequence[Any]], Callable[..., Any]]
"""Gives, for the arguments of a layer, the function that pulls cotangents back, as `jax.vjp` does."""


class Residuals:
    """The values that a pullback closes over: arguments, values that depend on them, and values that are the same in every layer.

    Only the second kind is saved. The others are there, or made of constants again, such as masks: saved by every layer of a
    loop, they would take a fifth more bytes.

    Args:
        derivative: Gives the pullback of a layer.
        given: The arguments of the layer.
    """

    def __init__(self, derivative: Derivative, given: Sequence[Any]) -> None:
        self._tree: Any = None

        def leaves_of(*given: Any) -> list[Any]:
            leaves, self._tree = jax.tree.flatten(derivative(given))
            return leaves

        self._trace = flattened(jax.make_jaxpr(leaves_of)(*given))
        self._depending = set(self._trace.arguments)
        for equation in self._trace.equations:
            if not self._depending.isdisjoint(equation.read):
                self._depending.update(equation.outputs)
        unnamed: dict[int, Source] = {}
        for equation in self._trace.equations:
            if equation.kind == NAME:
                (source,) = equation.inputs
                unnamed[equation.outputs[0]] = unnamed.get(source, source) if isinstance(source, int) else source
        self._results = [v if not isinstance(v, int) else unnamed.get(v, v) for v in self._trace.results]
        arguments = self._trace.arguments
        numbers = [v for v in self._results if isinstance(v, int)]
        self._saved = list(dict.fromkeys(v for v in numbers if v in self._depending and v not in arguments))

    @property
    def saved_bytes(self) -> int:
        """Bytes of the values to save."""
        return sum(map(self._trace.size_bytes, self._saved))

    def of(self, pull: Any) -> list[Any]:
        """The values of a pullback to save.

        Args:
            pull: A pullback of the same layer.
        """
        leaves = zip(self._results, jax.tree.leaves(pull), strict=True)
        by_number = {v: leaf for v, leaf in leaves if isinstance(v, int)}
        return [by_number[v] for v in self._saved]

    def pullback(self, saved: Sequence[Any], given: Sequence[Any]) -> Callable[..., Any]:
        """The pullback of values that were saved.

        Args:
            saved: What `of` returned.
            given: The arguments of the layer.
        """
        trace = self._trace
        values = (
            dict(trace.constants) | dict(zip(trace.arguments, given, strict=True)) | dict(zip(self._saved, saved, strict=True))
        )
        for equation in trace.equations:
            if self._depending.isdisjoint(equation.outputs):
                values.update(equation.computed(values))
        return jax.tree.unflatten(self._tree, [result(values, v) for v in self._results])
