"""Runs a plan as a traceable function: equations in the plan's order, with a fence before every run of recomputations.

XLA merges equal computations and schedules the rest, which would undo a plan. A fence is one `jax.lax.optimization_barrier`: it
depends on all earlier computations, and all later ones depend on it. XLA also keeps a barrier over the inputs of a recomputation
alone, but then schedules the recomputation as early as it likes (docs/decisions/0013).

XLA for CPUs (jaxlib 0.10) removes barriers before it merges equal computations for the last time, and schedules. There a barrier
is a call of the identity that XLA may not inline: it takes no bytes, no time, and no kernel to compile. Ops that are fused more
than once in the program have an input behind a barrier with the newest value, and so do constants: XLA would compute them early.

Fences change XLA's fusions, and therefore the rounding. In an exact program every op stands alone between barriers, and XLA
compiles it to the same instructions in every plan (docs/decisions/0010).
"""

from __future__ import annotations

import itertools
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checkmate.core.plan import Plan
from checkmate.jax._compat import as_array, barrier, bind, is_tracer, varying_axes
from checkmate.jax.graph.capture import FUSED, REDUCTIONS, VIEWS, Capture, has_effects
from checkmate.jax.graph.trace import POINTWISE, behind_barriers, result

_Made = dict[tuple[int, ...], tuple[list[Any], dict[int, Any]]]
"""Values that equations read and computed, by the identities of equations and of the values that they read."""


