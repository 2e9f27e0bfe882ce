"""Ask the core for the plan of a captured graph."""

from __future__ import annotations

import logging

from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Result
from checkmate.core.units import format_bytes
from checkmate.solvers.given import check_given, keep_everything, load_plan
from checkmate.solvers.solve import solve
from checkmate.torch.options import Options

_log = logging.getLogger("checkmate.torch")


def plan_graph(graph: Graph, options: Options) -> Result:
    """The plan to run, checked.

    Raises:
        InfeasibleBudgetError: No plan keeps the budget.
        PlanNotFoundError: None was found in time.
        OptionError: The plan that was given takes more than the budget.
        WrongGraphError: The plan that was given is of another graph.
    """
    if options.plan is not None:
        return check_given(graph, load_plan(options.plan), options.budget)
    if options.budget is None:
        return keep_everything(graph)
    problem = Problem(graph, options.budget)
    solver = options.solver
    assert not isinstance(solver, str)
    result = solve(problem, solver, limits=Limits(time_s=options.time_limit_s))
    assert result.peak_bytes is not None
    assert result.overhead is not None
    _log.info(
        "planned %d ops in %.1f s: peak %s of %s, overhead %.4f, gap %.2f %%",
        len(graph.ops),
        result.elapsed_s,
        format_bytes(result.peak_bytes),
        format_bytes(problem.budget_bytes),
        result.overhead,
        100 * (result.gap or 0.0),
    )
    return result
