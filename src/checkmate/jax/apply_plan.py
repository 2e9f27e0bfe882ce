"""Runs a plan as a traceable function: equations in the plan's order, with a fence before every run of recomputations.

XLA merges equal computations and schedules the rest, which would undo a plan. A fence is one `jax.lax.optimization_barrier`: it
depends on all earlier computations, and all later ones depend on it. XLA also keeps a barrier over the inputs of a recomputation
alone, but then schedules the recomputation as early as it likes (docs/decisions/0013). Views are made again behind a fence,
because XLA would store a value and its view as two buffers.

XLA for CPUs (jaxlib 0.10) removes barriers before it merges equal computations for the last time. There a recomputation also
reads an operand behind a select, whose condition is always true and depends on the newest value, unless the user asked for the
options that keep barriers.

Fences change XLA's fusions, and therefore the rounding. In an exact program every op stands alone between barriers, and XLA
compiles it to the same instructions in every plan (docs/decisions/0010).
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from checkmate.core.plan import Plan
from checkmate.jax._compat import merges_recomputations, varying_axes
from checkmate.jax.graph.capture import CHEAP, FUSED, REDUCTIONS, Capture
from checkmate.jax.graph.trace import result, trace_flat


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
        self._views = _views(capture) | ({} if exact else _cheap(capture))
        self._fences, self.saved = self._fences_and_saved(_fenced(self.order, delayed=exact))

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
        return [result(values, v) for v in trace.results[: self._results]], [values[v] for v in self.saved.values]

    def backward(self, saved: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """The gradients, which are the results after those of the forward, from the saved values."""
        trace = self.capture.trace
        numbers = () if self.capture.boundary is None else self.capture.boundary.tangents
        values = dict(zip((*self.saved.values, *numbers), (*saved, *tangents), strict=True)) | dict(trace.constants)
        self._view_again(values, self.saved)
        self._run(values, self._boundary + 1, len(self.order))
        return [result(values, v) for v in trace.results[self._results :]]

    def _run(self, values: dict[int, Any], start: int, stop: int) -> None:
        made = {id(equation) for op in self.order[:start] for equation in self.capture.members[op]}  # before the last fence
        since, selected = set[int](), set[int]()
        newest = self._newest(values, reversed(self.order[:start])) if self.selects else None
        for p in range(start, stop):
            op = self.order[p]
            if p in self._fences:
                values.update(behind_barriers(values, self._fences[p].values))
                self._view_again(values, self._fences[p])
                made |= since
                since.clear()
            if newest is not None and (again := made.intersection(map(id, self.capture.members[op]))):
                self._compute(values, op, again, selected, values[newest])
                selected.update(self.capture.outputs[op])
            else:
                self._compute(values, op)
            since.update(map(id, self.capture.members[op]))
            if self.selects and (found := self._newest(values, (op,))) is not None:
                newest = found

    def _compute(
        self, values: dict[int, Any], op: int, again: Set[int] = frozenset(), selected: Set[int] = frozenset(), newest: Any = None
    ) -> None:
        """Compute an op. Equations that are computed again depend on the newest value, or on an input that does (`selected`)."""
        read = behind_barriers(values, self.capture.inputs[op]) if self._exact else {}
        local: ChainMap[int, Any] = ChainMap({}, read, values)
        dependent = set[int]()
        for equation in self.capture.members[op]:
            if newest is not None:
                read = equation.read
                if id(equation) in again and selected.isdisjoint(read) and dependent.isdisjoint(read):
                    # In `jax.shard_map` a value that is the same on all devices would vary after the select.
                    usable = [v for v in read if varying_axes(newest) <= varying_axes(local[v])]
                    for v in sorted(usable, key=self.capture.trace.size_bytes)[:1]:
                        local[v] = selected_by(newest, local[v])
                        dependent.add(v)
                if not (selected.isdisjoint(read) and dependent.isdisjoint(read)):
                    dependent.update(equation.outputs)
            local.update(equation.computed(local))
        values.update({v: local[v] for v in self.capture.outputs[op]})

    def _newest(self, values: Mapping[int, Any], ops: Iterable[int]) -> int | None:
        """Number of the first floating-point value that is an output of some ops; None if there is none."""
        made = (v for op in ops for v in self.capture.outputs[op] if v in values)
        return next((v for v in made if values[v].size and jnp.issubdtype(values[v].dtype, jnp.floating)), None)

    def _view_again(self, values: dict[int, Any], stored: _Stored) -> None:
        for op in stored.views:
            self._compute(values, op)

    def _fences_and_saved(self, fenced: set[int]) -> tuple[dict[int, _Stored], _Stored]:
        """The values behind the fence before each fenced computation, and the values that the backward is given.

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
        saved = _Stored((), ())
        for p in range(len(self.order) - 1, -1, -1):
            inputs, outputs = capture.inputs[self.order[p]], capture.outputs[self.order[p]]
            next_fence.update(live_at_next.intersection(outputs))
            live.difference_update(outputs)
            read.difference_update(outputs)
            if p == self._boundary:
                saved = self._stored(live)
            live.update(inputs)
            read.update(inputs if given.issuperset(inputs) else set(inputs) - given)
            if p in fenced:
                live_at_next, next_fence = set(live), set(read)
                found[p] = next_fence
                read.clear()
        fences = {p: self._stored(values) for p, values in found.items()}
        return {p: fence for p, fence in fences.items() if fence.values}, saved

    def _stored(self, live: set[int]) -> _Stored:
        """The stored values behind some live values, without constants, and the ops that make their views."""
        stored, views = set(live), set[int]()
        pending = list(live & self._views.keys())
        while pending:
            view = pending.pop()
            base, op = self._views[view]
            stored.discard(view)
            views.add(op)
            if base in self._views:
                pending.append(base)
            else:
                stored.add(base)
        return _Stored(tuple(sorted(stored.difference(self.capture.trace.constants))), tuple(sorted(views)))


