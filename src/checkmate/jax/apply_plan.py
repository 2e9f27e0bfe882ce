"""Runs a plan as a traceable function: equations in the plan's order, with a fence before every run of recomputations.

XLA merges equal computations and schedules the rest, which would undo a plan. A fence is one `jax.lax.optimization_barrier`: it
depends on all earlier computations, and all later ones depend on it. XLA also keeps a barrier over the inputs of a recomputation
alone, but then schedules the recomputation as early as it likes (docs/decisions/0013).

XLA for CPUs (jaxlib 0.10) removes barriers before it merges equal computations for the last time, and schedules. There a fence
is a loop that never runs, except in exact programs, which need the options that keep barriers. A loop would copy the arguments of
a program: a recomputation that reads nothing else reads one behind a select, whose condition is always true and depends on the
newest value.

Fences change XLA's fusions, and therefore the rounding. In an exact program every op stands alone between barriers, and XLA
compiles it to the same instructions in every plan (docs/decisions/0010).
"""

from __future__ import annotations

import itertools
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from checkmate.core.plan import Plan
from checkmate.jax._compat import is_tracer, merges_recomputations, varying_axes
from checkmate.jax.graph.capture import BROADCASTS, FUSED, REDUCTIONS, VIEWS, Capture
from checkmate.jax.graph.trace import is_inexact, result, trace_flat


