"""``checkmate explain``: the contents of a plan's peak, with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkmate.cli import amounts, files, terminal
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.result import Curve
from checkmate.studies.explain import Explanation
from checkmate.studies.explain import explain as explanation_of


def explain(graph: Path, plan: Path, /, *, curve: Path | None = None, most: int = 10, json: terminal.Json = False) -> int:
    """List the contents of a plan's peak with reasons, the recomputed ops, and the cost of a MiB less.

    Args:
        graph: Graph file.
        plan: Plan file or result file.
        curve: Curve file from `checkmate pareto`, from which the cost of a MiB less and the saving of a MiB more are read.
        most: Maximum number of lines in each list.
        json: Print one JSON object on stdout, with the complete lists.

    Returns:
        The exit code.
    """
    if most < 1:
        raise OptionError(f"--most {most} must be one or more", hint="give the number of lines, such as --most 10")
    target, steps = files.load(graph, Graph), files.load_plan(plan)
    known = None if curve is None else files.load(curve, Curve)
    found = explanation_of(target, steps, curve=known)
    if json:
        terminal.emit(_as_json(target, graph, plan, found))
        return 0
    terminal.facts([("graph", amounts.describe_graph(target, graph))])
    terminal.say("", *found.render(most).split("\n"))
    terminal.closing([], f"draw the plan with {terminal.command('report', graph, plan)}")
    return 0


def _as_json(graph: Graph, graph_path: Path, plan_path: Path, found: Explanation) -> dict[str, Any]:
    return {
        "graph": str(graph_path),
        "plan": str(plan_path),
        "peak_bytes": found.peak_bytes,
        "peak_step": found.peak_step,
        "peak_op": None if found.peak_op is None else graph.ops[found.peak_op].name,
        "held": [entry._asdict() for entry in found.held],
        "cost": found.cost,
        "cost_unit": found.cost_unit,
        "overhead": found.overhead,
        "computed_again": [remat._asdict() for remat in found.remats],
        "dearer_per_mib": found.dearer_per_mib,
        "cheaper_per_mib": found.cheaper_per_mib,
    }
