"""Budgets of memory as an allocator counts it, which can be more than the live bytes of a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from checkmate.core.budget import Budget, fixed_bytes
from checkmate.core.errors import InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.studies.larger_step import bytes_of_larger

_log = logging.getLogger("checkmate.frontend")

Counted = Callable[[Graph, Plan], int]
"""Bytes of a plan that count against a budget, resident bytes included; no less than its peak of live bytes."""


def cheapest_counted(problem: Problem, counted: Counted, solve: Callable[[Problem, float], Result]) -> Result:
    """The cheapest plan found whose counted bytes keep the budget.

    The bytes that an allocator adds are known only for a given plan. The problem is therefore solved for the budget, and again
    for a target that is smaller by the excess of the last plan. Each solve is told the seconds that earlier solves took. The
    lower bound of the first solve holds for all: counted bytes are at least the live bytes, and a plan that keeps the budget by
    counted bytes keeps it by live bytes too.

    Raises:
        InfeasibleBudgetError: Proven: no plan keeps the budget even by its live bytes.
        PlanNotFoundError: No plan was found whose counted bytes keep the budget; the hint has the least bytes found.
    """
    budget_bytes = target = problem.budget_bytes
    result = first = solve(problem, 0.0)
    spent_s, found = first.elapsed_s, list[int]()
    for _ in range(6):  # two or three are enough as a rule
        taken = counted(problem.graph, result.plan)
        found.append(taken)
        if taken <= budget_bytes:
            bound = min(first.bound, result.cost)
            gap = 1 - bound / result.cost if result.cost else 0.0
            return msgspec.structs.replace(result, budget_bytes=budget_bytes, bound=bound, gap=gap, elapsed_s=spent_s)
        excess = taken - budget_bytes
        _log.info("a plan of %s counts as %s: %s too much", *map(format_bytes, (result.peak_bytes, taken, excess)))
        target = min(target, result.peak_bytes) - excess
        try:
            result = solve(problem.replace_budget(target), spent_s)
        except (InfeasibleBudgetError, PlanNotFoundError):
            break
        spent_s += result.elapsed_s
    raise PlanNotFoundError(
        f"no plan was found that keeps {problem.describe_budget()} with what the allocator adds: the plans found take at least "
        f"{format_bytes(min(found))}",
        hint=f"raise the budget to at least {format_at_least(min(found))}, or lower the batch size",
    )


def counted_bytes(graph: Graph, result: Result, counted: Counted | None) -> int:
    """Bytes of a result that count against a budget: the peak of live bytes unless ``counted`` is given."""
    return result.peak_bytes if counted is None else counted(graph, result.plan)


def resolved_budget(budget: Budget, graph: Graph, counted: Counted | None) -> int:
    """Bytes of a budget for a graph; a share is a share of the bytes for keeping everything, by the same account.

    For a smaller batch of a planned step, a share stays the same number of bytes.
    """
    if budget.total_bytes is not None:
        return budget.total_bytes
    of_larger = bytes_of_larger(budget, graph)
    if of_larger is not None:
        return of_larger
    if counted is None:
        return budget.resolve(graph)
    keep_all = counted(graph, Plan.from_order(graph, range(len(graph.ops))))
    return budget.within(fixed_bytes=fixed_bytes(graph), keep_all_bytes=keep_all)
