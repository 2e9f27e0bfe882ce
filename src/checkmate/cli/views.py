"""``checkmate explain``, ``diff`` and ``report``: plans in words, side by side, and as a page."""

from __future__ import annotations

import json as json_format
from pathlib import Path

import msgspec

from checkmate.cli import files, terminal
from checkmate.cli.options import Amounts, Count
from checkmate.core.errors import printable
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Curve
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes
from checkmate.report import PageText, html_report, perfetto_trace
from checkmate.studies.compare import compare
from checkmate.studies.explain import explain as explanation_of


def explain(graph: Path, plan: Path, /, *, curve: Path | None = None, most: Count = 10, json: terminal.Json = False) -> int:
    """List ops to keep and to recompute, the contents of a plan's peak with reasons, and the cost of a MiB less.

    Args:
        graph: Graph file.
        plan: Plan file or result file.
        curve: Curve file from `checkmate pareto`, from which the cost of a MiB less and the saving of a MiB more are read.
        most: Maximum number of lines in each list.
        json: Print one JSON object on stdout, with the complete lists.
    """
    amounts, (steps, result) = Amounts.of(graph), files.load_planned(plan)
    measured = [] if result is None or result.measured is None else [str(result.measured)]
    found = explanation_of(amounts.graph, steps, curve=None if curve is None else files.load(curve, Curve))
    return terminal.VerbOutput(
        data={
            "graph": str(graph),
            "plan": str(plan),
            **terminal.picked(found, "peak_bytes", "peak_step"),
            "peak_op": None if found.peak_op is None else amounts.graph.ops[found.peak_op].name,
            "held": [entry._asdict() for entry in found.held],
            **terminal.picked(found, "cost", "cost_unit", "overhead"),
            "computed_again": [remat._asdict() for remat in found.remats],
            **terminal.picked(found, "dearer_per_mib", "cheaper_per_mib"),
            "lessons": list(found.lessons),
        },
        facts=[("graph", str(amounts))],
        lines=["", *found.render(most).split("\n"), *measured],
        hint=f"draw the plan with {terminal.command('report', graph, plan)}",
    ).show(json)


def diff(graph: Path, first: Path, second: Path, /, *, most: Count = 5, json: terminal.Json = False) -> int:
    """List the differences between two plans of one graph: peak, cost, recomputed ops and held values.

    Args:
        graph: Graph file of both plans.
        first: Plan file or result file.
        second: Second plan file or result file.
        most: Maximum number of lines in each list.
        json: Print one JSON object on stdout, with the complete lists.
    """
    amounts = Amounts.of(graph)
    found = compare(amounts.graph, files.load_planned(first)[0], files.load_planned(second)[0])
    return terminal.VerbOutput(
        data={
            "graph": str(graph),
            "plans": [str(first), str(second)],
            "peak_bytes": list(found.peak_bytes),
            "cost": list(found.cost),
            "cost_unit": found.cost_unit,
            "overhead": list(found.overhead),
            "recomputations": list(found.again),
            "more_in_first": [remat._asdict() for remat in found.more_in_a],
            "more_in_second": [remat._asdict() for remat in found.more_in_b],
            "held_in_first": [entry._asdict() for entry in found.held_in_a],
            "held_in_second": [entry._asdict() for entry in found.held_in_b],
        },
        facts=[("graph", str(amounts)), ("first", str(first)), ("second", str(second))],
        lines=["", *found.render(most).split("\n")],
        hint=f"draw both with {terminal.command('report', graph, second, '--against', first)}",
    ).show(json)


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
        json: Print one JSON object on stdout.
    """
    outputs = files.Outputs(graph, plan, against, curve)
    outputs.check(out, perfetto)
    target = files.load(graph, Graph)
    if not target.name.strip():
        target = msgspec.structs.replace(target, name=printable(graph.name.partition(".")[0]))
    steps, result = files.load_planned(plan)
    problem = None if budget is None else Problem(target, budget)
    page = html_report(
        target,
        steps,
        against=None if against is None else files.load_planned(against)[0],
        result=result,
        curve=None if curve is None else files.load(curve, Curve),
        budget_bytes=None if problem is None else problem.budget_bytes,
        text=_page_text(graph, plan, against, problem),
    ).encode()
    trace = b"" if perfetto is None else json_format.dumps(perfetto_trace(target, steps)).encode()
    outputs.save((page, out), (trace, perfetto))
    timeline, amounts = simulate(target, steps), Amounts(graph, target)
    return terminal.VerbOutput(
        data={
            "report": str(out),
            "size_bytes": len(page),
            "perfetto": None if perfetto is None else str(perfetto),
            **terminal.picked(timeline, "peak_bytes", "cost"),
            "cost_unit": target.cost_unit,
        },
        facts=[
            ("graph", str(amounts)),
            ("peak", f"{format_bytes(timeline.peak_bytes)}, {format_bytes(amounts.keep_all_bytes)} keeping everything"),
            ("page", f"{format_bytes(len(page))}, needs no network"),
        ],
        wrote=[out, perfetto],
        hint=f"open {out} in a browser",
    ).show(json)


def _page_text(graph: Path, plan: Path, against: Path | None, problem: Problem | None) -> PageText:
    rows = [["file", "", *(printable(str(path)) for path in (plan, against) if path is not None)]]
    if problem is not None and problem.budget.is_share:
        rows.append(["budget as asked for", "", problem.describe_budget()])
    return PageText(facts=rows, graph_file=printable(str(graph)), plan_file=printable(str(plan)))
