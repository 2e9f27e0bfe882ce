"""A traced function, alone or with its derivative: a flat list of the equations that results need, with calls inlined."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.extend.core.primitives import remat_p

from checkmate.core.errors import GraphError
from checkmate.jax._compat import as_array, barrier, bind, is_in_a_body, is_of_a_plan, opened, varying_axes, without_unread

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
"""Primitives that only call a jaxpr, and the parameter that holds it."""

_WITH_RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "custom_vjp_call_jaxpr": "fun_jaxpr"}
"""Primitives that call a jaxpr with a user-defined derivative."""

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

Source = int | Literal
"""Input of an equation: a value by its number, or a literal."""

Pure = Callable[..., list[Any]]
"""A function of flat arrays that closes over no array."""


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One equation of a trace, by the numbers of its values."""

    eqn: Any  # as JAX traced it; its own variables are not used
    inputs: tuple[Source, ...]
    outputs: tuple[int, ...]

    @property
    def kind(self) -> str:
        """Name of the equation's primitive, like ``dot_general``."""
        return self.eqn.primitive.name

    @property
    def read(self) -> tuple[int, ...]:
        """Numbers of the values that it reads, each once."""
        return tuple(dict.fromkeys(v for v in self.inputs if isinstance(v, int)))

    def computed(self, values: Mapping[int, Any]) -> dict[int, Any]:
        """Its outputs by their numbers, for the values that it reads."""
        inputs = [values[v] if isinstance(v, int) else v.val for v in self.inputs]
        return dict(zip(self.outputs, bind(self.eqn, inputs), strict=True))


def result(values: Mapping[int, Any], source: Source) -> Any:
    """A result of a trace as an array, even if it is a literal of the program."""
    return values[source] if isinstance(source, int) else as_array(source.val, source.aval)


