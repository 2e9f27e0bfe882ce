"""XLA: the bytes that it allocates for a compiled function, and whether it respects fences."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp

_log = logging.getLogger("checkmate.jax")

MOST_COMPILATIONS: Final = 4
"""Most programs that are compiled for one request; each takes seconds."""

_BARRIERS_TO_THE_END = {"xla_disable_hlo_passes": "cse_barrier_expander"}
"""For compilers that remove barriers before their last pass that merges equal computations: jaxlib 0.10 on CPUs."""

_QUICKLY = {"xla_backend_optimization_level": "0"}
"""For programs that never run: XLA allocates buffers before LLVM optimizes, which takes half of the time."""

_PROBE_PRODUCTS = 2

_told: set[str] = set()
"""Backends whose options the user has asked for or was warned of."""


def compiler_options() -> dict[str, str]:
    """Options of `jax.jit` with which XLA respects recomputations on the default device.

    Empty where it does without. XLA for CPUs of jaxlib 0.10 removes barriers before its last merging of equal computations, so
    that recomputations, also those of `jax.checkpoint`, are merged with the first computation and save nothing.

    Returns:
        Options to pass as ``jax.jit(step, compiler_options=...)``.

    Examples:
        >>> set(compiler_options()) <= {"xla_disable_hlo_passes"}
        True
    """
    _told.add(jax.default_backend())
    return _options()


def temp_bytes(function: Callable[..., Any], arguments: Sequence[Any], donated: Sequence[int] = ()) -> int:
    """Bytes of temporary values that XLA allocates for a function, above its arguments and results.

    Args:
        function: A function of flat arguments. It is compiled, and not run.
        arguments: Their shapes and types.
        donated: Positions of arguments whose buffers results may reuse.
    """
    jitted = jax.jit(function, donate_argnums=tuple(donated))
    options: Any = _options() | (_QUICKLY if jax.default_backend() == "cpu" else {})
    analysis: Any = jitted.lower(*arguments).compile(compiler_options=options).memory_analysis()
    return int(analysis.temp_size_in_bytes)


def warn_of_undone_fences() -> None:
    """Tell once if XLA undoes recomputations unless it is told otherwise, and no user code has asked for the options."""
    backend = jax.default_backend()
    if backend in _told or not _options():
        return
    _told.add(backend)
    _log.warning(
        "XLA for %s in this jaxlib merges recomputations with the first computation, and a plan then saves nothing. Compile "
        "with jax.jit(step, compiler_options=checkmate.jax.compiler_options()), or set the environment variable "
        "XLA_FLAGS=--xla_disable_hlo_passes=cse_barrier_expander before JAX starts",
        backend,
    )


def _options() -> dict[str, str]:
    return dict(_BARRIERS_TO_THE_END) if _need_options(jax.default_backend()) else {}


@functools.cache
def _need_options(backend: str) -> bool:
    return _products({}) < _PROBE_PRODUCTS <= _products(_BARRIERS_TO_THE_END)


def _products(options: dict[str, str]) -> int:
    """Products of matrices that are left of a product and its recomputation behind a fence."""

    def probe(x: jax.Array) -> jax.Array:
        first = jnp.tanh(x @ x)
        again, first = jax.lax.optimization_barrier((x, first))
        return first + jnp.tanh(again @ again)

    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    try:
        text = jax.jit(probe).lower(spec).compile(compiler_options=dict(options)).as_text() or ""
    except jax.errors.JaxRuntimeError:  # a compiler without this option
        return 0
    return sum(" dot(" in line or "custom-call(" in line for line in text.splitlines())
