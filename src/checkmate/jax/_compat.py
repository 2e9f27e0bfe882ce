"""All uses of JAX that differ between versions, or are not in its public API, as they are in JAX 0.10 to 0.12."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import config
from jax._src.interpreters import ad
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core, source_info_util
from jax.extend.core.primitives import reshape_p, sharding_constraint_p
from jax.interpreters.partial_eval import dce_jaxpr

source_info_util.register_exclusion(str(Path(__file__).parent))  # source lines are those of the user's program


def opened(closed: Any) -> tuple[Any, list[Any]]:
    """The jaxpr of a parameter or a trace, and its constants: JAX 0.11 merges ``ClosedJaxpr`` and ``Jaxpr``."""
    return getattr(closed, "jaxpr", closed), list(getattr(closed, "consts", ()) or ())


def without_unread(closed: Any) -> Any:
    """A trace of `jax.make_jaxpr` without what no result needs, also in the bodies of loops."""
    jaxpr, constants = opened(closed)
    return core.ClosedJaxpr(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0], constants)


def as_function(closed: Any, constants: Sequence[Any]) -> Callable[..., list[Any]]:
    """A trace of `jax.make_jaxpr` as a function of its flat arguments, with a value for each of its constants."""
    jaxpr, _ = opened(closed)
    types = [v.aval if isinstance(v, core.Literal) else None for v in jaxpr.outvars]
    function = core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, list(constants)))

    def with_arrays(*arguments: Any) -> list[Any]:
        # If a result is a literal of the jaxpr, JAX returns a number.
        return [r if t is None else as_array(r, t) for r, t in zip(function(*arguments), types, strict=True)]

    return with_arrays


def lowered(function: Callable[..., Any], arguments: Sequence[Any], donated: Sequence[int] = ()) -> Any:
    """A function of flat arrays, lowered for one device: without constraints on shardings, by which XLA would divide arrays."""
    traced = jax.jit(function, donate_argnums=tuple(donated)).trace(*arguments)
    if not any_equation(traced.jaxpr, lambda eqn: eqn.primitive is sharding_constraint_p):
        return traced.lower()
    return jax.jit(core.jaxpr_as_fun(_unconstrained(traced.jaxpr)), donate_argnums=tuple(donated)).lower(*arguments)


def any_equation(closed: Any, holds: Callable[[Any], bool]) -> bool:
    """Whether something holds for an equation of a jaxpr, or of the bodies of its equations."""
    eqns = opened(closed)[0].eqns
    return any(holds(eqn) or any(any_equation(body, holds) for body in core.jaxprs_in_params(eqn.params)) for eqn in eqns)


def _unconstrained(value: Any) -> Any:
    """A parameter of an equation, or a trace, in whose jaxprs a constraint on a sharding is a reshape to the same shape."""
    if type(value) is tuple:  # and no dimension numbers
        return tuple(map(_unconstrained, value))
    if not hasattr(value, "eqns"):
        return value
    if (jaxpr := opened(value)[0]) is not value:
        return value.replace(jaxpr=_unconstrained(jaxpr))
    eqns: list[Any] = []
    for eqn in value.eqns:
        if eqn.primitive is sharding_constraint_p:
            aval: Any = eqn.outvars[0].aval
            same = {"new_sizes": aval.shape, "dimensions": None, "sharding": None}
            eqns.append(eqn.replace(primitive=reshape_p, params=same))
        else:
            eqns.append(eqn.replace(params={name: _unconstrained(part) for name, part in eqn.params.items()}))
    return value.replace(eqns=eqns)


def as_array(number: Any, aval: Any) -> jax.Array:
    """A literal of a jaxpr as an array of its type."""
    return jnp.asarray(number, aval.dtype)


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The outputs of one equation, under the names and settings with which it was traced."""
    primitive = eqn.primitive
    with traced_as(eqn):
        answer = primitive.bind(*values, **primitive.get_bind_params(eqn.params))
    return list(answer) if primitive.multiple_results else [answer]


def source_of(eqn: Any) -> str:
    """File and line of the user's program that an equation comes from, like ``model.py:12 (attention)``; "" if unknown."""
    line = source_info_util.summarize(eqn.source_info)
    return "" if line == "unknown" else line


def scopes_of(eqn: Any) -> str:
    """Names of the scopes and transformations around an equation, like ``transpose(jvp(decoder))/mlp``."""
    return str(eqn.source_info.name_stack)


