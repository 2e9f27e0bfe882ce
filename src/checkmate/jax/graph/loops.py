"""Loops in a traced program: what a loop stacks for its derivative can be computed again in the derivative's own iterations.

The derivative of a `jax.lax.scan` is a second scan, which reads values of each iteration from stacks that the first one writes. A
program with fewer stacks saves some values of each iteration, and its second loop computes the others from these, from the
carry before the iteration, and from what the first loop was given. An integer program chooses the values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from checkmate.core.errors import SolverError
from checkmate.jax._compat import any_equation, as_function, barrier, is_of_a_plan, opened, traced_as
from checkmate.jax.graph.capture import is_broadcast
from checkmate.jax.graph.trace import Equation, Source, Trace, behind_barriers, flattened, result
from checkmate.solvers.backends.highs import solve_integer
from checkmate.solvers.backends.program import Floats, Program, ProgramBuilder


@dataclass(frozen=True, slots=True, eq=False)
class _Loop:
    """A `scan` of a trace: its equation, its body, and its inputs and outputs by kind."""

    equation: Equation
    body: Trace
    makers: Mapping[int, Equation]  # of values that are broadcast from smaller ones

    def constants(self, values: dict[int, Any]) -> list[Any]:
        """The constants of an iteration. Each makes broadcasts again, which XLA would hold through the loop, like a mask."""
        read = [(s, self.makers.get(s) if isinstance(s, int) else None) for s in self.split(self.equation.inputs)[0]]
        return [_value(values if maker is None else maker.computed(values), s) for s, maker in read]

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Constants, carries and stacks among the inputs, or among the arguments of the body."""
        params = self.equation.eqn.params
        first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
        return list(values[:first]), list(values[first:last]), list(values[last:])

    def ends(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Carries and stacks among the outputs, or among the results of the body."""
        count = self.equation.eqn.params["num_carry"]
        return list(values[:count]), list(values[count:])

    def run(self, body: Any, carry: Any, stacks: Any, length: int) -> tuple[Any, Any]:
        """Some iterations of the loop with another body."""
        params = self.equation.eqn.params
        with traced_as(self.equation.eqn):
            return jax.lax.scan(body, carry, stacks, length, params["reverse"], params["unroll"])


class _Pair:
    """A loop and the loop of its derivative, with the stacks that only the derivative reads."""

    def __init__(self, loop: _Loop, derivative: _Loop, dropped: Sequence[int], cost_ns: Callable[..., int]) -> None:
        self.loop, self.derivative = loop, derivative
        body, self.length = loop.body, loop.equation.eqn.params["length"]
        _, sources = loop.ends(body.results)
        stacks = list(zip(loop.ends(loop.equation.outputs)[1], sources, strict=True))
        self.read = {v: source for v, source in stacks if v in dropped}
        self.kept = {v: source for v, source in stacks if v not in dropped}
        wanted = {source for source in self.read.values() if isinstance(source, int)}
        free = {source for source in self.kept.values() if isinstance(source, int)}
        carries = loop.split(body.arguments)[1]
        made = [v for equation in body.equations for v in equation.outputs]
        sizes = np.array([0.0 if v in free else float(self.length * body.size_bytes(v)) for v in made])
        self._cost = np.array([float(self.length * cost_ns((e,))) for e in body.equations])
        self._made, self._sizes = made, sizes
        self._carries = [v for v in carries if (v not in free and any(v in e.read for e in body.equations)) or v in wanted]
        self._program = cut_program(body.equations, wanted, {v: j for j, v in enumerate(made)}, sizes)
        self.stacked_bytes = self.length * sum(body.size_bytes(v) for v in wanted if v in {*made, *self._carries})
        self._each_bytes, self._restart_bytes = (sum(map(body.size_bytes, some)) for some in (self._carries, carries))
        self.carry_bytes = self.length * self._each_bytes

    def choose(self, room_bytes: float) -> None:
        """Choose the values that the loop saves, within some bytes as far as the carries leave them.

        Below the bytes of all carries the loop is nested: inner loops save only their first carries, and run again.
        """

        def left(inner: int) -> float:
            return room_bytes - (self.length // inner * self._restart_bytes * (inner < self.length) + inner * self._each_bytes)

        lengths = [n for n in range(2, self.length + 1) if self.length % n == 0]
        self._inner = self.length if left(self.length) >= 0 else max(lengths, key=left)
        most = max(0.0, left(self._inner)) * self.length / self._inner
        again, saved, _ = cheapest_cut(self._program, self._cost, self._sizes, min(most, self._sizes.sum()), price=1e-12)
        body = self.loop.body
        self.again = [e for e, chosen in zip(body.equations, again, strict=True) if chosen]
        read = {v for e in self.again for v in e.read} | {s for s in self.read.values() if isinstance(s, int)}
        known = {v: stack for stack, v in self.kept.items() if isinstance(v, int)}
        self.saved = [v for v, chosen in zip(self._made, saved, strict=True) if chosen and v in read and v not in known]
        self.saved += [v for v in self.loop.split(body.arguments)[1] if v in read and v not in known]
        self.known = {v: stack for v, stack in known.items() if v in read}

    def forward(self, values: dict[int, Any]) -> list[Any]:
        """Run the loop: its carries and kept stacks go to `values`, and the stacks of the saved values are returned."""
        loop, step = self.loop, self._step(values)
        _, carry, stacks = loop.split([_value(values, s) for s in loop.equation.inputs])

        def of_some(carry: Any, slices: Any) -> Any:
            ends, (kept, _) = loop.run(step, carry, slices, self._inner)
            return ends, (kept, carry)

        if self._inner == self.length:
            ends, (kept, saved) = loop.run(step, carry, stacks, self.length)
        else:
            ends, (kept, saved) = loop.run(of_some, carry, self._folded(stacks), self.length // self._inner)
            kept = self._unfolded(kept)
        values.update(zip((*loop.ends(loop.equation.outputs)[0], *self.kept), (*ends, *kept), strict=True))
        return saved

    def _step(self, values: dict[int, Any]) -> Callable[[Any, Any], Any]:
        """The body of the loop; it stacks values that others read, and those to save."""
        loop, body = self.loop, self.loop.body

        def step(carry: Any, slices: Any) -> Any:
            given = (*loop.constants(values), *carry, *slices)
            local = dict(zip(body.arguments, given, strict=True)) | dict(body.constants)
            for equation in body.equations:
                local.update(equation.computed(local))
            ends = [result(local, source) for source in loop.ends(body.results)[0]]
            return ends, ([result(local, source) for source in self.kept.values()], [local[v] for v in self.saved])

        return step

    def backward(self, values: dict[int, Any], saved: list[Any]) -> None:
        """Run the loop of the derivative, in which each iteration computes again the values that are not saved."""
        theirs, own, body = self.loop, self.derivative, self.loop.body
        given = theirs.split([_value(values, s) for s in theirs.equation.inputs])[2]
        fixed, carries, sliced = theirs.split(body.arguments)
        known = [values[stack] for stack in self.known.values()]
        sources = [self.read.get(s) if isinstance(s, int) else None for s in own.equation.inputs]
        inputs = [_value(values, s) if source is None else None for s, source in zip(own.equation.inputs, sources, strict=True)]
        _, carry, stacks = own.split(inputs)
        closed = own.equation.eqn.params["jaxpr"]
        run = as_function(closed, opened(closed)[1])

        def step(carry: Any, slices: Any) -> Any:
            # Without barriers XLA takes a slice again for each reader, and stores them all. With one, it stores a carry twice.
            stacks, given, known = jax.tree.map(barrier, slices[:3])
            saved = [a if v in carries else barrier(a) for v, a in zip(self.saved, slices[3], strict=True)]
            local = dict(zip((*fixed, *sliced), (*theirs.constants(values), *given), strict=True)) | dict(body.constants)
            local |= dict(zip((*self.known, *self.saved), (*known, *saved), strict=True))
            for equation in self.again:
                local.update(equation.computed(local))
            pairs = zip(stacks, own.split(sources)[2], strict=True)
            read = [stack if source is None else result(local, source) for stack, source in pairs]
            return own.ends(run(*own.constants(values), *carry, *read))

        def of_some(carry: Any, slices: Any) -> Any:
            stacks, given, known, first = slices
            _, (_, saved) = theirs.run(self._step(values), first, given, self._inner)
            return own.run(step, carry, (stacks, given, known, saved), self._inner)

        slices = (stacks, given, known)  # None has no leaves, and stays None in every iteration
        if self._inner == self.length:
            ends, ys = own.run(step, carry, (*slices, saved), self.length)
        else:
            ends, ys = own.run(of_some, carry, (*self._folded(slices), saved), self.length // self._inner)
            ys = self._unfolded(ys)
        values.update(zip(own.equation.outputs, (*ends, *ys), strict=True))

    def _folded(self, stacks: Any) -> Any:
        return jax.tree.map(lambda a: a.reshape(-1, self._inner, *a.shape[1:]), stacks)

    def _unfolded(self, stacks: Any) -> Any:
        return jax.tree.map(lambda a: a.reshape(self.length, *a.shape[2:]), stacks)


class Loops:
    """The loops of a trace that have a derivative in it; ``stacked_bytes`` are those of the stacks that could be left out."""

    def __init__(self, trace: Trace, cost_ns: Callable[..., int]) -> None:
        self._trace = trace
        readers: dict[int, list[Equation]] = {}
        for equation in trace.equations:
            for v in equation.read:
                readers.setdefault(v, []).append(equation)
        results = {v for v in trace.results if isinstance(v, int)}
        self._pairs: list[_Pair] = []
        scans = [e for e in trace.equations if e.kind == "scan" and not _must_run_once(e)]
        makers = {e.outputs[0]: e for e in trace.equations if is_broadcast(e)}
        loops = {id(e): _Loop(e, flattened(e.eqn.params["jaxpr"]), makers) for e in scans}
        taken = set[int]()
        for equation in scans:
            loop, found = loops[id(equation)], dict[int, list[int]]()
            for v in loop.ends(equation.outputs)[1]:
                used = readers.get(v, [])
                if len(used) == 1 and id(used[0]) in loops and v not in results and equation.eqn.params["length"] > 1:
                    stacks = loops[id(used[0])].split(used[0].inputs)[2]
                    if stacks.count(v) == used[0].inputs.count(v) == 1:
                        found.setdefault(id(used[0]), []).append(v)
            reader = max(found, key=lambda r: sum(map(trace.size_bytes, found[r])), default=None)
            if reader is not None and not taken.intersection((id(equation), reader)):
                taken.update((id(equation), reader))
                self._pairs.append(_Pair(loop, loops[reader], found[reader], cost_ns))
        self.stacked_bytes = sum(pair.stacked_bytes for pair in self._pairs)
        shares = [pair.carry_bytes / max(1, pair.stacked_bytes) for pair in self._pairs]
        # If loops save fewer bytes, some of them are nested.
        self.carry_bytes = math.ceil(self.stacked_bytes * min(1, max(shares, default=0)))

    def saving(self, room_bytes: int, arguments: Sequence[Any]) -> Trace:
        """The program for the same arguments, whose loops stack about `room_bytes` at most for their derivatives."""
        trace = self._trace
        for pair in self._pairs:
            pair.choose(room_bytes * pair.stacked_bytes / max(1, self.stacked_bytes))
        first = {id(pair.loop.equation): pair for pair in self._pairs}
        second = {id(pair.derivative.equation): pair for pair in self._pairs}

        def run(*arrays: Any) -> list[Any]:
            values = dict(zip(trace.arguments, arrays, strict=True)) | dict(trace.constants)
            saved: dict[int, list[Any]] = {}
            for equation in trace.equations:
                if id(equation) in first:
                    saved[id(first[id(equation)])] = first[id(equation)].forward(values)
                elif id(equation) in second:
                    second[id(equation)].backward(values, saved[id(second[id(equation)])])
                else:
                    values.update(equation.computed(values))
            return [result(values, v) for v in trace.results]

        return flattened(jax.make_jaxpr(run)(*arguments))


def with_bodies_alone(trace: Trace) -> Trace:
    """The trace with a barrier before each equation in its loops, which have the same bits then whatever they save."""

    def alone(closed: Any) -> Any:
        body = flattened(closed, checkpoints=False)

        def run(*arrays: Any) -> list[Any]:
            values = dict(zip(body.arguments, arrays, strict=True)) | dict(body.constants)
            for equation in body.equations:
                values.update(equation.computed(behind_barriers(values, equation.read, in_body=True)))
            values.update(behind_barriers(values, (v for v in dict.fromkeys(body.results) if isinstance(v, int)), in_body=True))
            return [result(values, v) for v in body.results]

        return jax.make_jaxpr(run)(*opened(closed)[0].in_avals)

    def changed(equation: Equation) -> Equation:
        if equation.kind != "scan" or _must_run_once(equation):
            return equation
        params = equation.eqn.params
        return replace(equation, eqn=equation.eqn.replace(params=params | {"jaxpr": alone(params["jaxpr"])}))

    return replace(trace, equations=tuple(map(changed, trace.equations)))


def _must_run_once(equation: Equation) -> bool:
    """Whether a loop has effects, or a plan in its body; collectives inside only need their axes."""
    effects = (type(effect).__name__ for effect in equation.eqn.effects)
    return any(name != "NamedAxisEffect" for name in effects) or any_equation(equation.eqn.params["jaxpr"], is_of_a_plan)


def _value(values: dict[int, Any], source: Source) -> Any:
    return values[source] if isinstance(source, int) else source.val


def cut_program(ahead: Sequence[Equation], backward: Set[int], saves: Mapping[int, int], size_bytes: Floats) -> Program:
    """Variables: the equations of the forward to compute again, then the names to save. The last row limits the saved bytes.

    Every value that the derivative or a recomputation reads is computed again or saved.
    """
    maker = {v: k for k, equation in enumerate(ahead) for v in equation.outputs}
    builder = ProgramBuilder()
    again, saved = builder.add_columns(np.zeros(len(ahead))), builder.add_columns(np.zeros(len(size_bytes)))
    rows = [(-1, v) for v in sorted(backward)] + [(k, v) for k, equation in enumerate(ahead) for v in equation.read]
    rows = [(reader, again[maker[v]], saved[saves[v]] if v in saves else -1) for reader, v in rows if v in maker]
    readers, makers, names = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    builder.add_rows([(makers, 1.0), (names, 1.0), (readers, -1.0)], low=np.where(readers < 0, 1.0, 0.0))
    builder.add_row(saved, size_bytes)
    return builder.build()


def cheapest_cut(program: Program, cost: Floats, size_bytes: Floats, most_bytes: float, price: float) -> tuple[Any, Any, float]:
    """Whether each equation is computed again and each value saved, for the least cost plus price, and a bound on this sum."""
    limited = np.append(program.row_high[:-1], most_bytes)
    priced = replace(program, cost=np.concatenate([cost, price * size_bytes]), row_high=limited)
    found = solve_integer(priced, absolute_gap=1e-5 * max(1.0, float(cost.sum())))  # proofs to the last unit may take minutes
    if found.solution is None:
        raise SolverError("the integer program for the saved values of a loop has no solution")
    again, saved = np.split(found.solution > 0.5, [len(cost)])
    return again, saved, found.bound
