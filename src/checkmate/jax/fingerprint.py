"""What a traced program computes, as a key: a plan is found again without another trace of the derivative.

Two programs have equal keys only if they compute the same from the same arguments. Arrays and other objects are compared by
identity, so that whoever keeps a key also keeps the program.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal

from checkmate.jax._compat import is_tracer, opened
from checkmate.jax.graph.trace import WITH_RULES


class _UnknownError(Exception):
    """A parameter that no later trace has again, like a rule for a derivative."""


def fingerprint(closed: Any, *, differentiated: bool) -> Hashable | None:
    """The key of a program, of which rules for derivatives are a part unless it is differentiated; None if there is no key."""
    try:
        return _of_program(closed, differentiated)
    except _UnknownError:
        return None


def _of_program(closed: Any, differentiated: bool) -> Hashable:
    jaxpr, constants = opened(closed)
    given = (*jaxpr.constvars, *jaxpr.invars)
    number: dict[Any, int] = {v: i for i, v in enumerate(given)}

    def source(v: Any) -> Hashable:
        return (v.aval, _of_setting(np.asarray(v.val))) if isinstance(v, Literal) else number[v]

    lines: list[Hashable] = []
    for eqn in jaxpr.eqns:
        body = WITH_RULES.get(eqn.primitive.name) if differentiated else None
        settings = eqn.params if body is None else {body: eqn.params[body]}
        named = tuple((name, _of_setting(value, differentiated)) for name, value in settings.items())
        lines.append((eqn.primitive, eqn.ctx, tuple(map(source, eqn.invars)), named))
        for v in eqn.outvars:
            number[v] = len(number)
    types = tuple(v.aval for v in given)
    return len(jaxpr.invars), types, _of_setting(constants), tuple(lines), tuple(map(source, jaxpr.outvars))


def _of_setting(value: Any, differentiated: bool = False) -> Hashable:
    if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return _of_program(value, differentiated)
    if isinstance(value, (tuple, list)):
        items: list[Any] = [*value]
        return type(value), tuple(_of_setting(item, differentiated) for item in items)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, jax.Array) and not is_tracer(value):
        return jax.Array, id(value)
    fresh = hasattr(value, "call_wrapped") or "<locals>" in getattr(value, "__qualname__", "")
    if is_tracer(value) or fresh or getattr(type(value), "__hash__", None) is None:
        raise _UnknownError
    return type(value), value
