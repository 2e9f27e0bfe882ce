"""``checkmate verify``: check a plan, without a framework or a device."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from checkmate.cli import amounts, files, terminal
from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import PlanError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.simulate import Timeline, simulate
from checkmate.core.units import format_bytes, format_cost
from checkmate.core.validate import Violation, validate

_SHOWN = 20


def verify(
    graph: Path,
    plan: Path,
    /,
    *,
    budget: str | None = None,
    recompute: Literal["all", "forward"] = "all",
    reorder: Annotated[bool, Parameter(negative="--no-reorder")] = True,
    json: terminal.Json = False,
) -> int:
    """Check a plan against its graph and a budget: exit code 0 if it holds, 1 if not.

    Two accounts of memory that share no code have to agree.

    Args:
        graph: Graph file.
        plan: Plan file.
        budget: Total such as 8GiB, or a share such as 50%; without it only the plan's own rules are checked.
        recompute: The ops that a plan can recompute.
        reorder: Whether a plan can change the order of the graph.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    target, steps = files.load(graph, Graph), files.load_plan(plan)
    problem = None if budget is None else Problem(target, budget, recompute, reorder)
    budget_bytes = None if problem is None else problem.budget_bytes
    timeline = _timeline(target, steps)
    cost = None if timeline is None else timeline.cost
    broken = list(validate(target, steps, budget_bytes, recompute=recompute, reorder=reorder, cost=cost))
    if timeline is not None and budget_bytes is not None and (timeline.peak_bytes > budget_bytes) != _over(broken):
        broken.append(Violation("budget", timeline.peak_step, "the two accounts of memory disagree, which is a bug of Checkmate"))
    overhead = timeline.cost / target.cost if timeline is not None and target.cost else None
    if json:
        terminal.emit(
            {
                "holds": not broken,
                "graph": str(graph),
                "plan": str(plan),
                "budget_bytes": budget_bytes,
                "peak_bytes": None if timeline is None else timeline.peak_bytes,
                "cost": None if timeline is None else timeline.cost,
                "cost_unit": target.cost_unit,
                "overhead": overhead,
                "recomputations": len(steps.order) - len(target.ops),
                "violations": [violation._asdict() for violation in broken],
            }
        )
        return 1 if broken else 0
    rows = [("graph", amounts.describe_graph(target, graph)), ("plan", f"{plan}  {_describe(target, steps)}")]
    if problem is not None:
        rows.append(("budget", amounts.describe_budget(problem.budget_bytes, keep_all_bytes(target), problem.budget)))
    if timeline is not None:
        rows.append(("peak", f"{format_bytes(timeline.peak_bytes)}, at step {timeline.peak_step}"))
        rows.append(("cost", f"{format_cost(timeline.cost, target.cost_unit)}, {overhead or 1.0:.3f}x"))
    terminal.facts(rows)
    if broken:
        shown = [(str(v.step), v.rule, v.message) for v in broken[:_SHOWN]]
        terminal.table([("step", True), ("rule", False), ("violation", False)], shown)
        rest = f", of which {_SHOWN} are shown" if len(broken) > _SHOWN else ""
        terminal.say(f"does not hold: {len(broken)} violation{'s' * (len(broken) > 1)}{rest}")
        terminal.closing(
            [], f"find a valid plan with {terminal.command('plan', graph, '--budget', amounts.one_word(budget or '50%'))}"
        )
        return 1
    terminal.say("", "holds" if budget_bytes is None else "holds, within the budget at every step")
    return 0


def _timeline(graph: Graph, plan: Plan) -> Timeline | None:
    """The simulated timeline, or None for a plan that cannot run; `validate` gives the reasons."""
    try:
        return simulate(graph, plan)
    except PlanError:
        return None


def _over(broken: list[Violation]) -> bool:
    return any(violation.rule == "budget" for violation in broken)


def _describe(graph: Graph, plan: Plan) -> str:
    again = len(plan.order) - len(set(plan.order))
    return f"{len(plan.steps)} steps, {again} of them recomputations"
