"""The demo's report: one HTML file that needs nothing else."""

from __future__ import annotations

import html
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from checkmate.cli import amounts
from checkmate.core.errors import OptionError
from checkmate.core.files import write_atomically
from checkmate.core.plan import Compute
from checkmate.core.simulate import Timeline, simulate
from checkmate.core.units import format_bytes
from checkmate.plot import memory_timeline, schedule, themed_svg

if TYPE_CHECKING:
    from checkmate.cli.digits import Trained

_SHOWN = 15
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Checkmate: a training step within {budget}</title>
<style>
  :root {{ color-scheme: light dark; --ink: #24292f; --ground: #ffffff; --rule: #d0d7de; }}
  @media (prefers-color-scheme: dark) {{ :root {{ --ink: #d0d7de; --ground: #0d1117; --rule: #30363d; }} }}
  body {{ color: var(--ink); background: var(--ground); font: 15px/1.5 system-ui, sans-serif; max-width: 56rem;
         margin: 2rem auto; padding: 0 1rem; }}
  svg {{ width: 100%; height: auto; }}
  table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
  th, td {{ text-align: left; padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--rule); }}
  td.number {{ text-align: right; }}
  code {{ font-size: 90%; }}
</style>
<h1>A training step within {budget}</h1>
<p>{summary}</p>
{facts}
<h2>Memory over the step</h2>
{memory}
<h2>What fills the peak</h2>
<p>{at_peak}</p>
{fills}
<h2>The schedule</h2>
<p>Each row is a stage, which ends when an op is computed for the first time; each column is an op.</p>
{schedule}
</html>
"""


def write_report(path: Path, trained: Trained, outcome: dict[str, Any]) -> None:
    """Write the report of a demo.

    Raises:
        OptionError: The file cannot be written.
    """
    planned, keep_all = trained.planned, trained.keep_all
    timeline = simulate(planned.graph, planned.plan)
    budget_bytes = planned.result.budget_bytes
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    memory_timeline(figure.subplots(), timeline, keep_all=simulate(keep_all.graph, keep_all.plan), budget_bytes=budget_bytes)
    raster = Figure(figsize=(8.4, 5.4), layout="constrained", dpi=150)
    schedule(raster.subplots(), planned.graph, planned.plan)
    page = _PAGE.format(
        budget=format_bytes(budget_bytes),
        summary=_summary(trained, outcome),
        facts=_facts(outcome),
        memory=themed_svg(figure, standalone=False),
        at_peak=_at_peak(timeline),
        fills=_fills(timeline),
        schedule=themed_svg(raster, standalone=False),
    )
    try:
        write_atomically(path, page.encode())
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}", hint="choose another folder with --out") from error


def _summary(trained: Trained, outcome: dict[str, Any]) -> str:
    verdict = "Every promise was kept." if outcome["holds"] else "<strong>Not every promise was kept.</strong>"
    return (
        f"A residual CNN was trained for {trained.steps} steps on scikit-learn's digits, once by the plan and once keeping "
        f"everything, on the same batches. {verdict}"
    )


def _facts(outcome: dict[str, Any]) -> str:
    yes = {True: "yes", False: "NO"}
    return _table(
        ["", "plan", "keeping everything"],
        [
            ["budget", format_bytes(outcome["budget_bytes"]), ""],
            ["planned peak", *_sizes(outcome, "planned_peak_bytes", "keep_all_planned_peak_bytes")],
            ["measured peak", *_sizes(outcome, "measured_peak_bytes", "keep_all_measured_peak_bytes")],
            ["overhead, planned", f"{outcome['overhead']:.3f}x", "1.000x"],
            ["time, measured", f"{outcome['time_ratio']:.3f}x", "1.000x"],
            ["proven gap", amounts.format_share(outcome["gap"], 2), ""],
            ["accuracy", amounts.format_share(outcome["accuracy"]), amounts.format_share(outcome["keep_all_accuracy"])],
            ["measured peak within budget", yes[outcome["within_budget"]], ""],
            ["measured peak as planned, to 1%", yes[outcome["as_planned"]], ""],
            ["losses and parameters identical to the last bit", yes[outcome["identical"]], ""],
        ],
    )


def _sizes(outcome: dict[str, Any], *names: str) -> list[str]:
    return [format_bytes(outcome[name]) for name in names]


def _at_peak(timeline: Timeline) -> str:
    graph, step = timeline.graph, timeline.plan.steps[timeline.peak_step]
    assert isinstance(step, Compute)
    op = graph.ops[step.op]
    workspace = f", {format_bytes(op.workspace_bytes)} of workspace" if op.workspace_bytes else ""
    return (
        f"The peak of {format_bytes(timeline.peak_bytes)} is reached while <code>{html.escape(op.name)}</code> runs "
        f"({op.phase}): {format_bytes(graph.resident_bytes)} that are always there{workspace}, and these values:"
    )


def _fills(timeline: Timeline) -> str:
    graph, held = timeline.graph, timeline.live(timeline.peak_step)
    rows: list[list[str]] = []
    for resident in held[:_SHOWN]:
        op = graph.ops[graph.producer[resident.value]]
        name, made_by = graph.values[resident.value].name, op.kind or op.name
        rows.append([name, format_bytes(resident.size_bytes), made_by, op.phase, op.source])
    rest = held[_SHOWN:]
    if rest:
        rows.append([f"{len(rest)} more", format_bytes(sum(resident.size_bytes for resident in rest)), "", "", ""])
    return _table(["value", "size", "made by", "phase", "source"], rows)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"
