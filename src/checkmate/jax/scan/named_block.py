"""The body of a loop over layers with names for its values, by which policies of `jax.checkpoint` save them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from checkmate.jax._compat import bind, traced_as
from checkmate.jax.arguments import Arguments, FlatFunction
from checkmate.jax.graph.pair import is_inexact
from checkmate.jax.graph.trace import Equation, Trace, flattened, result

NAME = "name"
"""The primitive that gives a value a name."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The body of a loop, and who names its values.

    Attributes:
        block: The body.
        own: Whether values have the names that the body gives them. Otherwise all values have names, and those of the body are
            left out.
    """

    block: Callable[..., Any]
    own: bool

    def with_names(self, names: Sequence[str] | None) -> Callable[..., Any]:
        """The body with some names attached.

        Args:
            names: The names; None for all.
        """
        return self.block if self.own else NamedBlock(self.block, names)

    def trace(self, closed: Any) -> NamedTrace:
        """The body as it was traced, to be run with values that are saved.

        Args:
            closed: What `jax.make_jaxpr` returned for the flat body.
        """
        # Calls with derivatives of the user's stay calls: this is differentiated later.
        return NamedTrace(flattened(closed, differentiable=True), None if self.own else _prefix(self.block))


class NamedBlock:
    """The body of a loop, in which values have names. Names that the body itself gives are left out.

    Args:
        block: The body.
        names: The names, of the order in which values are traced; None for all that can be saved.
    """

    def __init__(self, block: Callable[..., Any], names: Sequence[str] | None) -> None:
        self._block, self._names = block, None if names is None else frozenset(names)
        functools.update_wrapper(self, block)

    def __call__(self, carry: Any, x: Any) -> Any:
        """Call the body.

        Args:
            carry: The carry.
            x: The slice of this iteration.
        """
        arguments = Arguments.of((carry, x), {})
        flat = FlatFunction(self._block, arguments)
        named = Naming(self._block, own=False).trace(jax.make_jaxpr(flat)(*arguments.arrays))
        return flat.results(named.run(list(named.trace.constants.values()), arguments.arrays, (), name=self._named)[0])

    def _named(self, name: str, value: Any) -> Any:
        wanted = is_inexact(value) if self._names is None else name in self._names
        return checkpoint_name(value, name) if wanted else value


class NamedTrace:
    """A traced body whose values have names.

    Args:
        trace: The body, as a function of flat arrays.
        prefix: What names begin with, before the number of a value; None if the body names values itself.
    """

    def __init__(self, trace: Trace, prefix: str | None) -> None:
        self.trace, self._prefix = trace, prefix

    def numbers(self, names: Sequence[str]) -> tuple[int, ...]:
        """Numbers of the values that have one of some names.

        Args:
            names: The names.
        """
        if self._prefix is not None:
            return tuple(int(name.removeprefix(self._prefix)) for name in names)
        return tuple(e.outputs[0] for e in self.trace.equations if e.kind == NAME and e.eqn.params["name"] in names)

    def run(
        self,
        constants: Sequence[Any],
        arrays: Sequence[Any],
        kept: Sequence[int],
        known: Mapping[int, Any] | None = None,
        *,
        name: Callable[[str, Any], Any] = lambda name, value: value,
    ) -> tuple[list[Any], list[Any]]:
        """The results of the body, and some of its values.

        Args:
            constants: A value for each of its constants.
            arrays: Its arguments.
            kept: Numbers of the values to return.
            known: Values that are there, and are not computed again; derivatives of all values are.
            name: Attaches its name to a value.
        """
        trace = self.trace
        values = dict(zip(trace.arguments, arrays, strict=True)) | dict(zip(trace.constants, constants, strict=True))
        known = known or {}
        for equation in trace.equations:
            inputs = [values[v] if isinstance(v, int) else v.val for v in equation.inputs]
            outputs = inputs if equation.kind == NAME else self._named(equation, bind(equation.eqn, inputs), name)
            for v, value in zip(equation.outputs, outputs, strict=True):
                values[v] = _in_place_of(value, known[v]) if v in known else value
        return [result(values, v) for v in trace.results], [values[v] for v in kept]

    def _named(self, equation: Equation, outputs: Sequence[Any], name: Callable[[str, Any], Any]) -> list[Any]:
        with traced_as(equation.eqn):
            return [name(f"{self._prefix}{v}", value) for v, value in zip(equation.outputs, outputs, strict=True)]


@jax.custom_jvp
def _in_place_of(computed: jax.Array, known: jax.Array) -> jax.Array:
    """A value that is known, with the derivative of the one that is computed, which nothing then reads."""
    del computed
    return known


@_in_place_of.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[1], tangents[0]


def _prefix(block: Callable[..., Any]) -> str:
    return f"{getattr(block, '__name__', 'block')}."