class PlannedProgram:
    """A plan of a captured function, ready to run; ``saved`` are the values that the forward passes to the backward.

    In an exact program every op stands alone: all plans give the same bits. Without barriers it is the function as it is.
    """

    def __init__(self, capture: Capture, plan: Plan, *, exact: bool = False, barriers: bool = True) -> None:
        self.capture, self._exact, self._waiting = capture, exact, barriers and not exact
        self.order = plan.order
        boundary = capture.graph.boundary
        self._boundary = len(self.order) if boundary is None else self.order.index(boundary)
        self._results = len(capture.trace.results) if capture.boundary is None else capture.boundary.results
        self._fences, self.saved, self._last_read = self._lives(self._fenced())
        self._waits = self._in_order(self._computed_again()) if self._waiting else {}
        # XLA would make constants that are stored, and each copy of them, when the program begins.
        stored = {v for chain in capture.members for e in chain if e.kind not in FUSED | REDUCTIONS for v in e.read}
        stored.update(v for chain in capture.members if len(chain) == 1 for v in chain[0].outputs)
        constants = (e for chain in capture.members for e in chain if not e.read and e.kind == "broadcast_in_dim")
        self._constant = {id(e) for e in constants if not stored.isdisjoint(e.outputs)}
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
                values.update(self._computed(values, self.order[p]))
                for v in self._last_read[p]:
                    values.pop(v, None)
            return
        newest = self._newest(values, reversed(self.order[:start])) if self._waiting else None
        made: _Made = {}
        for p in range(start, stop):
            op = self.order[p]
            values.update(behind_barriers(values, self._fences.get(p, ())))
            given = ChainMap(behind_barriers(values, self.capture.inputs[op]), values) if self._exact else values
            values.update(self._computed(given, op, made, self._waits.get(p, {}), newest))
            if self._waiting and (found := self._newest(values, (op,))) is not None:
                newest = found

    def _computed(
        self,
        values: Mapping[int, Any],
        op: int,
        made: _Made | None = None,
        waits: Mapping[int, int] | None = None,
        newest: int | None = None,
    ) -> dict[int, Any]:
        """The outputs of an op. Constants, and an input of each equation in `waits`, wait until the newest value is known.

        Later readers of the newest value read it behind the barrier: XLA would store it twice, once for the barrier. An equation
        of several ops that reads the same values is in the program once, in `made`: XLA would merge copies, after long.
        """
        also = () if newest is None else (newest,)
        local: dict[int, Any] = {v: values[v] for v in (*self.capture.inputs[op], *also)}

        def waiting(value: Any) -> Any:
            # In `jax.shard_map` a value that is the same on all devices would vary behind a barrier with one that is not.
            if newest is None or not varying_axes(local[newest]) <= varying_axes(value):
                return value
            behind, waits = barrier((local[newest], value))
            if varying_axes(behind) == varying_axes(local[newest]):
                local[newest] = behind
            return waits

        for equation in self.capture.members[op]:
            if waits and (v := waits.get(id(equation))) is not None and v != newest:
                local[v] = waiting(local[v])
            if newest is not None and id(equation) in self._constant:
                literal: Any = equation.inputs[0]
                local.update(
                    zip(equation.outputs, bind(equation.eqn, [waiting(as_array(literal.val, literal.aval))]), strict=True)
                )
            elif made is None or has_effects(equation):
                local.update(equation.computed(local))
            else:
                read = [local[v] for v in equation.read]
                key = id(equation), *map(id, read)
                made[key] = made.get(key) or (read, equation.computed(local))
                local.update(made[key][1])
        return {v: local[v] for v in (*self.capture.outputs[op], *also)}

    def _computed_again(self) -> dict[int, dict[int, int]]:
        """By position: the equations that XLA would merge with earlier ones, each with the input to read behind a barrier."""
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
                    # A barrier stores what it is around: inputs of the op are stored already.
                    read = set(self.capture.inputs[op]).intersection(equation.read) or equation.read
                    v = min(read, key=lambda v: (-len(varying_axes(trace.types[v])), trace.size_bytes(v), v))
                    found.setdefault(p, {})[id(equation)] = v
                    local[v], key = next(fresh), (next(fresh),)
                since.add(key)
                local.update(dict.fromkeys(equation.outputs, number[key]))
            known.update((v, local[v]) for v in self.capture.outputs[op] if v in local)
        return self._with_copied_early(found)

    def _with_copied_early(self, found: dict[int, dict[int, int]]) -> dict[int, dict[int, int]]:
        """The same with gradients of convolutions: XLA copies what they read in another layout once it is known, and holds it."""
        graph, early = self.capture.graph, set(self.capture.trace.arguments)
        for p, number in enumerate(self.order):
            op, chain = graph.ops[number], self.capture.members[number]
            if op.phase == "forward":
                early.update(self.capture.outputs[number])
            elif op.kind == "conv_general_dilated":
                sizes = {v: self.capture.trace.size_bytes(v) for v in chain[-1].read if v in early}
                copied = [v for v, size in sizes.items() if size <= op.workspace_bytes]
                found.setdefault(p, {}).update({id(chain[-1]): max(copied, key=sizes.__getitem__)} if copied else {})
        return found

    def _in_order(self, found: dict[int, dict[int, int]]) -> dict[int, dict[int, int]]:
        """The same with an input of each op that need not wait for the op before it: XLA orders them as it likes.

        A program as it is keeps the order of XLA.
        """
        if all(op < later for op, later in itertools.pairwise(self.order)):
            return found
        trace, since = self.capture.trace, set[int]()  # values made since the last fence
        for p in range(1, len(self.order)):
            op, chain = self.order[p], self.capture.members[self.order[p]]
            read = set(self.capture.inputs[op]).difference(trace.constants)
            if p in self._fences:
                since.clear()
            elif self.capture.graph.ops[op].kind in POINTWISE:  # XLA may write the output over an input that ends here
                size = trace.size_bytes(self.capture.outputs[op][0])
                read = {v for v in read if v not in self._last_read[p] & since or trace.size_bytes(v) != size}
            if chain and p not in self._fences and read.isdisjoint(self.capture.outputs[self.order[p - 1]]):
                for v in sorted(read, key=lambda v: (v in trace.arguments, trace.size_bytes(v), v))[:1]:
                    found.setdefault(p, {}).setdefault(id(next(e for e in chain if v in e.read)), v)
            since.update(self.capture.outputs[op])
        return found

    def _newest(self, values: Mapping[int, Any], ops: Iterable[int]) -> int | None:
        """Number of the first value that some ops compute from arguments; None if there is none."""
        return next((v for op in ops for v in self.capture.outputs[op] if v in values and v in self._varying), None)

    def _fenced(self) -> set[int]:
        """Positions at which a run of recomputations begins, or a run of delayed ops, which come later than in the graph.

        In a program that is not exact, a delayed op is fenced if XLA would hold something for it that no op reads any more, by
        fusing it with the makers of its inputs. But each fence also prevents fusions, which can cost more bytes and time. From
        the first recomputation on, a fence also follows each run of ops that make results: nothing waits for a gradient of
        weights, and XLA would hold what it reads.
        """
        seen, found = set[int](), set[int]()
        results = {v for v in self.capture.trace.results if isinstance(v, int)}
        furthest, late_before, made = -1, False, False
        last = {v: p for p, op in enumerate(self.order) for v in self.capture.inputs[op]}
        ops = zip(self.capture.graph.ops, self.capture.outputs, self.capture.inputs, strict=True)
        fused = ((set(read).difference(self.capture.trace.arguments), outputs) for op, outputs, read in ops if op.kind in FUSED)
        behind = {v: read for read, outputs in fused for v in outputs}
        for p, op in enumerate(self.order):
            read = set[int]().union(
                *(behind.get(v, ()) for v in self.capture.inputs[op])
            )  # if XLA fuses it with what made its inputs
            late = op in seen or (op < furthest and (self._exact or any(last[v] < p for v in read)))
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
        one. Constants are not covered.
        """
        capture = self.capture
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
            read.update(inputs)
            if p in fenced:
                live_at_next, next_fence = set(live), set(read)
                found[p] = next_fence
                read.clear()
        fences = {p: sorted(values.difference(capture.trace.constants)) for p, values in found.items()}
        return {p: fence for p, fence in fences.items() if fence}, saved, last_read
