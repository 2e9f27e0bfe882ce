"""``checkmate explain``: what fills the peak of a plan, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkmate.cli import amounts, files, terminal
from checkmate.core.curve import Curve
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.studies.explain import Explanation
from checkmate.studies.explain import explain as explanation_of


def explain(graph: Path, plan: Path, /, *, curve: Path | None = None, most: int = 10, json: terminal.Json = False) -> int:
    """Say what fills the peak of a plan and why it is there, what is computed again, and what a MiB is worth.

    Args:
        graph: Graph file.
        plan: Plan file, or result file.
        curve: Curve file, as `checkmate pareto` writes it; the worth of a MiB is read from it.
        most: Most lines of each list.
        json: Print one JSON object on stdout, with everything in it.

    Returns:
        The exit code.
    """
    if most < 1:
        raise OptionError(f"most={most!r} must be one or more")
    target, steps = files.load(graph, Graph), files.load_plan(plan)
    known = None if curve is None else files.load(curve, Curve)
    found = explanation_of(target, steps, curve=known)
    if json:
        terminal.emit(_as_json(target, graph, plan, found))
        return 0
    terminal.facts([("graph", amounts.describe_graph(target, graph))])
    terminal.data().print(f"\n{found.render(most)}", soft_wrap=True)
    terminal.closing([], f"look at it with `checkmate report {graph} {plan}`")
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
