"""Translates a trace into a `checkmate.Graph`, by the properties of JAX's primitives.

The properties are: which primitives XLA fuses, arithmetic, and the bytes that loops and branches need inside. Chains of equations
that XLA fuses into one loop are one op.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from checkmate.core.graph import BOUNDARY, Graph, Op, Phase, Value
from checkmate.cost.store import OpCost
from checkmate.jax._compat import opened, scopes_of, source_of
from checkmate.jax.graph.trace import Boundary, Equation, Trace, type_bytes, types_from_outside

_UNARY = (
    "abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz complex conj convert_element_type copy copy_p cos "
    "cosh digamma erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite lgamma log log1p logistic neg not "
    "population_count real reduce_precision round rsqrt sign sin sinh sqrt square stop_gradient tan tanh"
)
_OTHERS = (
    "add add_any and atan2 clamp div eq ge gt igamma igammac le lt max min mul ne nextafter or polygamma pow random_gamma_grad "
    "regularized_incomplete_beta rem select_n shift_left shift_right_arithmetic shift_right_logical sub xor zeta"
)
POINTWISE = frozenset(f"{_UNARY} {_OTHERS}".split())
"""Primitives whose output has the shape of an input, computed element by element."""

VIEWS = frozenset({"expand_dims", "name", "pbroadcast", "pcast", "pvary", "reshape", "squeeze"})
"""Primitives whose output is the same bytes in the same order."""

MOVES = VIEWS | {"rev", "slice", "transpose"}
"""Primitives each of whose output elements is a copy of an input element."""

BROADCASTS = frozenset({"broadcast_in_dim", "iota"})
"""Primitives that XLA computes again in every loop that reads them, because they read next to nothing."""

_CHEAP = (
    "abs add add_any and ceil clamp convert_element_type copy copy_p eq floor ge gt integer_pow is_finite le lt max min mul ne "
    "neg not or population_count reduce_precision round select_n shift_left shift_right_arithmetic shift_right_logical sign "
    "square stop_gradient sub xor"
)
CHEAP = MOVES | set(_CHEAP.split())
"""Primitives that XLA computes in every loop that reads them, if that reads no more values."""

REDUCTIONS = frozenset({f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")} | {"argmax", "argmin"})
"""Primitives that XLA fuses with the computation of their input."""

FUSED = POINTWISE | MOVES | BROADCASTS | {"concatenate", "dynamic_slice", "gather", "pad"}
"""Primitives that XLA fuses into the loops that read them: an output that one loop reads is never stored."""

KEEP_SHAPES = frozenset({"axis_index", "pbroadcast", "pcast", "pmax", "pmin", "psum", "psum2", "psum_invariant", "pvary"})
"""Collectives that do not depend on the number of devices, but for their values."""

COLLECTIVES = KEEP_SHAPES | {"all_gather", "all_gather_invariant", "all_to_all", "ppermute", "psum_scatter", "reduce_scatter"}
"""Primitives that need a named axis around them."""


def _bodies(eqn: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation, opened."""
    for parameter in eqn.params.values():
        for item in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield opened(item)[0]


def collectives_of(eqns: Iterable[Any]) -> dict[str, set[str]]:
    """The axes that must be named around some equations and their bodies, each with the primitives that need it."""
    found: dict[str, set[str]] = {}
    for eqn in eqns:
        if eqn.primitive.name in COLLECTIVES:
            axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
            for axis in (axes,) if isinstance(axes, str) else axes:
                found.setdefault(axis, set()).add(eqn.primitive.name)
        elif eqn.primitive.name != "shard_map":  # it names the axes inside
            for body in _bodies(eqn):
                for axis, kinds in collectives_of(body.eqns).items():
                    found.setdefault(axis, set()).update(kinds)
    return found


def workspace_bytes(eqn: Any) -> int:
    """Bytes that the bodies of an equation need above their arguments, if every value is freed after its last reader.

    For branches these are the bytes of the largest branch, for a loop those of one iteration.
    """
    return max((peak_bytes(body) for body in _bodies(eqn)), default=0)


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
    inside = [sum(map(flops, body.eqns)) for body in _bodies(eqn)]
    if inside:
        return max(inside) * params.get("length", 1)
    return _elements(eqn) if name in POINTWISE | REDUCTIONS else 0


