"""Groups of layers of a loop: neighbours that save the same values, and the loops that run them.

Loops over a part of the layers are usually given slices of what is stacked, and their gradients are put together again: two
copies of all parameters. Here every group reads its layers from the whole stack by their numbers, and its derivative writes
gradients into one stack. JAX would derive such a loop with a stack for every layer, so that the derivative is written here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkmate.jax._compat import as_varying, opened
from checkmate.jax.arguments import Arguments, FlatFunction, is_array
from checkmate.jax.graph.alone import each_alone
from checkmate.jax.graph.pair import derivative, is_inexact
from checkmate.jax.scan.named_block import Naming
from checkmate.jax.scan.residuals import Residuals


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """Neighbouring layers of a loop that save the same values.

    Attributes:
        layers: Number of layers.
        names: Names of the values that each of them saves.
        sources: Where in the user's program each of these values is computed.
        nested: Layers of each inner loop, 1 if there is none. Of an inner loop only its first carry is saved before its
            derivative is computed; then the named values are.
        everything: Whether all that the derivative reads is saved, without `jax.checkpoint`. Names cannot say that: the
            derivative of a function such as `exp` reads its result before it has a name.
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


def run_groups(naming: Naming, groups: Sequence[LayerGroup], carry: Any, xs: Any, *, exact: bool = False) -> tuple[Any, Any]:
    """A loop over layers in groups, as `jax.lax.scan` over all of them.

    Args:
        naming: The body of the loop and its names.
        groups: Groups of layers.
        carry: The first carry.
        xs: What each layer is given, stacked.
        exact: Whether every equation of the body and its derivative stands alone; no group is nested then.
    """
    if len(groups) > 1 or exact:
        return _one_after_the_other(naming, groups, carry, xs, exact=exact)
    (group,) = groups
    if group.everything:
        return jax.lax.scan(naming.block, carry, xs, length=group.layers)
    body = jax.checkpoint(naming.with_names(group.names), policy=group.policy)
    if group.nested == 1:
        return jax.lax.scan(body, carry, xs, length=group.layers)

    def inner(carry: Any, xs: Any) -> tuple[Any, Any]:
        return jax.lax.scan(body, carry, xs, length=group.nested)

    outer = group.layers // group.nested
    folded = _mapped(lambda a: a.reshape(outer, group.nested, *a.shape[1:]), xs)
    carry, ys = jax.lax.scan(jax.checkpoint(inner), carry, folded, length=outer)
    return carry, jax.tree.map(lambda a: a.reshape(group.layers, *a.shape[2:]), ys)


def _one_after_the_other(naming: Naming, groups: Sequence[LayerGroup], carry: Any, xs: Any, *, exact: bool) -> tuple[Any, Any]:
    slices = _mapped(lambda a: a[0], xs)
    arguments = Arguments.of((carry, slices), {})
    flat = FlatFunction(naming.block, arguments)
    closed = jax.make_jaxpr(flat)(*arguments.arrays)
    carries = Arguments.of((carry,), {}).arrays
    # What the body closes over may be traced by a transformation outside, and becomes an argument.
    loop = _Loops(naming, groups, closed, len(carries), exact=exact)
    constants = loop.trace.trace.constants.values()
    arrays = [jnp.asarray(a) for a in (*constants, *carries, *Arguments.of((xs,), {}).arrays)]
    return flat.results(loop(*arrays))