class PlannedProgram:
    """A plan of a captured function, ready to run; ``saved`` are the values that the forward passes to the backward.

    In an exact program every op stands alone: all plans give the same bits.
    """

    def __init__(self, capture: Capture, plan: Plan, *, exact: bool = False) -> None:
        self.capture, self._exact, self.selects = capture, exact, not exact and merges_recomputations()
        self.order = plan.order
        boundary = capture.graph.boundary
        self._boundary = len(self.order) if boundary is None else self.order.index(boundary)
        self._results = len(capture.trace.results) if capture.boundary is None else capture.boundary.results
        self._fences, self.saved, self._last_read = self._lives(self._fenced())
        self._again = self._computed_again() if self.selects else {}
        self._add_copied_early()
        # XLA would make constants that are stored, and each copy of them, when the program begins.
        stored = (e for chain in capture.members for e in chain if len(chain) == 1 or chain[-1].kind not in FUSED | REDUCTIONS)
        self._constant = {id(e) for e in stored if not e.read and e.kind in BROADCASTS}
        self._varying = set(capture.trace.arguments)
        for read, written in zip(capture.inputs, capture.outputs, strict=True):
            self._varying.update(() if self._varying.isdisjoint(read) else written)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The results of the captured function for its flat arguments, tangents included."""
        count = 0 if self.capture.boundary is None else len(self.capture.boundary.tangents)
        given = len(arguments) - count
        results, saved = self.forward(arguments[:given])
        return [*results, *self.backward(saved, arguments[given:])]

    def forward(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results of the forward, and the values that it saves for the backward; `arguments` excludes the tangents."""
        trace = self.capture.trace
        values = dict(zip(trace.arguments, arguments, strict=False)) | dict(trace.constants)
        self._run(values, 0, self._boundary)
        return [result(values, v) for v in trace.results[: self._results]], [values[v] for v in self.saved]

    def backward(self, saved: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """The gradients, which are the results after those of the forward, from the saved values."""
        trace = self.capture.trace
        numbers = () if self.capture.boundary is None else self.capture.boundary.tangents
        values = dict(zip((*self.saved, *numbers), (*saved, *tangents), strict=True)) | dict(trace.constants)
        self._run(values, self._boundary + 1, len(self.order))
        return [result(values, v) for v in trace.results[self._results :]]

    def _run(self, values: dict[int, Any], start: int, stop: int) -> None:
        if not any(map(is_tracer, values.values())):  # op by op nothing is merged or moved, and values are freed here
            for p in range(start, stop):
                self._compute(values, self.order[p])
                for v in self._last_read[p]:
                    values.pop(v, None)
            return
        newest = self._newest(values, reversed(self.order[:start])) if self.selects else None
        for p in range(start, stop):
            op = self.order[p]
            if p in self._fences:
                values.update(behind_barriers(values, self._fences[p], opaque=self.selects))
            self._compute(values, op, self._again.get(p), None if newest is None else values[newest])
            if self.selects and (found := self._newest(values, (op,))) is not None:
                newest = found

    def _compute(self, values: dict[int, Any], op: int, again: Mapping[int, int] | None = None, newest: Any = None) -> None:
        """Compute an op. Each equation in `again` reads one of its inputs behind a select that depends on the newest value."""
        read = behind_barriers(values, self.capture.inputs[op]) if self._exact else {}
        local: ChainMap[int, Any] = ChainMap({}, read, values)
        for equation in self.capture.members[op]:
            v = None if again is None else again.get(id(equation))
            # In `jax.shard_map` a value that is the same on all devices would vary after the select.
            if v is not None and newest is not None and varying_axes(newest) <= varying_axes(local[v]):
                local[v] = selected_by(newest, local[v])
            local.update(equation.computed(local))
            if newest is not None and id(equation) in self._constant and not varying_axes(newest):
                (v,) = equation.outputs
                local[v] = jnp.where(_always(newest), local[v], local[v] == 0)
        values.update({v: local[v] for v in self.capture.outputs[op]})

    def _computed_again(self) -> dict[int, dict[int, int]]:
        """By position: the equations that XLA would merge with earlier ones, each with the input to read behind a select."""
        trace, fresh = self.capture.trace, itertools.count()
        number = defaultdict[Any, int](fresh.__next__)  # of computations; equal ones have the same
        known: dict[int, int] = {}
        made, since = set[Any](), set[Any]()  # before the last fence, and after it
        found: dict[int, dict[int, int]] = {}
        for p, op in enumerate(self.order):
            if p in self._fences or p == self._boundary:
                made |= since
                since.clear()
            known.update((v, next(fresh)) for v in self._fences.get(p, ()))
            local = ChainMap[int, int]({}, known)
            for equation in self.capture.members[op]:
                key = (id(equation), *(local.get(v, ~v) for v in equation.read))
                if key in made and equation.read and equation.kind not in VIEWS:
                    v = min(equation.read, key=lambda v: (-len(varying_axes(trace.types[v])), trace.size_bytes(v)))
                    found.setdefault(p, {})[id(equation)] = v
                    local[v], key = next(fresh), (next(fresh),)
                since.add(key)
                local.update(dict.fromkeys(equation.outputs, number[key]))
            known.update((v, local[v]) for v in self.capture.outputs[op] if v in local)
        return found

    def _add_copied_early(self) -> None:
        """XLA copies what the backward reads in another layout once it is known, and holds the copy until it is read."""
        graph, early = self.capture.graph, set(self.capture.trace.arguments)
        for p, number in enumerate(self.order if self.selects else ()):
            op, chain = graph.ops[number], self.capture.members[number]
            if op.phase == "forward":
                early.update(self.capture.outputs[number])
            elif op.kind == "conv_general_dilated":
                sizes = {v: self.capture.trace.size_bytes(v) for v in chain[-1].read if v in early}
                copied = [v for v, size in sizes.items() if size <= op.workspace_bytes]
                self._again.setdefault(p, {}).update({id(chain[-1]): max(copied, key=sizes.__getitem__)} if copied else {})

    def _newest(self, values: Mapping[int, Any], ops: Iterable[int]) -> int | None:
        """Number of the first floating-point value that some ops compute from arguments; None if there is none."""
        made = (v for op in ops for v in self.capture.outputs[op] if v in values and v in self._varying)
        return next((v for v in made if values[v].size and jnp.issubdtype(values[v].dtype, jnp.floating)), None)

    def _fenced(self) -> set[int]:
        """Positions at which a run of recomputations begins; in exact programs also runs of computations later than in the graph.

        Without a fence, XLA would compute a delayed op early and hold its results. But each fence also prevents fusions, which
        can cost more bytes and time than the delays save. From the first recomputation on, a fence also follows each run of
        ops that make results: nothing waits for a gradient of weights, and XLA would hold what it reads.
        """
        seen, found = set[int](), set[int]()
        results = set(self.capture.trace.results)
        furthest, late_before, made = -1, False, False
        for p, op in enumerate(self.order):
            late = op in seen or (self._exact and op < furthest)
            makes = not results.isdisjoint(self.capture.outputs[op]) and not self._exact
            if (late and not late_before) or (made and found and not makes):
                found.add(p)
            made = makes
            seen.add(op)
            furthest, late_before = max(furthest, op), late
        return found

    def _lives(self, fenced: set[int]) -> tuple[dict[int, list[int]], list[int], dict[int, set[int]]]:
        """The values behind the fence before each fenced computation; that the backward is given; and that no op reads any more.

        A fence covers live values that are read before the next fence, to put their readers after it, and values made since
        the previous fence, to put their computation before it. Other live values passed an earlier fence and will pass a later
        one. Arguments and constants are covered only if an op reads nothing else: other inputs depend on a fence already.
        """
        capture = self.capture
        given = {*capture.trace.arguments, *capture.trace.constants}
        results = capture.trace.results if capture.boundary is None else capture.trace.results[self._results :]
        live = {v for v in results if isinstance(v, int)}
        read, live_at_next, next_fence = set[int](), set[int](), set[int]()
        found: dict[int, set[int]] = {}
        saved: list[int] = []
        last_read: dict[int, set[int]] = {}  # by position: values that are no longer needed after it
        for p in range(len(self.order) - 1, -1, -1):
            inputs, outputs = capture.inputs[self.order[p]], capture.outputs[self.order[p]]
            last_read[p] = {*inputs, *outputs}.difference(live, saved)
            next_fence.update(live_at_next.intersection(outputs))
            live.difference_update(outputs)
            read.difference_update(outputs)
            if p == self._boundary:
                saved = sorted(live.difference(capture.trace.constants))
            live.update(inputs)
            read.update(inputs if given.issuperset(inputs) else set(inputs) - given)
            if p in fenced:
                live_at_next, next_fence = set(live), set(read)
                found[p] = next_fence
                read.clear()
        # A loop would copy arguments; computations that read nothing else read a value behind a select.
        uncovered = given if self.selects else set(capture.trace.constants)
        fences = {p: sorted(values - uncovered) for p, values in found.items()}
        return {p: fence for p, fence in fences.items() if fence}, saved, last_read


def behind_barriers(values: Mapping[int, Any], numbers: Sequence[int], *, opaque: bool = False) -> dict[int, Any]:
    """Some values behind a barrier: XLA cannot fuse their readers with earlier computations, or move these computations.

    An `opaque` barrier is a loop, for versions of XLA that remove other barriers.

    In `jax.shard_map`, if one input of a barrier varies along an axis, all its outputs do. Parameters must not vary: there is one
    barrier for each set of axes along which values differ. Every recomputation also reads a value that depends on the batch.
    """
    by_axes: dict[frozenset[str], list[int]] = {}
    for v in numbers:
        by_axes.setdefault(varying_axes(values[v]), []).append(v)
    found: dict[int, Any] = {}
    for some in by_axes.values():
        barrier = _behind_loop if opaque else jax.lax.optimization_barrier
        found.update(zip(some, barrier(tuple(values[v] for v in some)), strict=True))
    return found


@jax.custom_jvp
def _behind_loop(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The arrays after a loop that never runs, though XLA cannot tell, and that would change each of them in place."""
    return jax.lax.while_loop(_never, _changed, arrays) if any(a.size for a in arrays) else arrays


_behind_loop.defjvp(lambda primals, tangents: (_behind_loop(*primals), *tangents))


def _never(arrays: tuple[jax.Array, ...]) -> jax.Array:
    return ~_always(next(a for a in arrays if a.size))


def _changed(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(
        jax.random.wrap_key_data(~jax.random.key_data(a), impl=jax.random.key_impl(a))
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        else (-a if is_inexact(a) else ~a)
        for a in arrays
    )


def _always(array: jax.Array) -> jax.Array:
    """True, computed from an element of an array; XLA cannot tell that it is true for every element."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    element = jnp.real(jax.lax.slice(array, (0,) * array.ndim, (1,) * array.ndim).reshape(()))
    bits = f"uint{8 * element.dtype.itemsize}"
    number = jax.lax.bitcast_convert_type(element, bits) if is_inexact(element) else element.astype("uint32")
    return (number | 1) != 0


def selected_by(newest: jax.Array, value: jax.Array) -> jax.Array:
    """A value, computed by a select whose condition is true whatever the newest value is."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(selected_by(newest, jax.random.key_data(value)), impl=jax.random.key_impl(value))
    return jax.lax.select(_always(newest), value, jnp.zeros_like(value))


def each_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of nests of arrays that computes the same results, with a barrier around each equation."""

    def run(*arguments: Any) -> Any:
        given, nest = jax.tree.flatten(arguments)
        answer: Any = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal answer
            leaves, answer = jax.tree.flatten(function(*jax.tree.unflatten(nest, arrays)))
            return leaves

        trace = trace_flat(flat, *given, checkpoints=False)
        values = dict(zip(trace.arguments, given, strict=True)) | dict(trace.constants)
        for equation in trace.equations:
            values.update(equation.computed(behind_barriers(values, equation.read)))
        numbers = dict.fromkeys(v for v in trace.results if isinstance(v, int))
        values.update(behind_barriers(values, list(numbers)))
        return jax.tree.unflatten(answer, [result(values, v) for v in trace.results])

    return run
