"""Private names of torch's symbolic shapes: ranges of symbols, and reasons why a dimension is dynamic."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import sympy
import torch
import torch._dynamo.config as dynamo_config
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.reference import PythonReferenceAnalysis
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy


def is_automatic_dynamic(symbol: torch.SymInt) -> bool:
    """Whether a size is dynamic only because Dynamo saw it change ("automatic dynamic"), not because the user asked for it."""
    if not dynamo_config.assume_static_by_default:  # torch.compile(dynamic=True): the user asked for all of them
        return False
    constraints = _constraints(symbol)
    return not constraints or any(c is not None and c.warn_only for c in constraints)


def user_upper_bound(symbol: torch.SymInt) -> int | None:
    """The ``max`` given to ``torch._dynamo.mark_dynamic`` for a symbolic size, or None."""
    given = [c.vr.upper for c in _constraints(symbol) if hasattr(c, "vr") and c.vr.upper not in (None, int_oo)]
    return int(min(given)) if given else None


def _constraints(symbol: torch.SymInt) -> list[Any]:
    """Dynamo's constraints on every dimension of this symbolic size; it records none for integers and strides."""
    node = symbol.node
    found: list[Any] = []
    for tracked in node.shape_env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", ())
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            if isinstance(size, torch.SymInt) and size.node.expr == node.expr:
                found.append(constraint)
    return found


def bound_by_hint(number: torch.SymInt) -> None:
    """Install guards: each symbol of the number without an upper bound is at most its current value."""
    env = number.node.shape_env
    for symbol in number.node.expr.free_symbols:
        if env.var_to_range[symbol].upper is int_oo:
            env.evaluate_expr(sympy.Le(symbol, env.backed_var_to_val[symbol]))


def value_at_upper_bounds(number: torch.SymInt | torch.SymFloat | torch.SymBool) -> int | float | bool | None:
    """Value of a symbolic number with every symbol at its upper bound; None if a symbol has no bound."""
    node = number.node
    upper = {s: node.shape_env.var_to_range[s].upper for s in node.expr.free_symbols}
    return None if int_oo in upper.values() else node.pytype(node.expr.xreplace(upper))


def upper_bound(number: torch.SymInt) -> int | None:
    """Largest value of a symbolic size over the ranges of its symbols; None if a symbol has no upper bound.

    Interval arithmetic gives a bound, which is exact if it is attained with every symbol at its upper bound. Otherwise, as in
    ``1024 - n``, the expression is sampled along the range of each symbol.
    """
    expression = number.node.expr
    ranges = {s: number.node.shape_env.var_to_range[s] for s in expression.free_symbols}
    if any(r.upper is int_oo for r in ranges.values()):
        return None
    return _largest(expression, tuple(sorted(((s, int(r.lower), int(r.upper)) for s, r in ranges.items()), key=str)))


@functools.lru_cache(maxsize=4096)
def _largest(expression: Any, ranges: tuple[tuple[Any, int, int], ...]) -> int:
    corner = {s: sympy.Integer(upper) for s, _, upper in ranges}
    most = expression.xreplace(corner)
    if bound_sympy(expression, {s: ValueRanges(lower, upper) for s, lower, upper in ranges}).upper == most:
        return int(most)
    found = [int(most)]
    for symbol, lower, upper in ranges:
        # More sizes cost milliseconds per expression. Expressions in models are piecewise linear with few pieces: ``s // 2``.
        for size in sorted({lower + (upper - lower) * i // 32 for i in range(32)}):
            with suppress(ZeroDivisionError):  # no tensor has such a size
                value = expression.xreplace({**corner, symbol: sympy.Integer(size)})
                found += [int(value)] if value.is_Integer else []
    return max(found)


def emit_expression(graph: fx.Graph, number: torch.SymInt, known: Mapping[sympy.Expr, fx.Node]) -> fx.Node | None:
    """Nodes that compute a symbolic number from its symbols, at the graph's insertion point; None if a part is not known."""
    expression = number.node.expr
    symbols = expression.free_symbols
    if not symbols or any(s not in known for s in symbols):
        return None
    before = set(graph.nodes)
    try:
        made = sympy_interp(PythonReferenceAnalysis, {s: fx.Proxy(known[s]) for s in symbols}, expression)
        for node in graph.nodes:
            if node not in before:
                node.meta["val"] = node.target(*fx.map_arg(node.args, lambda n: n.meta["val"]))
    except (AssertionError, NotImplementedError, TypeError):
        for node in [n for n in reversed(list(graph.nodes)) if n not in before]:
            graph.erase_node(node)
        return None
    return made.node if isinstance(made, fx.Proxy) else None
