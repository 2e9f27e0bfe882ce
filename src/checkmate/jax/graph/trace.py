"""A traced function as one flat list of equations, with calls inlined and without what no result needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from checkmate.jax._compat import as_array, bind, opened

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
"""Primitives that only call a jaxpr, and the parameter that has it."""

_WITH_RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr"}
"""Primitives that call a jaxpr which has a derivative of the user's."""

Source = int | Literal
"""Input of an equation: a value by its number, or a constant that is written in the equation."""


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One equation of a trace.

    Attributes:
        eqn: The equation as JAX traced it; its own variables are not used.
        inputs: What it reads.
        outputs: Numbers of the values that it writes.
    """

    eqn: Any
    inputs: tuple[Source, ...]
    outputs: tuple[int, ...]

    @property
    def kind(self) -> str:
        """Name of its primitive, such as ``dot_general``."""
        return self.eqn.primitive.name

    @property
    def read(self) -> tuple[int, ...]:
        """Numbers of the values that it reads, each once."""
        return tuple(dict.fromkeys(v for v in self.inputs if isinstance(v, int)))

    def computed(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Its outputs by their numbers, for the values that it reads."""
        inputs = [values[v] if isinstance(v, int) else v.val for v in self.inputs]
        return dict(zip(self.outputs, bind(self.eqn, inputs), strict=True))


def result(values: Mapping[int, Any], source: Source) -> Any:
    """A result of a trace, as an array also where it is written in the program."""
    return values[source] if isinstance(source, int) else as_array(source.val, source.aval)


def types_from_outside(chain: Sequence[Equation]) -> dict[int, Any]:
    """Shape and type of each value that a chain of equations reads and does not make, by its number."""
    made = {v for equation in chain for v in equation.outputs}
    read = [(s, v.aval) for e in chain for v, s in zip(e.eqn.invars, e.inputs, strict=True) if isinstance(s, int)]
    return {number: aval for number, aval in read if number not in made}


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A traced function. Its values are numbered; each is an argument, a constant or an output of one equation.

    Attributes:
        arguments: Numbers of the flat arguments.
        constants: Constants by their numbers.
        equations: The equations, in an order in which they can run.
        results: What the function returns, flat.
        types: Shape and type of each value.
    """

    arguments: tuple[int, ...]
    constants: Mapping[int, Any]
    equations: tuple[Equation, ...]
    results: tuple[Source, ...]
    types: Sequence[Any]

    def size_bytes(self, value: int) -> int:
        """Bytes of a value."""
        return type_bytes(self.types[value])


def trace_flat(function: Callable[..., Any], *arguments: Any) -> Trace:
    """Trace a function and flatten the result.

    Args:
        function: A function of arrays and nests of arrays.
        arguments: Arrays, tracers, or `jax.ShapeDtypeStruct`, in the same nests.
    """
    return flattened(jax.make_jaxpr(function)(*arguments))


def flattened(closed: Any, *, differentiable: bool = False) -> Trace:
    """The equations of a jaxpr with all calls inlined, without those that no result and no effect needs, and each but once.

    Args:
        closed: A jaxpr, as `jax.make_jaxpr` returns it.
        differentiable: Whether calls of functions with a derivative of the user's stay calls. They are inlined by default,
            because derivatives are taken before a function is traced.
    """
    flattener = _Flattener(_CALLS if differentiable else _CALLS | _WITH_RULES)
    jaxpr, constants = opened(closed)
    numbers = [flattener.constant(v, c) for v, c in zip(jaxpr.constvars, constants, strict=True)]
    arguments = [flattener.number(v.aval) for v in jaxpr.invars]
    results = flattener.inline(jaxpr, numbers, arguments)
    equations = _needed(_distinct(flattener.equations, results), results)
    used = {v for e in equations for v in e.read} | {v for v in results if isinstance(v, int)}
    return Trace(
        tuple(arguments),
        {v: c for v, c in flattener.constants.items() if v in used},
        tuple(equations),
        tuple(results),
        flattener.types,
    )


def type_bytes(aval: Any) -> int:
    """Bytes of an array of a shape and type; 0 for what is no array, such as a token."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


class _Flattener:
    def __init__(self, calls: Mapping[str, str]) -> None:
        self.calls = calls
        self.types: list[Any] = []
        self.constants: dict[int, Any] = {}
        self.equations: list[Equation] = []

    def number(self, aval: Any) -> int:
        self.types.append(aval)
        return len(self.types) - 1

    def constant(self, variable: Any, value: Any) -> int:
        number = self.number(variable.aval)
        self.constants[number] = value
        return number

    def inline(self, jaxpr: Any, constants: Sequence[Source], arguments: Sequence[Source]) -> list[Source]:
        """Append the equations of a jaxpr for some arguments; its results."""
        known: dict[Any, Source] = dict(zip(jaxpr.constvars, constants, strict=True))
        known.update(zip(jaxpr.invars, arguments, strict=True))

        def source(atom: Any) -> Source:
            return atom if isinstance(atom, Literal) else known[atom]

        for eqn in jaxpr.eqns:
            inputs = [source(v) for v in eqn.invars]
            body = eqn.params.get(self.calls.get(eqn.primitive.name, ""))
            if body is not None:
                inner, values = opened(body)
                numbers = [self.constant(v, c) for v, c in zip(inner.constvars, values, strict=True)]
                known.update(zip(eqn.outvars, self.inline(inner, numbers, inputs), strict=True))
                continue
            outputs = [self.number(v.aval) for v in eqn.outvars]
            known.update(zip(eqn.outvars, outputs, strict=True))
            self.equations.append(Equation(eqn, tuple(inputs), tuple(outputs)))
        return [source(v) for v in jaxpr.outvars]


def _distinct(equations: Sequence[Equation], results: Iterable[Source]) -> list[Equation]:
    """The equations without those that compute what an earlier one does, such as the mean of a layer and that of its variance.

    XLA would make one of the two. Results keep separate equations, because each has its buffer. So do optimization
    barriers: a program has them so that two computations stay two.
    """
    own = {v for v in results if isinstance(v, int)}
    instead: dict[int, Source] = {}
    made: dict[Any, Equation] = {}
    kept: list[Equation] = []
    for equation in equations:
        read = tuple(instead.get(v, v) if isinstance(v, int) else v for v in equation.inputs)
        if read != equation.inputs:
            equation = Equation(equation.eqn, read, equation.outputs)
        earlier = made.setdefault(_computed(equation), equation)
        if earlier is equation or not own.isdisjoint(equation.outputs):
            kept.append(equation)
        else:
            instead.update(zip(equation.outputs, earlier.outputs, strict=True))
    return kept


def _computed(equation: Equation) -> Any:
    """Two equations with equal such values compute the same; a new object where that is not known."""
    eqn = equation.eqn
    if eqn.effects or equation.kind == "optimization_barrier":
        return object()
    inputs = tuple((s.aval, np.asarray(s.val).tobytes()) if isinstance(s, Literal) else s for s in equation.inputs)
    settings = tuple((name, type(value), value) for name, value in eqn.params.items())
    try:
        hash(settings)
    except TypeError:
        return object()
    return eqn.primitive, inputs, settings


def _needed(equations: Sequence[Equation], results: Iterable[Source]) -> list[Equation]:
    needed = {v for v in results if isinstance(v, int)}
    kept: list[Equation] = []
    for equation in reversed(equations):
        if equation.eqn.effects or not needed.isdisjoint(equation.outputs):
            kept.append(equation)
            needed.update(equation.read)
    return kept[::-1]