def moved_bytes(eqn: Any) -> int:
    """Bytes that an equation reads and writes; of a loop, those of all iterations."""
    inside = [sum(map(moved_bytes, body.eqns)) for body in _bodies(eqn)]
    own = sum(type_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars))
    return max([own, *(i * eqn.params.get("length", 1) for i in inside)])


def has_effects(equation: Equation) -> bool:
    """Whether an equation must run exactly once."""
    return bool(equation.eqn.effects)


def is_broadcast(equation: Equation) -> bool:
    """Whether an equation reads next to nothing for what it writes."""
    read, written = ([type_bytes(v.aval) for v in some] for some in (equation.eqn.invars, equation.eqn.outvars))
    return equation.kind in BROADCASTS and 2 * sum(read) <= sum(written)


def is_view(equation: Equation, producers: Mapping[int, Equation]) -> bool:
    """Whether XLA gives the output of an equation the buffer of its input, given the equation that makes each value."""
    if len(equation.read) != 1:
        return False
    # XLA computes the transpose of a product of matrices as the product of their transposes.
    producer = producers.get(equation.read[0])
    folded = equation.kind == "transpose" and producer is not None and producer.kind == "dot_general"
    return equation.kind in VIEWS or folded


def _elements(eqn: Any) -> int:
    arrays = eqn.invars if eqn.primitive.name in REDUCTIONS else eqn.outvars
    return sum(math.prod(v.aval.shape) for v in arrays if hasattr(v.aval, "shape"))


def peak_bytes(jaxpr: Any) -> int:
    """Peak of the values that a jaxpr makes, each freed after its last reader; chains of pointwise equations store nothing."""
    same: dict[Any, Any] = {}  # an output of a barrier shares the bytes of its input
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "optimization_barrier":
            same |= {v: same.get(w, w) for v, w in zip(eqn.outvars, eqn.invars, strict=True) if not isinstance(w, Literal)}
    read = [(same.get(v, v), i) for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if not isinstance(v, Literal)]
    readers, end = Counter(v for v, _ in read), len(jaxpr.eqns)
    last = dict(read) | {same.get(v, v): end for v in jaxpr.outvars if not isinstance(v, Literal)}
    dying: dict[int, list[Any]] = {}
    for v, i in last.items():
        dying.setdefault(i, []).append(v)
    size: dict[Any, int] = {}
    live = peak = 0
    for i, eqn in enumerate(jaxpr.eqns):
        for v in eqn.outvars:
            fused = eqn.primitive.name in FUSED and readers[v] == 1 and last[v] < end
            size[v] = 0 if fused or v in same or v not in last else type_bytes(v.aval)
            live += size[v]
        peak = max(peak, live + workspace_bytes(eqn))
        live -= sum(size.get(v, 0) for v in dying.get(i, ()))
    return peak


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


def capture_trace(
    trace: Trace, costs: Costs, name: str = "", *, boundary: Boundary | None = None, donated_bytes: int = 0
) -> Capture:
    """The graph of a traced function.

    XLA allocates arguments and results before a program runs. Both count as resident bytes, except results that reuse the
    buffers of donated arguments, and results take no bytes in the graph. Without a boundary it is a whole step.
    """
    return _Builder(trace, boundary).build(costs, name, donated_bytes)