def trace_settings() -> Any:
    """All settings of JAX on which a trace depends: types, precision, meshes, axes; a key of JAX's own caches."""
    return config.trace_context()  # pyright: ignore[reportAttributeAccessIssue]


def is_tracer(value: Any) -> bool:
    """Whether a value is an argument of a transformation that is being traced."""
    return isinstance(value, jax.core.Tracer)  # pyright: ignore[reportAttributeAccessIssue]


def is_differentiated(value: Any) -> bool:
    """Whether a value is an argument of a function whose derivative is being traced."""
    return isinstance(value, (ad.JVPTracer, ad.LinearizeTracer))


def varying_axes(value: Any) -> frozenset[str]:
    """Names of the axes of `jax.shard_map` along which a value, or a value of a type, differs; none outside `jax.shard_map`."""
    kind = value if isinstance(value, jax.core.ShapedArray) else jax.typeof(value)  # pyright: ignore[reportAttributeAccessIssue]
    manual = getattr(kind, "manual_axis_type", None) or getattr(kind, "mat", None)
    return frozenset(getattr(manual, "varying", None) or getattr(kind, "vma", None) or ())


def as_varying(value: jax.Array, axes: Collection[str]) -> jax.Array:
    """A value, marked as varying along axes of `jax.shard_map`."""
    more = tuple(axis for axis in axes if axis not in varying_axes(value))
    if not more:
        return value
    return jax.lax.pcast(value, more, to="varying") if hasattr(jax.lax, "pcast") else jax.lax.pvary(value, more)  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def traced_as(eqn: Any) -> Iterator[None]:
    """Bind primitives under the names, settings and source lines with which an equation was traced."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


_BARRIERS_TO_THE_END = {"xla_disable_hlo_passes": "cse_barrier_expander"}


def compiler_options() -> dict[str, str]:
    """Options of `jax.jit` with which XLA respects `jax.checkpoint` on the default device; plans need none.

    Empty if XLA respects it without options. XLA for CPUs of jaxlib 0.10 removes barriers before it merges equal computations
    for the last time. Recomputations of `jax.checkpoint` then merge with the first computation and save nothing.

    Returns:
        Options to pass as ``jax.jit(step, compiler_options=...)``.

    Examples:
        >>> set(compiler_options()) <= {"xla_disable_hlo_passes"}
        True
    """
    return dict(_BARRIERS_TO_THE_END) if _removes_barriers(jax.default_backend()) else {}


def barrier(arrays: Any, *, in_body: bool = False) -> Any:
    """An array, or a nest of arrays, behind a barrier to the end of compilation: XLA merges and moves nothing across it.

    It is a call that XLA may not inline, on devices whose XLA removes barriers early. One that is `in_body` is part of the body
    of a loop that is planned.
    """
    if not _removes_barriers(jax.default_backend()):
        return jax.lax.optimization_barrier(arrays)
    with set_xla_metadata(inlineable="false"):
        return (_barrier_in_a_body if in_body else _barrier_of_a_plan)(arrays)


@jax.jit
def _barrier_of_a_plan(arrays: Any) -> Any:
    return jax.lax.optimization_barrier(arrays)


@jax.jit
def _barrier_in_a_body(arrays: Any) -> Any:
    return jax.lax.optimization_barrier(arrays)


def is_in_a_body(eqn: Any) -> bool:
    """Whether an equation is a barrier in the body of a loop, which stays a call."""
    return eqn.params.get("name") == "_barrier_in_a_body"


def is_of_a_plan(eqn: Any) -> bool:
    """Whether an equation is a barrier of a planned function, which would be lost among the equations of another one."""
    return eqn.params.get("name") == "_barrier_of_a_plan"


@functools.cache
def _removes_barriers(backend: str) -> bool:
    """Whether XLA without the options merges a product of matrices with its recomputation behind a barrier."""

    def probe(x: jax.Array) -> jax.Array:
        first = jnp.tanh(x @ x)
        again, first = jax.lax.optimization_barrier((x, first))
        return first + jnp.tanh(again @ again)

    def products(options: dict[str, str]) -> int:
        spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        try:
            text = jax.jit(probe).lower(spec).compile(compiler_options=dict(options)).as_text() or ""
        except jax.errors.JaxRuntimeError:  # a compiler without this option
            return 0
        return sum(" dot(" in line or "custom-call(" in line for line in text.splitlines())

    return products({}) < 2 <= products(_BARRIERS_TO_THE_END)
