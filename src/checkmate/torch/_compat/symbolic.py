"""Symbolic sizes: their ranges, and where they come from.

Seen and tested in torch 2.13.0; 2.11 is the declared floor.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any

import sympy
import torch
import torch._dynamo.config as dynamo_config
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = ["bound_by_hint", "is_automatic_dynamic", "upper_bound", "user_upper_bound", "value_at_upper_bounds"]

_TRIED = 32  # sizes along a range


def is_automatic_dynamic(symbol: torch.SymInt) -> bool:
    """Whether a symbolic size is one only because Dynamo saw it change, and not because the user asked for it."""
    if not dynamo_config.assume_static_by_default:  # dynamic=True
        return False
    constraints = _constraints(symbol)
    return not constraints or any(c is not None and c.warn_only for c in constraints)


def user_upper_bound(symbol: torch.SymInt) -> int | None:
    """The ``max`` that ``mark_dynamic`` was given for a symbolic size, if it was."""
    given = [c.vr.upper for c in _constraints(symbol) if hasattr(c, "vr") and c.vr.upper not in (None, int_oo)]
    return int(min(given)) if given else None


def _constraints(symbol: torch.SymInt) -> list[Any]:
    """What Dynamo noted of every dimension that has a symbolic size; of a number, or a stride, it notes nothing."""
    node = symbol.node
    found: list[Any] = []
    for tracked in node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if isinstance(size, torch.SymInt) and size.node.expr == node.expr:
                found.append(constraint)
    return found


def bound_by_hint(number: torch.SymInt) -> None:
    """Guard every symbol in a number that has no upper bound to be at most what it is."""
    env = number.node.shape_env
    sizes = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val  # before 2.13
    for symbol in number.node.expr.free_symbols:
        if env.var_to_range[symbol].upper is int_oo:
            env.evaluate_expr(sympy.Le(symbol, sizes[symbol]))


def value_at_upper_bounds(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool | None:
    """What a symbolic number is when every symbol in it is at its upper bound; None if one has no bound."""
    node = number.node
    upper = {s: node.shape_env.var_to_range[s].upper for s in node.expr.free_symbols}
    return None if int_oo in upper.values() else node.pytype(node.expr.xreplace(upper))


def upper_bound(number: torch.SymInt) -> int | None:
    """The most that a symbolic size can be; None if one of its symbols has no bound.

    Where arithmetic on ranges does not show that a size only grows with its symbols, it is tried along the range of each.
    """
    node = number.node
    ranges = {s: node.shape_env.var_to_range[s] for s in node.expr.free_symbols}
    if any(r.upper is int_oo for r in ranges.values()):
        return None
    return _largest(node.expr, tuple(sorted(((s, int(r.lower), int(r.upper)) for s, r in ranges.items()), key=str)))


@functools.lru_cache(maxsize=4096)
def _largest(expression: Any, ranges: tuple[tuple[Any, int, int], ...]) -> int:
    corner = {s: sympy.Integer(upper) for s, _, upper in ranges}
    most = expression.xreplace(corner)
    if bound_sympy(expression, {s: ValueRanges(lower, upper) for s, lower, upper in ranges}).upper == most:
        return int(most)
    found = [int(most)]
    for symbol, lower, upper in ranges:
        for size in sorted({lower + (upper - lower) * i // _TRIED for i in range(_TRIED)}):
            with suppress(ZeroDivisionError):  # a size that no tensor can have
                value = expression.xreplace({**corner, symbol: sympy.Integer(size)})
                found += [int(value)] if value.is_Integer else []
    return max(found)
