"""Groups of layers of a loop: neighbours that save the same values, and the loops that run them.

The usual loop over some of the layers gets slices of the stacked parameters, and its gradients are concatenated later: two
copies of all parameters. Here every group reads its layers from the whole stack by index, and its derivative writes
gradients into one stack. JAX's own derivative of this loop would have a stack for every layer; this module defines another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from checkmate.jax._compat import as_varying, barrier, traced_as, varying_axes
from checkmate.jax.apply_plan import each_alone
from checkmate.jax.arguments import Arguments, FlatFunction, is_array
from checkmate.jax.graph.trace import Pure, Source, Trace, derivative, flattened, is_inexact, result

NAME = "name"
"""The primitive that gives a value a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Neighbouring layers of a loop that save the same values.

    Attributes:
        layers: Number of layers.
        names: Names of the values that each of them saves.
        sources: Lines of the user's program that compute these values.
        nested: Layers of each inner loop, 1 if there is none. An inner loop saves only its first carry until its derivative
            is computed; then it saves the named values.
        everything: Whether all that the derivative reads is saved, without `jax.checkpoint`. Names cannot express that: the
            derivative of a function like `exp` reads the result before it has a name.
    """

    layers: int
    names: tuple[str, ...]
    sources: tuple[str, ...] = ()
    nested: int = 1
    everything: bool = False

    @property
    def policy(self) -> Any:
        """The policy for `jax.checkpoint` around one layer."""
        if self.everything:
            return jax.checkpoint_policies.everything_saveable
        return jax.checkpoint_policies.save_only_these_names(*self.names)


@dataclass(frozen=True, slots=True)
class Naming:
    """The body of a loop with names: those that the body gives, or names given here to all values in place of the body's."""

    block: Callable[..., Any]
    own: bool

    def with_names(self, names: Sequence[str] | None) -> Callable[..., Any]:
        """The body with some names attached; None attaches all."""
        if self.own:
            return self.block

        @functools.wraps(self.block)
        def named(carry: Any, x: Any) -> Any:
            arguments = Arguments.of((carry, x), {})
            flat = FlatFunction(self.block, arguments)
            trace = self.trace(flat, arguments)
            return flat.results(self.flat(trace, names)(*trace.constants.values(), *arguments.arrays))

        return named

    def trace(self, flat: FlatFunction, arguments: Arguments) -> Trace:
        """The traced body. Calls of functions with a user-defined derivative stay calls: the body is differentiated later."""
        return flattened(jax.make_jaxpr(flat)(*arguments.arrays), differentiable=True)

    def flat(self, trace: Trace, names: Sequence[str] | None) -> Pure:
        """A traced body with some names attached, as a function of its constants and arguments."""
        prefix = f"{getattr(self.block, '__name__', 'block')}."

        def named(number: int, value: Any) -> Any:
            name = f"{prefix}{number}"
            wanted = is_inexact(value) if names is None else name in names
            return checkpoint_name(value, name) if wanted else value

        def run(*arrays: Any) -> list[Any]:
            values = dict(zip((*trace.constants, *trace.arguments), arrays, strict=True))
            for equation in trace.equations:
                if equation.kind == NAME and not self.own:
                    values[equation.outputs[0]] = result(values, equation.inputs[0])
                    continue
                computed = equation.computed(values)
                if not self.own:
                    with traced_as(equation.eqn):
                        computed = {v: named(v, value) for v, value in computed.items()}
                values.update(computed)
            return [result(values, v) for v in trace.results]

        return run