class _Loops:
    """The loops of several groups and their derivative, as a function of flat arrays: constants, carries, stacks.

    Args:
        naming: The body and its names.
        groups: Groups of layers.
        closed: The body as it was traced.
        carries: Number of arrays of the carry.
        exact: Whether every equation stands alone.
    """

    def __init__(self, naming: Naming, groups: Sequence[LayerGroup], closed: Any, carries: int, *, exact: bool) -> None:
        self._compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = each_alone if exact else lambda function: function
        self.trace = naming.trace(closed)
        self.carries, self.constants = carries, len(self.trace.trace.constants)
        self.spans: list[tuple[range, tuple[int, ...] | None]] = []
        start = 0
        for group in groups:
            numbers = None if group.everything else self.trace.numbers(group.names)
            self.spans.append((range(start, start + group.layers), numbers))
            start += group.layers
        self.residuals: dict[range, Residuals] = {}
        self.types = [v.aval for v in opened(closed)[0].outvars]
        self.inexact = list(map(is_inexact, self.types))
        differentiable = jax.custom_vjp(self.run)
        differentiable.defvjp(self.forward, self.backward)
        self._differentiable = differentiable

    def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
        """The last carries, then results of all layers, stacked."""
        return self._differentiable(*arrays)

    def run(self, *arrays: jax.Array) -> list[jax.Array]:
        constants, carry, stacks = self._split(arrays)

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            results, _ = self._compiled(self._saving(()))([*constants, *carry, *xs])
            return results[: self.carries], results[self.carries :]

        carry, ys = jax.lax.scan(body, carry, stacks, length=self.spans[-1][0].stop)
        return [*carry, *ys]

    def forward(self, *arrays: jax.Array) -> tuple[list[jax.Array], Any]:
        constants, carry, stacks = self._split(arrays)
        saved: list[Any] = []
        parts: list[Any] = []
        for layers, numbers in self.spans:

            def body(carry: Any, i: Any, layers: range = layers, numbers: tuple[int, ...] | None = numbers) -> tuple[Any, Any]:
                given = [*constants, *carry, *_layer(stacks, i)]
                if numbers is None:
                    self.residuals[layers] = Residuals(lambda given: self._derivative(given, {})[1], given)
                    run = self._saving_everything(self.residuals[layers])
                else:
                    run = self._saving(numbers)
                results, kept = self._compiled(run)(given)
                return results[: self.carries], (results[self.carries :], carry, kept)

            carry, (ys, before, kept) = jax.lax.scan(body, carry, _numbers(layers))
            parts.append(ys)
            saved.append((before, kept))
        ys = [jnp.concatenate(some) for some in zip(*parts, strict=True)]
        return [*carry, *ys], (constants, stacks, saved)

    def backward(self, residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        constants, stacks, saved = residuals
        ends, along = list(cotangents[: self.carries]), list(cotangents[self.carries :])
        inexact = self.inexact[: self.carries]
        state = (
            [c for c, wanted in zip(ends, inexact, strict=True) if wanted],
            [_zeros(a) if is_inexact(a) else None for a in stacks],
            [_zeros(a) if is_inexact(a) else None for a in constants],
        )
        ys = [c if wanted else None for c, wanted in zip(along, self.inexact[self.carries :], strict=True)]
        for (layers, numbers), (before, kept) in zip(reversed(self.spans), reversed(saved), strict=True):
            step = functools.partial(self._backward_of_layer, constants, stacks, ys, layers, numbers)
            state, _ = jax.lax.scan(step, state, (_numbers(layers), before, kept), reverse=True)
        remaining = iter(state[0])
        return (*state[2], *(next(remaining) if wanted else None for wanted in inexact), *state[1])

    def _backward_of_layer(
        self,
        constants: Any,
        stacks: Any,
        ys: Any,
        layers: range,
        numbers: tuple[int, ...] | None,
        state: Any,
        of_layer: Any,
    ) -> tuple[Any, None]:
        ends, to_stacks, to_constants = state
        # Behind barriers they are read from their stacks once; each loop that reads them would slice them, and not in vectors.
        read = (*of_layer, _layer(stacks, of_layer[0]))
        i, before, kept, slices = jax.tree.map(jax.lax.optimization_barrier, read)
        given = [*constants, *before, *slices]

        def gradients(given: Sequence[Any], kept: Sequence[Any], inexact: Sequence[Any]) -> Any:
            if numbers is None:
                pull = self.residuals[layers].pullback(kept, given)
            else:
                _, pull = self._derivative(given, dict(zip(numbers, kept, strict=True)))
            remaining = iter(inexact)
            types = zip(self.inexact, self.types, strict=True)
            return pull([next(remaining) if w else np.zeros(t.shape, jax.dtypes.float0) for w, t in types])

        found = self._compiled(gradients)(given, kept, [*ends, *(_layer([y], i)[0] for y in ys if y is not None)])
        by_argument = dict(zip(_inexact(given), found, strict=True))
        first, last = self.constants, self.constants + self.carries
        to_constants = [None if t is None else t + by_argument[k] for k, t in enumerate(to_constants)]
        ends = [by_argument[k] for k in range(first, last) if k in by_argument]
        to_stacks = [
            None if t is None else jax.lax.dynamic_update_index_in_dim(t, by_argument[last + k], i, 0)
            for k, t in enumerate(to_stacks)
        ]
        return (ends, to_stacks, to_constants), None

    def _saving(self, numbers: tuple[int, ...]) -> Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]:
        """A layer, which returns its results and some of its values."""
        return lambda given: self.trace.run(given[: self.constants], given[self.constants :], numbers)

    def _saving_everything(self, residuals: Residuals) -> Callable[[Sequence[Any]], tuple[list[Any], list[Any]]]:
        """A layer, which returns its results and all that its derivative reads."""

        def run(given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            results, pull = self._derivative(given, {})
            return results, residuals.of(pull)

        return run

    def _derivative(self, given: Sequence[Any], known: dict[int, Any]) -> tuple[list[Any], Callable[..., Any]]:
        """The results of a layer, and the function that pulls their cotangents back to the inexact arguments."""

        def layer(*given: Any) -> list[Any]:
            return self.trace.run(given[: self.constants], given[self.constants :], (), known)[0]

        return derivative(layer, given, _inexact(given))

    def _split(self, arrays: Sequence[jax.Array]) -> tuple[list[Any], list[Any], list[Any]]:
        first, last = self.constants, self.constants + self.carries
        return list(arrays[:first]), list(arrays[first:last]), list(arrays[last:])


def _inexact(given: Sequence[Any]) -> list[int]:
    return [k for k, a in enumerate(given) if is_inexact(a)]


def _layer(stacks: Sequence[jax.Array], i: Any) -> list[jax.Array]:
    return [jax.lax.dynamic_index_in_dim(a, i, 0, keepdims=False) for a in stacks]


def _numbers(layers: range) -> jax.Array:
    return jnp.arange(layers.start, layers.stop, dtype=jnp.int32)


def _zeros(array: jax.Array) -> jax.Array:
    return as_varying(jnp.zeros_like(array), array)


def _mapped(change: Callable[[Any], Any], xs: Any) -> Any:
    return jax.tree.map(lambda leaf: change(leaf) if is_array(leaf) else leaf, xs)
