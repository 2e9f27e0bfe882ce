"""Translates a trace into a `checkmate.Graph`, by the properties of JAX's primitives.

The properties are: which primitives XLA fuses, arithmetic, and the bytes that loops and branches need inside. Chains of equations
that XLA fuses into one loop are one op.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgspec
from jax.extend.core import jaxprs_in_params

from checkmate.core.graph import BOUNDARY, Graph, Op, Phase, Value
from checkmate.cost.store import OpCost
from checkmate.jax._compat import scopes_of, source_of
from checkmate.jax.graph.trace import POINTWISE, Boundary, Equation, Trace, table_bytes, type_bytes, types_from_outside

VIEWS = frozenset({"expand_dims", "name", "pbroadcast", "pcast", "pvary", "reshape", "reshard", "sharding_constraint", "squeeze"})
"""Primitives whose output is the same bytes in the same order, before XLA divides arrays."""

MOVES = VIEWS | {"rev", "slice", "transpose"}
"""Primitives each of whose output elements is a copy of an input element."""

BROADCASTS = frozenset({"broadcast_in_dim", "iota"})
"""Primitives that XLA computes again in every loop that reads them, because they read next to nothing."""

REDUCTIONS = frozenset({f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")} | {"argmax", "argmin"})
"""Primitives that XLA fuses with the computation of their input."""

FUSED = POINTWISE | MOVES | BROADCASTS | {"concatenate", "dynamic_slice", "gather", "pad"}
"""Primitives that XLA fuses into the loops that read them: an output that one loop reads is never stored."""

KEEP_SHAPES = frozenset({"axis_index", "pbroadcast", "pcast", "pmax", "pmin", "psum", "psum2", "psum_invariant", "pvary"})
"""Collectives that do not depend on the number of devices, but for their values."""

COLLECTIVES = KEEP_SHAPES | {"all_gather", "all_gather_invariant", "all_to_all", "ppermute", "psum_scatter", "reduce_scatter"}
"""Primitives that need a named axis around them."""


def collectives_of(eqns: Iterable[Any]) -> dict[str, set[str]]:
    """The axes that must be named around some equations and their bodies, each with the primitives that need it."""
    found: dict[str, set[str]] = {}
    for eqn in eqns:
        if eqn.primitive.name in COLLECTIVES:
            axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            named = axes if isinstance(axes, (tuple, list)) else (axes,)
            for axis in named:
                if not isinstance(axis, int):  # an axis of the arrays, over which `jax.vmap` ran
                    found.setdefault(axis, set()).add(eqn.primitive.name)
        elif eqn.primitive.name != "shard_map":  # it names the axes inside
            for body in jaxprs_in_params(eqn.params):
                for axis, kinds in collectives_of(body.eqns).items():
                    found.setdefault(axis, set()).update(kinds)
    return found


def flops(eqn: Any) -> int:
    """Floating-point operations of an equation: counted for products, convolutions and bodies of loops, else one per element."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        contracted = params["dimension_numbers"][0][0]
        lhs = eqn.invars[0].aval.shape
        return 2 * _elements(eqn) * math.prod(lhs[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
        return 2 * _elements(eqn) * math.prod(kernel[d] for d in spec[1:])
    inside = [sum(map(flops, body.eqns)) for body in jaxprs_in_params(eqn.params)]
    if inside:
        return max(inside) * params.get("length", 1)
    return _elements(eqn) if name in POINTWISE | REDUCTIONS else 0


def moved_bytes(eqn: Any) -> int:
    """Bytes that an equation reads and writes; of a loop, those of all iterations."""
    inside = [sum(map(moved_bytes, body.eqns)) for body in jaxprs_in_params(eqn.params)]
    moved = () if eqn.primitive.name in VIEWS | {"optimization_barrier"} else (*eqn.invars, *eqn.outvars)
    own = sum(type_bytes(v.aval) for v in moved)
    return max([own, *(i * eqn.params.get("length", 1) for i in inside)])


def has_effects(equation: Equation) -> bool:
    """Whether an equation must run exactly once."""
    return bool(equation.eqn.effects)


def is_broadcast(equation: Equation) -> bool:
    """Whether an equation reads next to nothing for what it writes."""
    read, written = ([type_bytes(v.aval) for v in some] for some in (equation.eqn.invars, equation.eqn.outvars))
    return equation.kind in BROADCASTS and 2 * sum(read) <= sum(written)


def _elements(eqn: Any) -> int:
    arrays = eqn.invars if eqn.primitive.name in REDUCTIONS else eqn.outvars
    return sum(math.prod(v.aval.shape) for v in arrays if hasattr(v.aval, "shape"))


class Fusions(msgspec.Struct, frozen=True):
    """The outputs that XLA stores of a compiled program; equations are given by their positions."""

    temp_bytes: int
    members: dict[int, tuple[int, ...]]  # by each equation whose output is stored: the equations of the loop that computes it
    made_bytes: dict[int, int]  # the bytes that are computed together with this output, copies in other layouts included


Costs = Callable[[Sequence[tuple[Equation, ...]]], Sequence[OpCost]]
"""Returns the costs of some ops; each op is given as the equations of one loop."""


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A graph together with the trace that it describes; tuples of tuples have one entry for each op."""

    graph: Graph
    trace: Trace
    members: tuple[tuple[Equation, ...], ...]  # equations of each op, in order; none for the boundary
    outputs: tuple[tuple[int, ...], ...]  # numbers of the trace's values that each op makes
    inputs: tuple[tuple[int, ...], ...]  # numbers of the values that each op reads, arguments and constants included
    boundary: Boundary | None  # between forward and backward; None for a whole step
    fusions: Fusions | None = None


def capture_trace(
    trace: Trace,
    costs: Costs,
    name: str = "",
    *,
    boundary: Boundary | None = None,
    donated_bytes: int = 0,
    fusions: Fusions | None = None,
) -> Capture:
    """The graph of a traced function.

    XLA allocates arguments and results before a program runs. Both count as resident bytes, except results that reuse the
    buffers of donated arguments. Before a result is made, its buffer holds another value: the result takes the bytes of that
    value in the graph, and only the others are resident. Without a boundary it is a whole step.
    """
    return _Builder(trace, boundary, fusions).build(costs, name, donated_bytes)


class _Builder:
    def __init__(self, trace: Trace, boundary: Boundary | None, fusions: Fusions | None) -> None:
        self.trace, self.boundary, self.fusions = trace, boundary, fusions
        self.position = {id(equation): i for i, equation in enumerate(trace.equations)}
        self.last_reader = {v: equation for equation in trace.equations for v in equation.read}
        self.over = set[int]()  # equations that write over an input
        self.results = {v for v in trace.results if isinstance(v, int)}
        self.made = {v for equation in trace.equations for v in equation.outputs} - self.results
        self.phases = phases_of_pair(trace, boundary) if boundary is not None else _phases_of_step(trace)

    def build(self, costs: Costs, name: str, donated_bytes: int) -> Capture:
        members = self._chains()
        measured = iter(costs(members))
        reads, writes = [tuple(types_from_outside(chain)) for chain in members], [chain[-1].outputs for chain in members]
        tangents: tuple[int, ...] = ()
        if self.boundary is not None:
            at, tangents = sum(self.phases[id(chain[-1])] == "forward" for chain in members), self.boundary.tangents
            members.insert(at, ())
            reads.insert(at, tuple(dict.fromkeys(v for v in self.trace.results[: self.boundary.results] if isinstance(v, int))))
            writes.insert(at, tangents)
        made = [v for outputs in writes for v in outputs]
        number = {v: k for k, v in enumerate(made)}
        lent = {} if donated_bytes else self._lent(reads, writes)
        sizes = (lent.get(v, 0) if v in self.results else self.trace.size_bytes(v) for v in made)
        values = [Value(str(self.trace.types[v]), size, kept=v in self.results) for v, size in zip(made, sizes, strict=True)]
        ops = [
            self._op(chain, measured, tuple(number[v] for v in read if v in number), tuple(number[v] for v in written))
            for chain, read, written in zip(members, reads, writes, strict=True)
        ]
        # Arguments, constants and results; tangents are values of the graph.
        resident = {*self.trace.arguments, *self.trace.constants, *self.results}.difference(tangents)
        resident_bytes = sum(map(self.trace.size_bytes, resident)) + table_bytes(len(self.trace.results))
        resident_bytes -= donated_bytes + sum(lent.values())
        graph = Graph(tuple(ops), tuple(values), resident_bytes=resident_bytes, name=name)
        return Capture(graph, self.trace, tuple(members), tuple(writes), tuple(reads), self.boundary, self.fusions)

    def _lent(self, reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]]) -> dict[int, int]:
        """By result: bytes of the value that its buffer holds at the peak of keeping everything, before the result is made."""
        made = {v: p for p, outputs in enumerate(writes) for v in outputs}
        last = made | {v: p for p, inputs in enumerate(reads) for v in inputs if v in made}
        size, change = self.trace.size_bytes, [0] * (len(writes) + 1)
        for v in made.keys() - self.results:
            change[made[v]] += size(v)
            change[last[v] + 1] -= size(v)
        live = [*itertools.accumulate(change)]
        peak = max(range(len(live)), key=live.__getitem__)
        free, found = sorted(self.results.intersection(made), key=lambda v: (size(v), made[v])), dict[int, int]()
        # XLA places the largest values first, each in the smallest buffer that is free while it lives.
        for v in sorted((v for v in made.keys() - self.results if made[v] <= peak <= last[v]), key=lambda v: (-size(v), v)):
            lender = next((r for r in free if size(r) >= size(v) and made[r] > last[v]), None)
            if lender is not None:
                found[lender] = size(v)
                free.remove(lender)
        return found

    def _chains(self) -> list[tuple[Equation, ...]]:
        """The equations of each op: forward ops first if there is a boundary, else in the order of their last equations."""
        equations = self.trace.equations
        readers: dict[int, list[int]] = {}
        for i, equation in enumerate(equations):
            for v in equation.read:
                readers.setdefault(v, []).append(i)
        heads: list[set[int]] = [set() for _ in equations]  # the ends of the chains that each equation is part of
        for i in range(len(equations) - 1, -1, -1):
            heads[i] = self._heads(i, readers, heads)
        chains: dict[int, list[Equation]] = {}
        for i, equation in enumerate(equations):
            for head in heads[i]:
                chains.setdefault(head, []).append(equation)
        found = [tuple(chains[head]) for head in sorted(chains)]
        return found if self.boundary is None else sorted(found, key=lambda chain: self.phases[id(chain[-1])] != "forward")

    def _heads(self, i: int, readers: Mapping[int, Sequence[int]], heads: Sequence[set[int]]) -> set[int]:
        """The ends of the chains that compute an equation; the equation itself is one if its output is stored."""
        equations, equation = self.trace.equations, self.trace.equations[i]
        read_by = [r for v in equation.outputs for r in readers.get(v, ())] if len(equation.outputs) == 1 else []
        used = [equations[r] for r in read_by]
        if not used or self.results.intersection(equation.outputs) or any(map(has_effects, (equation, *used))):
            return {i}
        ends = {head for r in read_by for head in heads[r]}
        if self._overwritten(i, read_by, ends):
            self.over.update(read_by)
            return ends
        # A view takes no bytes, and what a result is a view of is computed into the buffer of the result.
        moved = len(used) == 1 and used[0].kind in VIEWS | {"transpose"} and self.results.issuperset(used[0].outputs)
        if equation.kind in VIEWS or moved:
            return ends
        if self.fusions is not None:
            members, once = self.fusions.members, equation.kind not in FUSED
            stored = i in members or (once and len(ends) > 1)
            return {i, *(end for end in ends if i in members.get(end, ()) and not once)} if stored else ends
        fuse = equation.kind in FUSED and all(e.kind in FUSED | REDUCTIONS for e in used)
        return ends if fuse and (is_broadcast(equation) or len(ends) == 1) else {i}

    def _overwritten(self, i: int, read_by: Sequence[int], ends: Set[int]) -> bool:
        """Whether the only reader of a product writes its own output over it, and over no product that is made later."""
        product, reader = self.trace.equations[i], self.trace.equations[read_by[0]]
        return (
            len(read_by) == 1
            and ends == {*read_by}
            and self.over.isdisjoint(read_by)
            and product.kind == "dot_general"
            and reader.kind in POINTWISE
            and self.trace.size_bytes(product.outputs[0]) == self.trace.size_bytes(reader.outputs[0])
            and self.phases[id(product)] == self.phases[id(reader)]
        )

    def _op(self, chain: Sequence[Equation], measured: Iterator[OpCost], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Op:
        if not chain:
            return Op(BOUNDARY, inputs, outputs, 0, recomputable=False, phase="loss", kind=BOUNDARY)
        last, measure = chain[-1], next(measured)
        copies = 0  # of the output, in other layouts, that XLA makes together with it
        if self.fusions is not None and last.kind in FUSED:
            copies = self.fusions.made_bytes.get(self.position[id(last)], 0) - sum(map(self.trace.size_bytes, last.outputs))
        over = self.trace.size_bytes(last.outputs[0]) if self.position[id(last)] in self.over else 0
        workspace = max(0, measure.workspace_bytes - over, copies)
        if last.kind == "conv_general_dilated":  # an input that ends here ends once it is copied, before another as large is
            ends = {self.trace.size_bytes(v) for v in last.read if v in self.made and self.last_reader[v] is last}
            workspace -= max((size for size in ends if 2 * size <= workspace), default=0)
        return Op(
            name=_name(chain),
            inputs=inputs,
            outputs=outputs,
            cost=measure.cost_ns,
            workspace_bytes=workspace,
            recomputable=not any(map(has_effects, chain)),
            phase=self.phases[id(chain[-1])],
            kind=next((e.kind for e in chain if e.kind not in FUSED), last.kind),
            source=source_of(last.eqn),
        )


def _name(chain: Sequence[Equation]) -> str:
    scopes = scopes_of(chain[-1].eqn)
    kinds = list(dict.fromkeys(equation.kind for equation in chain))
    shown = "+".join(kinds if len(kinds) <= 3 else [kinds[0], "...", kinds[-1]])
    return f"{scopes}/{shown}" if scopes else shown


def phases_of_pair(trace: Trace, boundary: Boundary) -> dict[int, Phase]:
    """Phase of each equation of a function and its derivative, by its identity: backward if it depends on a tangent."""
    late = set(boundary.tangents)
    phases: dict[int, Phase] = {}
    for equation in trace.equations:
        backward = not late.isdisjoint(equation.read)
        phases[id(equation)] = "backward" if backward else "forward"
        if backward:
            late.update(equation.outputs)
    return phases


def _phases_of_step(trace: Trace) -> dict[int, Phase]:
    """Phase of each equation by the transformations around it: JAX's backward is a transposed function."""
    late: set[int] = set()  # gradients, and values computed from them
    phases: dict[int, Phase] = {}
    for equation in trace.equations:
        backward, after = "transpose(" in scopes_of(equation.eqn), not late.isdisjoint(equation.read)
        phases[id(equation)] = "backward" if backward else "optimizer" if after else "forward"
        if backward or after:
            late.update(equation.outputs)
    return phases