class Residuals:
    """The values that the derivative of a layer reads: arguments, values that depend on them, and values that do not.

    Only the second kind is saved. Arguments are live anyway, and the third kind, like masks, is computed again from constants:
    if every layer of a loop saved them, they would take a fifth more bytes.
    """

    def __init__(self, layer: Pure, given: Sequence[Any]) -> None:
        self._layer, self._tree = layer, None

        def leaves_of(*given: Any) -> list[Any]:
            leaves, self._tree = jax.tree.flatten(_derivative(layer, given)[1])
            return leaves

        trace = self._trace = flattened(jax.make_jaxpr(leaves_of)(*given))
        self._depending = set(trace.arguments)
        unnamed: dict[int, Source] = {}
        for equation in trace.equations:
            if not self._depending.isdisjoint(equation.read):
                self._depending.update(equation.outputs)
            if equation.kind == NAME:
                (source,) = equation.inputs
                unnamed[equation.outputs[0]] = unnamed.get(source, source) if isinstance(source, int) else source
        self._results = [unnamed.get(v, v) if isinstance(v, int) else v for v in trace.results]
        read = dict.fromkeys(v for v in self._results if isinstance(v, int))
        self._saved = [v for v in read if v in self._depending and v not in trace.arguments]

    @property
    def saved_bytes(self) -> int:
        """Bytes of the values to save."""
        return sum(map(self._trace.size_bytes, self._saved))

    def forward(self, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results of the layer, and the values to save."""
        results, pull = _derivative(self._layer, given)
        leaves = zip(self._results, jax.tree.leaves(pull), strict=True)
        by_number = {v: leaf for v, leaf in leaves if isinstance(v, int)}
        return results, [by_number[v] for v in self._saved]

    def pullback(self, saved: Sequence[Any], given: Sequence[Any]) -> Callable[..., Any]:
        """The function that pulls cotangents back to the inexact arguments, from the saved values."""
        trace = self._trace
        values = dict(trace.constants) | dict(zip((*trace.arguments, *self._saved), (*given, *saved), strict=True))
        for equation in trace.equations:
            if self._depending.isdisjoint(equation.outputs):
                values.update(equation.computed(values))
        return jax.tree.unflatten(self._tree, [result(values, v) for v in self._results])


def run_groups(naming: Naming, groups: Sequence[LayerGroup], carry: Any, xs: Any, *, exact: bool = False) -> tuple[Any, Any]:
    """Run a loop over layers in groups, with the results of `jax.lax.scan` over all layers.

    If `exact`, every equation of the body and its derivative stands alone, and no group is nested.
    """
    if len(groups) > 1 or exact:
        return _one_after_the_other(naming, groups, carry, xs, exact=exact)
    (group,) = groups
    body = naming.block if group.everything else jax.checkpoint(naming.with_names(group.names), policy=group.policy)
    if group.nested == 1:
        return jax.lax.scan(body, carry, xs, length=group.layers)

    def inner(carry: Any, xs: Any) -> tuple[Any, Any]:
        return jax.lax.scan(body, carry, xs, length=group.nested)

    outer = group.layers // group.nested
    folded = _mapped(lambda a: a.reshape(outer, group.nested, *a.shape[1:]), xs)
    carry, ys = jax.lax.scan(jax.checkpoint(inner), carry, folded, length=outer)
    return carry, jax.tree.map(lambda a: a.reshape(group.layers, *a.shape[2:]), ys)


def _one_after_the_other(naming: Naming, groups: Sequence[LayerGroup], carry: Any, xs: Any, *, exact: bool) -> tuple[Any, Any]:
    arguments = Arguments.of((carry, _mapped(lambda a: a[0], xs)), {})
    flat = FlatFunction(naming.block, arguments)
    trace = naming.trace(flat, arguments)
    carries = Arguments.of((carry,), {}).arrays
    loops = _Loops(naming, groups, trace, len(carries), exact=exact)
    differentiable = jax.custom_vjp(lambda *arrays: loops.forward(*arrays)[0])
    differentiable.defvjp(loops.forward, loops.backward)
    # Values that the body closes over may be tracers of an outer transformation, and become arguments.
    arrays = [*trace.constants.values(), *carries, *Arguments.of((xs,), {}).arrays]
    return flat.results(differentiable(*map(jnp.asarray, arrays)))


class _Loops:
    """The loops of several groups and their derivative, as functions of flat arrays: constants, carries, stacks."""

    def __init__(self, naming: Naming, groups: Sequence[LayerGroup], trace: Trace, carries: int, *, exact: bool) -> None:
        self.alone: Callable[[Callable[..., Any]], Callable[..., Any]] = each_alone if exact else lambda function: function
        self.constants, self.carries = len(trace.constants), carries
        self.types: list[Any] = [trace.types[v] if isinstance(v, int) else v.aval for v in trace.results]
        self.groups: list[tuple[range, Pure]] = []
        self.residuals: dict[range, Residuals] = {}
        start = 0
        for group in groups:
            layer, layers = naming.flat(trace, group.names), range(start, start + group.layers)
            self.groups.append((layers, layer if group.everything else jax.checkpoint(layer, policy=group.policy)))
            start = layers.stop

    def forward(self, *arrays: jax.Array) -> tuple[list[jax.Array], Any]:
        """The last carries and results of all layers, stacked; and all that the derivative reads."""
        constants, carry, stacks = self._split(arrays)
        saved: list[Any] = []
        parts: list[Any] = []
        for layers, layer in self.groups:

            def body(carry: Any, i: Any, layers: range = layers, layer: Pure = layer) -> tuple[Any, Any]:
                given = [*constants, *carry, *_layer(stacks, i)]
                residuals = self.residuals[layers] = Residuals(layer, given)
                results, kept = self.alone(residuals.forward)(given)
                return results[: self.carries], (results[self.carries :], carry, kept)

            carry, (ys, before, kept) = jax.lax.scan(body, carry, _numbers(layers))
            parts.append(ys)
            saved.append((before, kept))
        ys = [jnp.concatenate(some) for some in zip(*parts, strict=True)]
        return [*carry, *ys], (constants, stacks, saved)

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        constants, stacks, saved = residuals
        given = [c if is_inexact(t) else None for c, t in zip(cotangents, self.types, strict=True)]
        ends, along = given[: self.carries], given[self.carries :]
        state = ([_zeros(a) for a in constants], ends, [_zeros(a) for a in stacks])
        for (layers, _), (before, kept) in zip(reversed(self.groups), reversed(saved), strict=True):

            def step(state: Any, of_layer: Any, layers: range = layers) -> tuple[Any, None]:
                to_constants, ends, to_stacks = state
                # Behind barriers they are read from their stacks once; without, loops would slice them, and not in vectors.
                read = (*of_layer, _layer(stacks, of_layer[0]))
                i, before, kept, slices = jax.tree.map(barrier, read)
                given = [*constants, *before, *slices]

                def gradients(given: Sequence[Any], kept: Sequence[Any], known: Sequence[Any]) -> Any:
                    types = zip(known, self.types, strict=True)
                    zeros = [np.zeros(t.shape, jax.dtypes.float0) if c is None else c for c, t in types]
                    return self.residuals[layers].pullback(kept, given)(zeros)

                remaining = iter(self.alone(gradients)(given, kept, [*ends, *_layer(along, i)]))
                found = self._split([next(remaining) if is_inexact(a) else None for a in given])
                to_constants = [None if t is None else t + g for t, g in zip(to_constants, found[0], strict=True)]
                to_stacks = [
                    None if t is None else jax.lax.dynamic_update_index_in_dim(t, g, i, 0)
                    for t, g in zip(to_stacks, found[2], strict=True)
                ]
                return (to_constants, found[1], to_stacks), None

            state, _ = jax.lax.scan(step, state, (_numbers(layers), before, kept), reverse=True)
        return (*state[0], *state[1], *state[2])

    def _split(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        first, last = self.constants, self.constants + self.carries
        return list(arrays[:first]), list(arrays[first:last]), list(arrays[last:])


def _derivative(layer: Pure, given: Sequence[Any]) -> tuple[list[Any], Callable[..., Any]]:
    return derivative(layer, given, [k for k, a in enumerate(given) if is_inexact(a)])


def _layer(stacks: Sequence[Any], i: Any) -> list[Any]:
    return [None if a is None else jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False) for a in stacks]


def _numbers(layers: range) -> jax.Array:
    return jnp.arange(layers.start, layers.stop, dtype=jnp.int32)


def _zeros(array: jax.Array) -> jax.Array | None:
    return as_varying(jnp.zeros_like(array), varying_axes(array)) if is_inexact(array) else None


def _mapped(change: Callable[[Any], Any], xs: Any) -> Any:
    return jax.tree.map(lambda leaf: change(leaf) if is_array(leaf) else leaf, xs)
