"""``checkmate min-budget``: how little memory a step takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from checkmate.cli import amounts, files, terminal
from checkmate.cli.progress import drawn
from checkmate.core.errors import PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.problem import keep_all_bytes
from checkmate.core.result import Limits
from checkmate.core.units import format_at_least, format_bytes, format_cost
from checkmate.studies.min_budget import min_budget as smallest_budget


def min_budget(
    graph: Path,
    /,
    *,
    time_limit: float = 20.0,
    seed: int = 0,
    reorder: Annotated[bool, Parameter(negative="--no-reorder")] = True,
    out: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Find the smallest budget that a graph can be run in, and what sets it.

    Args:
        graph: Graph file, as `checkmate capture` writes it.
        time_limit: Seconds of wall time.
        seed: Seed of everything random.
        reorder: Whether ops may leave the order of the graph.
        out: Plan file to write; named after the graph by default.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    target = files.load(graph, Graph)
    with drawn("looking for the smallest peak"):
        result = smallest_budget(target, limits=Limits(time_s=time_limit, seed=seed), reorder=reorder)
    floor, plan, peak = result.budget_bytes, result.plan, result.peak_bytes
    if plan is None or peak is None:
        raise PlanNotFoundError(
            f"no plan was found; no plan of any order takes less than {format_bytes(floor)}: {result.termination.detail}",
            hint="raise --time-limit",
        )
    where = out or files.beside(graph, "-min.plan.json")
    files.save(plan, where)
    if json:
        terminal.emit(
            {
                "graph": str(graph),
                "graph_digest": target.digest,
                "plan": str(where),
                "smallest_bytes": peak,
                "floor_bytes": floor,
                "proven": peak <= floor,
                "why": result.termination.detail,
                "keep_all_bytes": keep_all_bytes(target),
                "resident_bytes": target.resident_bytes,
                "cost": result.cost,
                "cost_unit": target.cost_unit,
                "overhead": result.overhead,
                "elapsed_s": round(result.elapsed_s, 3),
            }
        )
        return 0
    terminal.facts(
        [
            ("graph", amounts.describe_graph(target, graph)),
            ("smallest", amounts.describe_budget(peak, keep_all_bytes(target))),
            ("floor", f"{format_bytes(floor)}: {result.termination.detail}"),
            ("cost", f"{format_cost(result.cost or 0, target.cost_unit)}, {result.overhead or 1.0:.3f}x: the first found"),
        ]
    )
    proven = "no plan of any order takes less" if peak <= floor else "no plan is proven to take less than the floor"
    terminal.data().print(f"\n{proven}", soft_wrap=True)
    terminal.closing([where], f"get the cheapest plan in it with `checkmate plan {graph} --budget {format_at_least(peak)}`")
    return 0