def types_from_outside(chain: Sequence[Equation]) -> dict[int, Any]:
    """Shape and type of each value that a chain of equations reads and does not make, by its number."""
    made = {v for equation in chain for v in equation.outputs}
    read = [(s, v.aval) for e in chain for v, s in zip(e.eqn.invars, e.inputs, strict=True) if isinstance(s, int)]
    return {number: aval for number, aval in read if number not in made}


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A traced function. Its values are numbered; each is an argument, a constant or an output of one equation."""

    arguments: tuple[int, ...]
    constants: Mapping[int, Any]  # by their numbers
    equations: tuple[Equation, ...]  # in an order in which they can run
    results: tuple[Source, ...]
    types: Sequence[Any]  # shape and type of each value

    def size_bytes(self, value: int) -> int:
        """Bytes of a value."""
        return type_bytes(self.types[value])


def trace_flat(function: Callable[..., Any], *arguments: Any) -> Trace:
    """Trace a function of nests of arrays, tracers or `jax.ShapeDtypeStruct`, and flatten the result, as `flattened` does."""
    return flattened(jax.make_jaxpr(function)(*arguments))


def flattened(closed: Any, *, differentiable: bool = False, checkpoints: bool = True) -> Trace:
    """The equations of a jaxpr with all calls inlined, without duplicates and without those that no result or effect needs.

    If `differentiable`, calls of functions with a user-defined derivative stay calls, because the trace is differentiated later.
    If `checkpoints`, each call to `jax.checkpoint` stays one equation.

    Raises:
        GraphError: A planned function is called outside of loops.
    """
    calls = _CALLS | ({} if differentiable else _WITH_RULES) | ({} if checkpoints else {remat_p.name: "jaxpr"})
    types: list[Any] = []
    constants: dict[int, Any] = {}
    inlined: list[Equation] = []
    parts: dict[Any, list[tuple[Any, Any]]] = {}  # what each joined array is joined from, by its number and axis

    def numbered(variables: Sequence[Any]) -> range:
        types.extend(v.aval for v in variables)
        return range(len(types) - len(variables), len(types))

    def inline(closed: Any, given: Sequence[Source] | None = None, instead: Any = None) -> tuple[Sequence[Source], list[Source]]:
        """Arguments and results of a jaxpr; its equations are appended, with the names and settings of one that they replace."""
        jaxpr, values = opened(closed)
        numbers = numbered(jaxpr.constvars)
        constants.update(zip(numbers, values, strict=True))
        arguments = numbered(jaxpr.invars) if given is None else given
        known: dict[Any, Source] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*numbers, *arguments), strict=True))
        for eqn in jaxpr.eqns:
            inputs = tuple(v if isinstance(v, Literal) else known[v] for v in eqn.invars)
            if instead is not None:
                eqn = eqn.replace(source_info=instead.source_info, ctx=instead.ctx)
            if eqn.primitive.name == "concatenate":  # XLA reads the parts of a part
                axis, pairs = eqn.params["dimension"], zip(eqn.invars, inputs, strict=True)
                parts[len(types), axis] = read = [p for v, s in pairs for p in parts.get((s, axis), [(v, s)])]
                eqn, inputs = eqn.replace(invars=[v for v, _ in read]), tuple(s for _, s in read)
            if is_of_a_plan(eqn):
                raise GraphError(
                    "the function calls one that has a plan, which another plan would undo",
                    hint="plan the outer function alone, and call the inner one without checkmate.jax.remat: its __wrapped__",
                )
            call = None if is_in_a_body(eqn) else eqn.params.get(calls.get(eqn.primitive.name, ""))
            body = call or _as_xla_runs(eqn)
            if body is None:
                inlined.append(Equation(eqn, inputs, tuple(numbered(eqn.outvars))))
            outputs = inlined[-1].outputs if body is None else inline(body, inputs, None if call else eqn)[1]
            known.update(zip(eqn.outvars, outputs, strict=True))
        return arguments, [v if isinstance(v, Literal) else known[v] for v in jaxpr.outvars]

    arguments, results = inline(without_unread(closed))
    equations = _needed(_distinct(inlined, results), results)
    used = {v for e in equations for v in e.read} | {v for v in results if isinstance(v, int)}
    kept = {v: constant for v, constant in constants.items() if v in used}
    return Trace(tuple(v for v in arguments if isinstance(v, int)), kept, tuple(equations), tuple(results), types)


def _as_xla_runs(eqn: Any) -> Any:
    """A jaxpr that computes the same with slices, broadcasts, and products that copy no operand; None for most equations."""
    avals, name = tuple(v.aval for v in eqn.invars), eqn.primitive.name
    spread = name in POINTWISE and len({a.shape for a in avals} - {()}) > 1  # an operand has an axis of size 1
    rule = {"dot_general": _product, "split": _slices}.get(name, _broadcasts if spread else None)
    if rule is None or any(any(a.sharding.spec) or varying_axes(a) for a in avals if hasattr(a, "sharding")):
        return None
    return _traced(rule, eqn.primitive, tuple(eqn.params.items()), avals)


@functools.cache  # layers are alike
def _traced(rule: Callable[..., Any], primitive: Any, params: tuple[tuple[str, Any], ...], avals: tuple[Any, ...]) -> Any:
    closed = jax.make_jaxpr(functools.partial(rule, primitive, dict(params)))(*avals)
    return closed if len(opened(closed)[0].eqns) > 1 else None  # alone, it is such a product


def _broadcasts(primitive: Any, params: dict[str, Any], *operands: Any) -> Any:
    shape = jnp.broadcast_shapes(*(x.shape for x in operands))
    read = [jax.lax.broadcast_in_dim(x, shape, range(x.ndim)) if x.ndim == len(shape) else x for x in operands]
    return primitive.bind(*read, **params)


def _slices(_: Any, params: dict[str, Any], array: Any) -> list[Any]:
    pairs = itertools.pairwise(itertools.accumulate(params["sizes"], initial=0))
    return [jax.lax.slice_in_dim(array, start, stop, axis=params["axis"]) for start, stop in pairs]


def _product(primitive: Any, params: dict[str, Any], *operands: Any) -> Any:
    """A product of arrays whose batch axes come first, with one contracted axis next to them or last."""
    contracted, batch = params["dimension_numbers"]
    read, axes = list(operands), contracted
    if pairs := sorted(zip(*contracted, strict=True)):
        axes = ()
        for k, (array, own, first) in enumerate(zip(operands, zip(*pairs, strict=True), batch, strict=True)):
            free = [d for d in range(array.ndim) if d not in {*own, *first}]
            at = len(first) if [*first, *own, *free] == [*range(array.ndim)] else len(first) + len(free)
            moved = jax.lax.transpose(array, [*first, *own, *free] if at == len(first) else [*first, *free, *own])
            size, end = math.prod(array.shape[d] for d in own), at + len(own)
            read[k], axes = jax.lax.reshape(moved, (*moved.shape[:at], size, *moved.shape[end:])), (*axes, (at,))
        batch = (tuple(range(len(batch[0]))),) * 2
    return primitive.bind(*read, **params | {"dimension_numbers": (axes, batch)})


@dataclass(frozen=True, slots=True, eq=False)
class Boundary:
    """The boundary between forward and backward of a trace."""

    results: int  # number of the results of the forward: the first results of the trace
    tangents: tuple[int, ...]  # arguments of the trace that only the backward reads
    specs: tuple[Any, ...]  # their shapes and types


def given_bytes(boundary: Boundary | None) -> int:
    """Bytes of cotangents that the caller gives, which XLA counts as arguments; that of a loss is constant."""
    specs = () if boundary is None else boundary.specs
    return sum(map(type_bytes, specs)) if any(spec.shape for spec in specs) else 0


def as_called(
    program: Callable[[Sequence[Any]], list[Any]], trace: Trace, boundary: Boundary | None
) -> tuple[Callable[..., list[Any]], list[jax.ShapeDtypeStruct]]:
    """A program with the constant cotangent that `jax.grad` gives to a loss, and the types of its other arguments."""
    types = [trace.types[v] for v in trace.arguments]
    if any(map(needs_mesh, types)) and any(equation.kind in {"scan", "while"} for equation in trace.equations):
        raise GraphError(
            "a loop has arrays on a mesh with explicit axes, which it is compiled for before the call",
            hint="call it within `with jax.set_mesh(mesh):`, or make the mesh with axis_types of jax.sharding.AxisType.Auto",
        )
    specs = list(map(spec_of, types))
    scalars = () if boundary is None or given_bytes(boundary) else boundary.specs
    return lambda *given: program([*given, *(jnp.ones((), s.dtype) for s in scalars)]), specs[: len(specs) - len(scalars)]


def spec_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Shape and type of an array, to compile for it; an array on an explicit mesh is whole on each device."""
    sharding = None
    if needs_mesh(aval):
        sharding = jax.sharding.NamedSharding(_mesh_like(aval.sharding.mesh), jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False), sharding=sharding)


