"""Properties of JAX's primitives: which of them XLA fuses, arithmetic, and the bytes that loops and branches need inside."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from jax.extend.core import Literal

from checkmate.jax._compat import opened
from checkmate.jax.graph.trace import Equation, type_bytes

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

VIEWS = frozenset({"expand_dims", "name", "reshape", "squeeze"})
"""Primitives whose output is the same bytes in the same order."""

MOVES = VIEWS | {"rev", "slice", "transpose"}
"""Primitives each of whose output elements is a copy of an input element."""

BROADCASTS = frozenset({"broadcast_in_dim", "iota"})
"""Primitives that XLA computes again in every loop that reads them, because they read next to nothing."""

REDUCTIONS = frozenset({f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum", "xor")} | {"argmax", "argmin"})
"""Primitives that XLA fuses with the computation of their input."""

FUSED = POINTWISE | MOVES | BROADCASTS
"""Primitives that XLA fuses into the loops that read them: an output that one loop reads is never stored."""

COLLECTIVES = frozenset(
    {"all_gather", "all_gather_invariant", "all_to_all", "axis_index", "pbroadcast", "pcast", "pmax", "pmin", "ppermute"}
    | {"psum", "psum2", "psum_invariant", "psum_scatter", "pvary", "reduce_scatter"}
)
"""Primitives that need a named axis around them."""


def _bodies(eqn: Any) -> Iterator[Any]:
    """The jaxprs in the parameters of an equation, opened."""
    for parameter in eqn.params.values():
        for item in parameter if isinstance(parameter, (tuple, list)) else (parameter,):
            if hasattr(item, "eqns") or hasattr(item, "jaxpr"):
                yield opened(item)[0]


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
