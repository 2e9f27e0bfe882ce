"""Which ops are computed in their own turn, and which only when somebody asks."""

from __future__ import annotations

from checkmate.core.problem import Problem
from checkmate.solvers.orders import late_sinks, on_demand_ops


def target_lists(problem: Problem) -> list[frozenset[int]]:
    """Sets of ops to compute on demand, the most promising first; one empty set without reordering."""
    if not problem.reorder:
        return [frozenset()]
    asked = on_demand_ops(problem.graph)
    sinks = late_sinks(problem.graph)
    return [asked | sinks, asked] if sinks else [asked]
