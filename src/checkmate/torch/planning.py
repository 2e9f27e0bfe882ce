"""Ask the core for the plan of a captured graph."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from checkmate.core.errors import OptionError, WrongGraphError
from checkmate.core.files import read
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem, keep_all_bytes
from checkmate.core.result import Limits, Reason, Result, Termination
from checkmate.core.simulate import simulate
from checkmate.core.units import format_at_least, format_bytes
from checkmate.solvers.session import Session
from checkmate.solvers.solve import solve
from checkmate.torch.options import Options

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True)
class Given:
    """A solver that offers one order: the one that it was given.

    Attributes:
        order: Ops in the order of their computations.
    """

    order: tuple[int, ...]

    def run(self, problem: Problem, session: Session) -> Termination:
        """Offer the order."""
        session.offer(self.order)
        return Termination(Reason.FEASIBLE, detail="a plan that was given")


def plan_graph(graph: Graph, options: Options) -> Result:
    """The plan to run, checked.

    Raises:
        InfeasibleBudgetError: No plan keeps the budget.
        PlanNotFoundError: None was found in time.
        OptionError: The plan that was given takes more than the budget.
        WrongGraphError: The plan that was given is of another graph.
    """
    if options.plan is not None:
        return _given(graph, _load(options.plan), options)
    if options.budget is None:
        return solve(Problem(graph, keep_all_bytes(graph)), Given(tuple(range(len(graph.ops)))))
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


def _load(plan: object) -> Plan:
    if isinstance(plan, Plan):
        return plan
    content = read(plan)  # type: ignore[arg-type]
    if isinstance(content, Result) and content.plan is not None:
        return content.plan
    if not isinstance(content, Plan):
        raise OptionError(f"plan={plan!r} holds a {type(content).__name__}, not a plan")
    return content


def _given(graph: Graph, plan: Plan, options: Options) -> Result:
    if plan.graph_digest and plan.graph_digest != graph.digest:
        raise WrongGraphError(
            f"the plan was made for another graph ({plan.graph_digest[:15]}, not {graph.digest[:15]}): other shapes, "
            "another model, other options or another version of torch",
            hint="plan anew: give a budget and leave out `plan`",
        )
    peak = simulate(graph, plan).peak_bytes
    if options.budget is not None and peak > (budget := Problem(graph, options.budget).budget_bytes):
        raise OptionError(
            f"the plan that was given takes {format_bytes(peak)}, and the budget is {format_bytes(budget)}",
            hint=f"raise the budget to at least {format_at_least(peak)}, or leave out `plan`",
        )
    return run_order(graph, plan.order)


def run_order(graph: Graph, order: Sequence[int]) -> Result:
    """A plan that is known, as a result: checked and simulated."""
    peak = simulate(graph, Plan.from_order(graph, order)).peak_bytes
    return solve(Problem(graph, peak), Given(tuple(order)))
