"""Names of the values in the body of a loop, and the choice of names to save.

The derivative of an iteration reads values that are either saved or computed again from saved ones. A choice is a cut of the
graph; with a limit on the bytes, the cheapest cut is an integer program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from checkmate.core.errors import OptionError
from checkmate.jax._compat import source_of, traced_as
from checkmate.jax.arguments import Arguments, FlatFunction
from checkmate.jax.graph.capture import Costs, phases_of_pair
from checkmate.jax.graph.loops import cheapest_cut, cut_program
from checkmate.jax.graph.trace import Equation, Pure, flattened, is_inexact, result, trace_pair

_NAME = "name"
"""The primitive that gives a value a name."""


@dataclass(frozen=True, slots=True)
class Naming:
    """The body of a loop with names: those that the body gives, or names given here to all values in place of the body's."""

    block: Callable[..., Any]
    own: bool

    def with_names(self, names: Sequence[str] | None) -> Callable[..., Any]:
        """The body with some names attached; None attaches all."""
        if self.own:
            return self.block
        prefix = f"{getattr(self.block, '__name__', 'block')}."

        def named(number: int, value: Any) -> Any:
            name = f"{prefix}{number}"
            wanted = is_inexact(value) if names is None else name in names
            return checkpoint_name(value, name) if wanted else value

        @functools.wraps(self.block)
        def block(carry: Any, x: Any) -> Any:
            arguments = Arguments.of((carry, x), {})
            flat = FlatFunction(self.block, arguments)
            # Calls of functions with a user-defined derivative stay calls: the body is differentiated later.
            trace = flattened(jax.make_jaxpr(flat)(*arguments.arrays), differentiable=True)
            values = dict(zip(trace.arguments, arguments.arrays, strict=True)) | dict(trace.constants)
            for equation in trace.equations:
                if equation.kind == _NAME:
                    values[equation.outputs[0]] = result(values, equation.inputs[0])
                    continue
                computed = equation.computed(values)
                with traced_as(equation.eqn):
                    values.update({v: named(v, value) for v, value in computed.items()})
            return flat.results([result(values, v) for v in trace.results])

        return block


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Values to save in one iteration, with names and source lines."""

    names: tuple[str, ...]
    sources: tuple[str, ...]
    saved_bytes: int
    cost: float  # of recomputations
    bound: float  # proven lower bound on the cost of choices of no more bytes


class Choices:
    """The choices among the offered names, all names by default, for an iteration that is a function of flat arrays.

    ``total`` is the cost of an iteration and its derivative without recomputations.
    """

    def __init__(self, arrays: Sequence[Any], pure: Pure, costs: Costs, offered: Iterable[str] | None = None) -> None:
        wanted = [i for i, array in enumerate(arrays) if is_inexact(array)]
        trace, boundary = trace_pair(pure, arrays, wanted, jax.eval_shape(pure, *arrays))
        phases = phases_of_pair(trace, boundary)
        measured = zip(trace.equations, costs([(equation,) for equation in trace.equations]), strict=True)
        cost = {id(equation): 0 if equation.kind == _NAME else found.cost_ns for equation, found in measured}
        ahead = [equation for equation in trace.equations if phases[id(equation)] == "forward"]
        self._cost = np.array([cost[id(equation)] for equation in ahead], dtype=float)
        self.total = float(sum(cost.values()))
        named: dict[str, list[Equation]] = {}
        for equation in ahead:
            if equation.kind == _NAME:
                named.setdefault(str(equation.eqn.params["name"]), []).append(equation)
        self.offered = tuple(named) if offered is None else tuple(offered)
        if missing := set(self.offered).difference(named):
            raise OptionError(
                f"the body of the loop gives no value the name {', '.join(sorted(missing))}",
                hint="attach names in the body with jax.ad_checkpoint.checkpoint_name, or leave names out",
            )
        saves = {equation.outputs[0]: j for j, name in enumerate(self.offered) for equation in named[name]}
        self._sources = [next(filter(None, (source_of(e.eqn) for e in named[name])), "") for name in self.offered]
        self._bytes = np.array([float(sum(trace.size_bytes(e.outputs[0]) for e in named[name])) for name in self.offered])
        gradients = {v for v in trace.results[boundary.results :] if isinstance(v, int)}
        backward = {v for e in trace.equations if phases[id(e)] == "backward" for v in e.read} | gradients
        self._program = cut_program(ahead, backward, saves, self._bytes)

    @functools.cache  # noqa: B019 - a few limits of one body
    def cheapest(self, most_bytes: int) -> Choice:
        """The choice with the cheapest recomputations, of those that save at most `most_bytes` in one iteration."""
        limit, price = min(max(0, most_bytes), self._bytes.sum()), 1e-12  # of a byte, to decide between choices of equal cost
        again, saved, proven = cheapest_cut(self._program, self._cost, self._bytes, limit, price)
        chosen, cost = np.flatnonzero(saved), float(self._cost @ again)
        return Choice(
            names=tuple(self.offered[j] for j in chosen),
            sources=tuple(self._sources[j] for j in chosen),
            saved_bytes=int(self._bytes[chosen].sum()),
            cost=cost,
            bound=min(cost, max(0.0, proven - price * limit)),
        )
