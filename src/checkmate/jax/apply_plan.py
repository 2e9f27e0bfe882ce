"""Runs a plan as a traceable function: equations in the plan's order, with a fence before every run of recomputations.

XLA merges equal computations and schedules what is left, and so would undo a plan. A fence is one `jax.lax.optimization_barrier`
over *all* values that are alive: it depends on all that came before, and all that comes after depends on it. A barrier over the
inputs of a recomputation alone is kept too, but XLA then schedules the recomputation as early as it likes (docs/decisions/0100).

Fences change what XLA fuses, and so the rounding. In an exact program every op stands alone between barriers, so that it is
compiled to the same instructions in every plan (docs/decisions/0101).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from checkmate.core.plan import Plan
from checkmate.jax._compat import as_array, bind, varying_axes
from checkmate.jax.graph.capture import Capture
from checkmate.jax.graph.trace import Equation, Source


class PlannedProgram:
    """A plan of a captured function, ready to run.

    Args:
        capture: The captured function.
        plan: A plan of its graph.
        exact: Whether every op stands alone, so that all plans have the same bits.
        fences: False omits the fences, for the test that they are necessary.

    Attributes:
        order: Ops in the plan's order.
        saved: Values that the forward leaves to the backward, without constants; empty for a whole step.
    """

    def __init__(self, capture: Capture, plan: Plan, *, exact: bool = False, fences: bool = True) -> None:
        self.capture, self._exact = capture, exact
        self.order = plan.order
        boundary = capture.graph.boundary
        self._boundary = len(self.order) if boundary is None else self.order.index(boundary)
        self._results = len(capture.trace.results) if capture.boundary is None else capture.boundary.results
        self._fences, self.saved = self._live(_fenced(self.order) if fences else set())

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The results of the captured function.

        Args:
            arguments: Its flat arguments, tangents included.
        """
        count = 0 if self.capture.boundary is None else len(self.capture.boundary.tangents)
        given = len(arguments) - count
        results, saved = self.forward(arguments[:given])
        return [*results, *self.backward(saved, arguments[given:])]

    def forward(self, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """The results of the forward and what it saves for the backward.

        Args:
            arguments: The arguments before the tangents.
        """
        trace = self.capture.trace
        values = dict(zip(trace.arguments, arguments, strict=False)) | dict(trace.constants)
        self._run(values, 0, self._boundary)
        return [_result(values, v) for v in trace.results[: self._results]], [values[v] for v in self.saved]

    def backward(self, saved: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        """The gradients: the results after those of the forward.

        Args:
            saved: What `forward` saved.
            tangents: The tangents.
        """
        trace = self.capture.trace
        numbers = () if self.capture.boundary is None else self.capture.boundary.tangents
        values = dict(zip(self.saved, saved, strict=True)) | dict(zip(numbers, tangents, strict=True)) | dict(trace.constants)
        self._run(values, self._boundary + 1, len(self.order))
        return [_result(values, v) for v in trace.results[self._results :]]

    def _run(self, values: dict[int, Any], start: int, stop: int) -> None:
        for p in range(start, stop):
            live = self._fences.get(p)
            if live:
                _fence(values, live)
            op = self.order[p]
            local = values
            if self._exact and self.capture.members[op]:
                local = values | _alone(values, self.capture.inputs[op])
            made = _compute(self.capture.members[op], self.capture.outputs[op], local)
            values.update(made)

    def _live(self, fenced: set[int]) -> tuple[dict[int, tuple[int, ...]], tuple[int, ...]]:
        """Values that are alive before each fenced computation, and those that the backward is given; no constants."""
        capture = self.capture
        constants = set(capture.trace.constants)
        live = {v for v in capture.trace.results[self._results :] if isinstance(v, int)}
        found: dict[int, tuple[int, ...]] = {}
        saved: tuple[int, ...] = ()
        if capture.boundary is None:
            live = {v for v in capture.trace.results if isinstance(v, int)}
        for p in range(len(self.order) - 1, -1, -1):
            op = self.order[p]
            live.difference_update(capture.outputs[op])
            if p == self._boundary:
                saved = tuple(sorted(live - constants))
            live.update(capture.inputs[op])
            if p in fenced:
                found[p] = tuple(sorted(live - constants))
        return found, saved


def _fenced(order: Sequence[int]) -> set[int]:
    """Positions at which a run of recomputations begins.

    Only these: more fences keep XLA from fusing what it could. With a fence also before first computations that the plan delays,
    a network of convolutions took 55 MB in place of 47, and more time.
    """
    seen: set[int] = set()
    found: set[int] = set()
    repeated_before = False
    for p, op in enumerate(order):
        repeated = op in seen
        if repeated and not repeated_before:
            found.add(p)
        seen.add(op)
        repeated_before = repeated
    return found


def _fence(values: dict[int, Any], live: Sequence[int]) -> None:
    """Put a barrier over values.

    In `jax.shard_map` a barrier makes all its outputs differ along the axes along which one of its inputs does, which parameters
    must not. They stay outside: every recomputation reads something that depends on the batch.
    """
    axes = {v: varying_axes(values[v]) for v in live}
    most = max(axes.values(), key=len)
    fenced = [v for v in live if axes[v] == most]
    values.update(zip(fenced, jax.lax.optimization_barrier(tuple(values[v] for v in fenced)), strict=True))


def _alone(values: Mapping[int, Any], inputs: Sequence[int]) -> dict[int, Any]:
    """The inputs of an op behind a barrier, so that XLA fuses the op with nothing before it."""
    by_axes: dict[frozenset[str], list[int]] = {}
    for v in inputs:
        by_axes.setdefault(varying_axes(values[v]), []).append(v)
    found: dict[int, Any] = {}
    for some in by_axes.values():
        found.update(zip(some, jax.lax.optimization_barrier(tuple(values[v] for v in some)), strict=True))
    return found


def _compute(chain: Sequence[Equation], outputs: Sequence[int], values: Mapping[int, Any]) -> dict[int, Any]:
    local: dict[int, Any] = {}
    for equation in chain:
        inputs = [local[v] if isinstance(v, int) and v in local else _read(values, v) for v in equation.inputs]
        local.update(zip(equation.outputs, bind(equation.eqn, inputs), strict=True))
    return {v: local[v] for v in outputs}


def _read(values: Mapping[int, Any], source: Source) -> Any:
    return values[source] if isinstance(source, int) else source.val


def _result(values: dict[int, Any], source: Source) -> Any:
    """A result, as an array also where it is written in the program."""
    return values[source] if isinstance(source, int) else as_array(source.val, source.aval)