class _Builder:
    def __init__(self, trace: Trace, boundary: Boundary | None) -> None:
        self.trace, self.boundary = trace, boundary
        self.results = {v for v in trace.results if isinstance(v, int)}
        self.producer = {v: equation for equation in trace.equations for v in equation.outputs}
        self.in_place = {v for result in self.results for v in self._bases(result)}
        self.phases = phases_of_pair(trace, boundary) if boundary is not None else _phases_of_step(trace)

    def build(self, costs: Costs, name: str, donated_bytes: int) -> Capture:
        members = self._chains()
        measured = iter(costs(members))
        reads, writes = [tuple(types_from_outside(chain)) for chain in members], [chain[-1].outputs for chain in members]
        tangents: tuple[int, ...] = ()
        if self.boundary is not None:
            at, tangents = sum(self._phase(chain) == "forward" for chain in members), self.boundary.tangents
            members.insert(at, ())
            reads.insert(at, tuple(dict.fromkeys(v for v in self.trace.results[: self.boundary.results] if isinstance(v, int))))
            writes.insert(at, tangents)
        values, number = self._values(members, writes)
        ops = [
            self._op(chain, measured, tuple(number[v] for v in read if v in number), tuple(number[v] for v in written))
            for chain, read, written in zip(members, reads, writes, strict=True)
        ]
        # Arguments, constants and results; tangents are values of the graph.
        resident = {*self.trace.arguments, *self.trace.constants, *self.results}.difference(tangents)
        resident_bytes = sum(map(self.trace.size_bytes, resident)) - donated_bytes
        graph = Graph(tuple(ops), tuple(values), resident_bytes=resident_bytes, name=name)
        return Capture(graph, self.trace, tuple(members), tuple(writes), tuple(reads), self.boundary)

    def _phase(self, chain: Sequence[Equation]) -> Phase:
        return self.phases[id(chain[-1])]

    def _chains(self) -> list[tuple[Equation, ...]]:
        """The equations of each op: forward ops first if there is a boundary, else in the order of their last equations."""
        equations = self.trace.equations
        readers: dict[int, list[int]] = {}
        for i, equation in enumerate(equations):
            for v in equation.read:
                readers.setdefault(v, []).append(i)
        self._apart = self._reached_apart()
        heads: list[set[int]] = [set() for _ in equations]  # the ends of the chains that each equation is part of
        for i in range(len(equations) - 1, -1, -1):
            heads[i] = self._heads(i, readers, heads) or {i}
        chains: dict[int, list[Equation]] = {}
        for i, equation in enumerate(equations):
            for head in heads[i]:
                chains.setdefault(head, []).append(equation)
        found = [tuple(chains[head]) for head in sorted(chains)]
        return found if self.boundary is None else sorted(found, key=lambda chain: self._phase(chain) != "forward")

    def _heads(self, i: int, readers: Mapping[int, Sequence[int]], heads: Sequence[set[int]]) -> set[int]:
        """The chains that fuse an equation; none if its output is stored."""
        equations, equation = self.trace.equations, self.trace.equations[i]
        if equation.kind not in FUSED or has_effects(equation) or self.results.intersection(equation.outputs):
            return set()
        used = readers.get(equation.outputs[0], ())
        if not all(equations[r].kind in FUSED | REDUCTIONS and not has_effects(equations[r]) for r in used):
            return set()
        ends = {head for r in used for head in heads[r]}
        if is_broadcast(equation):
            return ends
        if equation.kind in CHEAP and not any(self._apart[r] >> i & 1 for r in used):
            return ends
        return ends if len(ends) == 1 else set()

    def _reached_apart(self) -> list[int]:
        """For each equation, a bit for each earlier one from which it is reached through an output that is stored."""
        index = {v: i for i, equation in enumerate(self.trace.equations) for v in equation.outputs}
        behind: list[int] = []
        apart: list[int] = []
        for equation in self.trace.equations:
            before = [index[v] for v in equation.read if v in index]
            reached = far = 0
            for j in before:
                reached |= behind[j] | 1 << j
                far |= apart[j] if self.trace.equations[j].kind in FUSED else behind[j]
            behind.append(reached)
            apart.append(far)
        return apart

    def _bases(self, value: int) -> Iterator[int]:
        """A value and the values whose buffer it shares."""
        yield value
        equation = self.producer.get(value)
        while equation is not None and is_view(equation, self.producer):
            yield equation.read[0]
            equation = self.producer.get(equation.read[0])

    def _values(
        self, members: Sequence[tuple[Equation, ...]], writes: Sequence[tuple[int, ...]]
    ) -> tuple[list[Value], dict[int, int]]:
        """A value for every output of every op. Results take no bytes: XLA allocates them before the program runs."""
        values: list[Value] = []
        number: dict[int, int] = {}
        for chain, outputs in zip(members, writes, strict=True):
            view = len(chain) == 1 and is_view(chain[0], self.producer)
            for v in outputs:
                base = number.get(chain[0].read[0]) if view else None
                size = 0 if v in self.in_place or view else self.trace.size_bytes(v)
                number[v] = len(values)
                values.append(Value(str(self.trace.types[v]), size, base, kept=v in self.results))
        return values, number

    def _op(self, chain: Sequence[Equation], measured: Iterator[OpCost], inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Op:
        if not chain:
            return Op(BOUNDARY, inputs, outputs, 0, recomputable=False, phase="loss", kind=BOUNDARY)
        last, measure = chain[-1], next(measured)
        return Op(
            name=_name(chain),
            inputs=inputs,
            outputs=outputs,
            cost=measure.cost_ns,
            workspace_bytes=max(measure.workspace_bytes, workspace_bytes(last.eqn)),
            recomputable=not any(map(has_effects, chain)),
            phase=self._phase(chain),
            kind=last.kind,
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
