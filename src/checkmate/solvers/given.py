"""Plans that exist already, checked like those of a solver."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from checkmate.core.errors import OptionError, WrongGraphError
from checkmate.core.files import read
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Result, Termination
from checkmate.core.simulate import simulate
from checkmate.core.units import Amount, format_at_least, format_bytes
from checkmate.solvers.session import Session
from checkmate.solvers.solve import solve


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


def keep_everything(graph: Graph) -> Result:
    """The result of computing every op once, in the graph's own order."""
    return run_order(graph, range(len(graph.ops)))


def load_plan(plan: Plan | str | os.PathLike[str]) -> Plan:
    """A plan, or that of a file with a plan or a result.

    Raises:
        OptionError: The file holds neither.
    """
    if isinstance(plan, Plan):
        return plan
    content = read(plan)
    if isinstance(content, Result) and content.plan is not None:
        return content.plan
    if not isinstance(content, Plan):
        raise OptionError(f"plan={plan!r} holds a {type(content).__name__}, not a plan")
    return content


def check_given(graph: Graph, plan: Plan, budget: Amount | None) -> Result:
    """The result of a plan that was given.

    Args:
        graph: The graph that it is for.
        plan: The plan.
        budget: Budget that it has to keep, or None.

    Raises:
        WrongGraphError: It is of another graph.
        OptionError: It takes more than the budget.
    """
    if plan.graph_digest and plan.graph_digest != graph.digest:
        raise WrongGraphError(
            f"the plan was made for another graph ({plan.graph_digest[:15]}, not {graph.digest[:15]}): other shapes, "
            "another model, other options or another version of the framework",
            hint="make a new plan: give a budget and leave out `plan`",
        )
    peak = simulate(graph, plan).peak_bytes
    if budget is not None and peak > (limit := Problem(graph, budget).budget_bytes):
        raise OptionError(
            f"the plan that was given takes {format_bytes(peak)}, and the budget is {format_bytes(limit)}",
            hint=f"raise the budget to at least {format_at_least(peak)}, or leave out `plan`",
        )
    return run_order(graph, plan.order)


def run_order(graph: Graph, order: Sequence[int]) -> Result:
    """A plan that is known, as a result: checked and simulated."""
    peak = simulate(graph, Plan.from_order(graph, order)).peak_bytes
    return solve(Problem(graph, peak), Given(tuple(order)))
