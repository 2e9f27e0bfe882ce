"""The smallest budget within which a graph can be run."""

from __future__ import annotations

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Reason, Result, Termination
from checkmate.core.simulate import simulate
from checkmate.solvers.session import Session
from checkmate.solvers.smallest import smallest_peak


def min_budget(graph: Graph, *, limits: Limits | None = None, reorder: bool = True) -> Result:
    """The smallest peak that a plan was found for, with the plan.

    Args:
        graph: The graph.
        limits: Time and seed; 20 seconds by default.
        reorder: Whether first computations may leave the graph's own order.

    Returns:
        A result whose ``peak_bytes`` is the smallest budget found, whose ``budget_bytes`` is the proven
        floor, and whose ``termination.detail`` names the op that sets it. The plan's cost is not minimised:
        solve with its peak as the budget to get a cheaper one.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 1, 1], size_bytes=[4, 4, 4], edges=[(0, 1), (0, 2), (1, 2)])
        >>> min_budget(chain).peak_bytes
        12
    """
    problem = Problem(graph, graph.resident_bytes, reorder=reorder)
    session = Session(problem, Limits(time_s=20.0) if limits is None else limits)
    smallest = smallest_peak(problem, session.limits)
    plan: Plan | None = smallest.plan
    timeline = None if plan is None else simulate(graph, plan)
    met = smallest.peak_bytes is not None and smallest.peak_bytes <= smallest.floor_bytes
    return Result(
        plan=plan,
        cost=None if timeline is None else timeline.cost,
        overhead=None if timeline is None or not graph.cost else timeline.cost / graph.cost,
        peak_bytes=smallest.peak_bytes,
        budget_bytes=smallest.floor_bytes,
        bound=float(graph.cost),
        gap=None,
        termination=Termination(Reason.OPTIMAL if met else Reason.FEASIBLE, detail=smallest.why),
        solver="min_budget",
        elapsed_s=session.elapsed_s(),
    )
