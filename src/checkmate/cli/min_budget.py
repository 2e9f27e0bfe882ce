"""``checkmate min-budget``: the smallest budget of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from checkmate.cli import amounts, files, terminal
from checkmate.cli.progress import drawn
from checkmate.core.budget import keep_all_bytes
from checkmate.core.graph import Graph
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
    """Find the smallest budget in which a graph can run, and the op that sets it.

    Args:
        graph: Graph file from `checkmate capture`.
        time_limit: Time limit in seconds of wall time.
        seed: Seed of all randomness.
        reorder: Whether a plan can change the order of the graph.
        out: Plan file to write; by default the name comes from the graph.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    target = files.load(graph, Graph)
    where = out or files.beside(graph, "-min.plan.json")
    outputs = files.Outputs(graph)
    outputs.check(where)
    with drawn("looking for the smallest peak"):
        result = smallest_budget(target, limits=Limits(time_s=time_limit, seed=seed), reorder=reorder)
    floor, peak = result.floor_bytes, result.peak_bytes
    outputs.save((result.plan, where))
    if json:
        terminal.emit(
            {
                "graph": str(graph),
                "graph_digest": target.digest,
                "plan": str(where),
                "smallest_bytes": peak,
                "floor_bytes": floor,
                "proven": result.proven,
                "why": result.why,
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
            ("floor", f"{format_bytes(floor)}: {result.why}"),
            ("cost", f"{format_cost(result.cost, target.cost_unit)}, {result.overhead:.3f}x: the first found"),
        ]
    )
    proven = (
        "no plan in any order needs less" if result.proven else "the smallest possible peak lies between the floor and this one"
    )
    terminal.say("", proven)
    next_verb = terminal.command("plan", graph, "--budget", format_at_least(peak))
    terminal.closing([where], f"find the cheapest plan within it with {next_verb}")
    return 0
