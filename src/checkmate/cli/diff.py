"""``checkmate diff``: the differences between two plans of one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkmate.cli import amounts, files, terminal
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.studies.compare import Comparison, compare


def diff(graph: Path, first: Path, second: Path, /, *, most: int = 5, json: terminal.Json = False) -> int:
    """List the differences between two plans of one graph: peak, cost, recomputed ops and held values.

    Args:
        graph: Graph file of both plans.
        first: Plan file or result file.
        second: Second plan file or result file.
        most: Maximum number of lines in each list.
        json: Print one JSON object on stdout, with the complete lists.

    Returns:
        The exit code: 0 whether or not the plans differ.
    """
    if most < 1:
        raise OptionError(f"--most {most} must be one or more", hint="give the number of lines, such as --most 5")
    target = files.load(graph, Graph)
    found = compare(target, files.load_plan(first), files.load_plan(second))
    if json:
        terminal.emit(_as_json(graph, (first, second), found))
        return 0
    terminal.facts([("graph", amounts.describe_graph(target, graph)), ("first", str(first)), ("second", str(second))])
    terminal.say("", *found.render(most).split("\n"))
    terminal.closing([], f"draw both with {terminal.command('report', graph, second, '--against', first)}")
    return 0


def _as_json(graph: Path, plans: tuple[Path, Path], found: Comparison) -> dict[str, Any]:
    return {
        "graph": str(graph),
        "plans": [str(path) for path in plans],
        "peak_bytes": list(found.peak_bytes),
        "cost": list(found.cost),
        "cost_unit": found.cost_unit,
        "overhead": list(found.overhead),
        "recomputations": list(found.again),
        "more_in_first": [remat._asdict() for remat in found.more_in_a],
        "more_in_second": [remat._asdict() for remat in found.more_in_b],
        "held_in_first": [entry._asdict() for entry in found.held_in_a],
        "held_in_second": [entry._asdict() for entry in found.held_in_b],
    }
