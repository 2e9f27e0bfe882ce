"""``checkmate report``: draw a plan as one page, and export it for other viewers."""

from __future__ import annotations

import json as json_format
import pickle
from pathlib import Path

import msgspec

from checkmate.cli import amounts, files, terminal
from checkmate.core.errors import printable
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Curve
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes


def report(
    graph: Path,
    plan: Path,
    /,
    *,
    against: Path | None = None,
    curve: Path | None = None,
    budget: str | None = None,
    out: Path = Path("report.html"),
    perfetto: Path | None = None,
    memory_viz: Path | None = None,
    json: terminal.Json = False,
) -> int:
    """Draw a plan as one offline HTML file: memory over the step, schedule, contents of the peak, recomputed ops.

    Args:
        graph: Graph file.
        plan: Plan file, or result file from `checkmate plan --result`, whose lower bound is shown too.
        against: Second plan file of the same graph, for comparison.
        curve: Curve file from `checkmate pareto`.
        budget: Total such as 8GiB, or a share such as 50%, drawn as a line.
        out: HTML file to write.
        perfetto: Trace file to write as well, for ui.perfetto.dev.
        memory_viz: Memory snapshot to write as well, for pytorch.org/memory_viz.
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    from checkmate.report import html_report, memory_snapshot, perfetto_trace

    outputs = files.Outputs(graph, plan, against, curve)
    outputs.check(out, perfetto, memory_viz)
    target = files.load(graph, Graph)
    if not target.name.strip():
        target = msgspec.structs.replace(target, name=printable(graph.name.partition(".")[0]))
    steps, result = files.load_planned(plan)
    other = None if against is None else files.load_plan(against)
    problem = None if budget is None else Problem(target, budget)
    facts = [["file", "", *(printable(str(path)) for path in (plan, against) if path is not None)]]
    if problem is not None and problem.budget.is_share:
        facts.append(["budget as asked for", "", problem.describe_budget()])
    page = html_report(
        target,
        steps,
        against=other,
        result=result,
        curve=None if curve is None else files.load(curve, Curve),
        budget_bytes=None if problem is None else problem.budget_bytes,
        facts=facts,
        graph_file=printable(str(graph)),
        plan_file=printable(str(plan)),
    ).encode()
    contents = [(page, out)]
    if perfetto is not None:
        contents.append((json_format.dumps(perfetto_trace(target, steps)).encode(), perfetto))
    if memory_viz is not None:
        contents.append((pickle.dumps(memory_snapshot(target, steps), protocol=4), memory_viz))
    outputs.save(*contents)
    timeline = simulate(target, steps)
    if json:
        terminal.emit(
            {
                "report": str(out),
                "size_bytes": len(page),
                "perfetto": None if perfetto is None else str(perfetto),
                "memory_viz": None if memory_viz is None else str(memory_viz),
                "peak_bytes": timeline.peak_bytes,
                "cost": timeline.cost,
                "cost_unit": target.cost_unit,
            }
        )
        return 0
    kept = simulate(target, Plan.from_order(target, range(len(target.ops))))
    terminal.facts(
        [
            ("graph", amounts.describe_graph(target, graph)),
            ("peak", f"{format_bytes(timeline.peak_bytes)}, {format_bytes(kept.peak_bytes)} keeping everything"),
            ("page", f"{format_bytes(len(page))}, needs no network"),
        ]
    )
    terminal.closing([path for _, path in contents], f"open {out} in a browser")
    return 0