@dataclass(frozen=True, slots=True)
class _Stored:
    """Values behind a fence, or values that the backward is given."""

    values: tuple[int, ...]  # values that own their bytes, without constants
    views: tuple[int, ...]  # ops whose results are views of these values, each after the ops that it reads


def _views(capture: Capture) -> dict[int, tuple[int, int]]:
    """For each view: the value whose bytes it shares, and the op that makes the view."""
    graph = capture.graph
    traced = {
        v: w for op, outputs in zip(graph.ops, capture.outputs, strict=True) for v, w in zip(op.outputs, outputs, strict=True)
    }
    bases = ((v, value.base) for v, value in enumerate(graph.values) if value.base is not None)
    return {traced[v]: (traced[base], graph.producer[v]) for v, base in bases}


def _cheap(capture: Capture) -> dict[int, tuple[int, int]]:
    """The same for values that XLA computes in each loop that reads them: it would store the value for a fence, and its input."""
    trace = capture.trace
    made = {v for outputs in capture.outputs for v in outputs}
    stored = {v for e in trace.equations if e.kind not in FUSED | REDUCTIONS for v in e.read} | {*trace.results}
    found = {}
    for op, chain in enumerate(capture.members):
        if len(chain) == 1 and chain[0].kind in CHEAP and len(chain[0].read) == 1 and stored.isdisjoint(chain[0].outputs):
            (value,), (base,) = chain[0].outputs, chain[0].read
            if base in made and trace.size_bytes(value) == trace.size_bytes(base):
                found[value] = base, op
    return found


def _fenced(order: Sequence[int], *, delayed: bool) -> set[int]:
    """Positions at which a run of recomputations begins; if `delayed`, also runs of computations later than in the program.

    Without a fence, XLA would compute a delayed op early and hold its results. But each fence also prevents fusions, which can
    cost more bytes and time than the delays save.
    """
    seen: set[int] = set()
    found: set[int] = set()
    furthest, late_before = -1, False
    for p, op in enumerate(order):
        late = op in seen or (delayed and op < furthest)
        if late and not late_before:
            found.add(p)
        seen.add(op)
        furthest, late_before = max(furthest, op), late
    return found


def behind_barriers(values: Mapping[int, Any], numbers: Sequence[int]) -> dict[int, Any]:
    """Some values behind a barrier: XLA cannot fuse their readers with earlier computations, or move these computations.

    In `jax.shard_map`, if one input of a barrier varies along an axis, all its outputs do. Parameters must not vary: there is one
    barrier for each set of axes along which values differ. Every recomputation also reads a value that depends on the batch.
    """
    by_axes: dict[frozenset[str], list[int]] = {}
    for v in numbers:
        by_axes.setdefault(varying_axes(values[v]), []).append(v)
    found: dict[int, Any] = {}
    for some in by_axes.values():
        found.update(zip(some, jax.lax.optimization_barrier(tuple(values[v] for v in some)), strict=True))
    return found


def selected_by(newest: jax.Array, value: jax.Array) -> jax.Array:
    """A value, computed by a select whose condition is true whatever the newest value is; XLA cannot tell that it is."""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(selected_by(newest, jax.random.key_data(value)), impl=jax.random.key_impl(value))
    bits = jax.lax.bitcast_convert_type(jnp.ravel(newest)[0], f"uint{8 * newest.dtype.itemsize}")
    return jnp.where((bits | 1) != 0, value, jnp.zeros((), value.dtype))


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