@functools.cache  # every argument of a program is on it
def _mesh_like(mesh: jax.sharding.AbstractMesh) -> jax.sharding.Mesh:
    return jax.make_mesh(mesh.axis_sizes, mesh.axis_names, mesh.axis_types)


def needs_mesh(aval: Any) -> bool:
    """Whether an array is on a mesh with explicit axes, while the call is outside of `jax.set_mesh`."""
    explicit = hasattr(aval, "sharding") and jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types
    return explicit and jax.sharding.get_abstract_mesh().empty


def is_inexact(array: Any) -> bool:
    """Whether an array, or the shape and type of one, can have a gradient."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


def derivative(pure: Pure, primals: Sequence[Any], wanted: Sequence[int]) -> tuple[list[Any], Callable[..., Any]]:
    """The results of a function, and the pullback of their cotangents to the arguments at the positions `wanted`."""

    def of_wanted(*some: Any) -> list[Any]:
        merged = list(primals)
        for i, value in zip(wanted, some, strict=True):
            merged[i] = value
        return pure(*merged)

    return jax.vjp(of_wanted, *(primals[i] for i in wanted))


def with_derivative(pure: Pure, wanted: Sequence[int]) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """A function of arguments and of tangents of all inexact results; it returns the results, then gradients of `wanted` ones."""

    def pair(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        results, pull = derivative(pure, primals, wanted)
        remaining = iter(tangents)
        cotangents = [next(remaining) if is_inexact(r) else np.zeros(r.shape, jax.dtypes.float0) for r in results]
        return [*results, *pull(cotangents)]

    return pair


def trace_pair(pure: Pure, values: Sequence[Any], wanted: Sequence[int], results: Sequence[Any]) -> tuple[Trace, Boundary]:
    """Trace a function with results of some types together with its derivative by the arguments at the positions `wanted`."""
    tangents = [spec for spec in results if is_inexact(spec)]
    trace = flattened(jax.make_jaxpr(with_derivative(pure, wanted))(list(values), tangents))
    return trace, Boundary(results=len(results), tangents=trace.arguments[len(values) :], specs=tuple(tangents))


def type_bytes(aval: Any) -> int:
    """Bytes of an array of a shape and type; 0 for other values, like tokens."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def table_bytes(results: int) -> int:
    """Bytes of XLA's table of pointers to the results of a program; a single result needs none."""
    return 8 * results if results > 1 else 0


