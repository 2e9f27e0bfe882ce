"""The figures of an existing plan, exactly as given."""

from __future__ import annotations

import time

from checkmate.core.budget import Budget
from checkmate.core.errors import PlanError, WrongGraphError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Result, Termination
from checkmate.core.simulate import simulate
from checkmate.core.units import Amount, format_at_least, format_bytes
from checkmate.core.validate import validate


def evaluate(graph: Graph, plan: Plan, budget: Amount | Budget | None = None) -> Result:
    """Check a plan and return its cost, overhead and peak, without adding, dropping or moving a step.

    Args:
        graph: The graph that the plan is for.
        plan: The plan.
        budget: The budget that the plan must keep. With None the plan's own peak is the budget of the result.

    Returns:
        The result. Its bound is the cost of computing every op once, which every plan needs.

    Raises:
        WrongGraphError: The plan was made for another graph.
        PlanError: The plan breaks a rule of the graph, or its peak is above the budget.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 1, 1], size_bytes=[4, 4, 4], edges=[(0, 1), (1, 2)], kept=[2])
        >>> twice = evaluate(chain, Plan.from_order(chain, [0, 0, 1, 2]), "1KiB")
        >>> twice.plan.order, twice.cost, twice.peak_bytes, twice.budget_bytes
        ((0, 0, 1, 2), 4, 8, 1024)
    """
    began = time.perf_counter()
    if not plan.is_for(graph):
        raise WrongGraphError(
            f"the plan was made for another graph ({plan.graph_digest[:15]}, not {graph.digest[:15]}): other shapes, "
            "another model, other options or another version of the framework",
            hint="give a budget instead of the plan, so that this graph is planned, or pass the plan that was made for it",
        )
    timeline = simulate(graph, plan)
    peak, cost = timeline.peak_bytes, timeline.cost
    broken = validate(graph, plan, peak, cost=cost)  # the independent account must reach the same peak and cost
    if broken:
        raise PlanError(
            f"the plan cannot run: {broken[0].message}" + (f" (and {len(broken) - 1} more)" if broken[1:] else ""),
            hint="build it with Plan.from_order(graph, order), from an order that computes every op before its readers",
        )
    if isinstance(budget, (int, float, str)):
        budget = Budget.parse(budget)
    limit = peak if budget is None else budget.resolve(graph)
    if budget is not None and peak > limit:
        raise PlanError(
            f"the plan needs {format_bytes(peak)}, and the budget is {Problem(graph, budget).describe_budget()}",
            hint=f"raise the budget to at least {format_at_least(peak)}, or leave out the plan to have one made",
        )
    return Result(
        plan=plan,
        cost=cost,
        overhead=graph.overhead(cost),
        peak_bytes=peak,
        budget_bytes=limit,
        bound=float(graph.cost),
        gap=(cost - graph.cost) / cost if cost else 0.0,
        termination=Termination(Reason.OPTIMAL if cost == graph.cost else Reason.FEASIBLE, detail="a plan that was given"),
        solver="evaluate",
        elapsed_s=time.perf_counter() - began,
    )