def behind_barriers(values: Mapping[int, Any], numbers: Iterable[int], *, in_body: bool = False) -> dict[int, Any]:
    """Some values behind a barrier: XLA cannot fuse their readers with earlier computations, or move these computations.

    In `jax.shard_map`, if one input of a barrier varies along an axis, all its outputs do. Parameters must not vary: there is one
    barrier for each set of axes along which values differ. Every recomputation also reads a value that depends on the batch.
    """
    by_axes: dict[frozenset[str], list[int]] = {}
    for v in numbers:
        by_axes.setdefault(varying_axes(values[v]), []).append(v)
    found: dict[int, Any] = {}
    for some in by_axes.values():
        found.update(zip(some, barrier([values[v] for v in some], in_body=in_body), strict=True))
    return found


def _distinct(equations: Sequence[Equation], results: Iterable[Source]) -> list[Equation]:
    """The equations without repetitions of earlier ones, like the mean of a layer that its variance computes once more.

    XLA would merge the two. Results keep separate equations, because each result has a buffer. Optimization barriers also stay
    separate, because a program uses them to keep two computations apart.
    """
    own = {v for v in results if isinstance(v, int)}
    instead: dict[int, Source] = {}
    made: dict[Any, Equation] = {}
    kept: list[Equation] = []
    for equation in equations:
        read = tuple(instead.get(v, v) if isinstance(v, int) else v for v in equation.inputs)
        if read != equation.inputs:
            equation = Equation(equation.eqn, read, equation.outputs)
        earlier = made.setdefault(_computed(equation), equation)
        if earlier is equation or not own.isdisjoint(equation.outputs):
            kept.append(equation)
        else:
            instead.update(zip(equation.outputs, earlier.outputs, strict=True))
    return kept


def _computed(equation: Equation) -> Any:
    """A key that is equal for two equations only if they compute the same; a new object if that is not known."""
    eqn = equation.eqn
    if eqn.effects or equation.kind == "optimization_barrier":
        return object()
    try:
        inputs = tuple(_of_setting(s) if isinstance(s, Literal) else s for s in equation.inputs)
        return eqn.primitive, inputs, tuple((name, _of_setting(value)) for name, value in eqn.params.items())
    except TypeError:
        return object()


def fingerprint(closed: Any, *, differentiated: bool) -> Hashable | None:
    """A key that is equal for two jaxprs only if they compute the same from the same arguments; None if there is none.

    Rules for derivatives count, unless the jaxpr is `differentiated`.
    """
    try:
        return _of_jaxpr(closed, differentiated)
    except TypeError:
        return None


def _of_jaxpr(closed: Any, differentiated: bool) -> Hashable:
    jaxpr, constants = opened(closed)
    given = (*jaxpr.constvars, *jaxpr.invars)
    number: dict[Any, Hashable] = {v: i for i, v in enumerate(given)}
    lines: list[Hashable] = []
    for eqn in jaxpr.eqns:
        body = _WITH_RULES.get(eqn.primitive.name) if differentiated else None
        settings = eqn.params if body is None else {body: eqn.params[body]}
        named = tuple((name, _of_setting(value, differentiated)) for name, value in settings.items())
        read = tuple(_of_setting(v) if isinstance(v, Literal) else number[v] for v in eqn.invars)
        lines.append((eqn.primitive, eqn.ctx, read, named))
        for v in eqn.outvars:
            number[v] = len(number)
    results = tuple(_of_setting(v) if isinstance(v, Literal) else number[v] for v in jaxpr.outvars)
    return len(jaxpr.invars), tuple(v.aval for v in given), _of_setting(constants), tuple(lines), results


def _of_setting(value: Any, differentiated: bool = False) -> Hashable:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return _of_jaxpr(value, differentiated)
    if isinstance(value, (tuple, list)):
        items: list[Any] = [*value]
        return type(value), tuple(_of_setting(item, differentiated) for item in items)
    if isinstance(value, Literal):
        return value.aval, np.asarray(value.val).tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype, value.shape, value.tobytes()
    if hasattr(value, "call_wrapped") or "<locals>" in getattr(value, "__qualname__", "") or isinstance(value, jax.Array):
        raise TypeError("no later trace has this value again")
    hash(value)
    return type(value), value


def _needed(equations: Sequence[Equation], results: Iterable[Source]) -> list[Equation]:
    needed = {v for v in results if isinstance(v, int)}
    kept: list[Equation] = []
    for equation in reversed(equations):
        if equation.eqn.effects or not needed.isdisjoint(equation.outputs):
            kept.append(equation)
            needed.update(equation.read)
    return kept[::-1]
