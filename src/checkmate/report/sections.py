"""The tables of the report."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from checkmate.core.curve import Curve
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes, format_cost
from checkmate.report.data import Run
from checkmate.studies.compare import Comparison
from checkmate.studies.modules import ModuleRemats, remats_by_module

_SHOWN = 15

Row = Sequence[str]


class _Markup(str):
    """HTML that is inserted into the page without escaping."""

    __slots__ = ()


def table(header: Row, rows: Iterable[Row], numbers: Iterable[int] = (), identity: str = "") -> str:
    """Render a table; the columns in ``numbers`` are right-aligned."""
    right = set(numbers)

    def cell(index: int, text: str) -> str:
        content = text if isinstance(text, _Markup) else html.escape(text)
        return f'<td class="number">{content}</td>' if index in right else f"<td>{content}</td>"

    def title(index: int, text: str) -> str:
        return f'<th scope="col"{" class=number" if index in right else ""}>{html.escape(text)}</th>'

    head = "".join(title(index, text) for index, text in enumerate(header))
    body = "\n".join("<tr>" + "".join(cell(index, text) for index, text in enumerate(row)) + "</tr>" for row in rows)
    name = f' id="{identity}"' if identity else ""
    return f'<div class="scroll"><table{name}>\n<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>\n</table></div>'


def facts_of(graph: Graph, runs: Sequence[Run], result: Result | None, budget_bytes: int | None, more: Iterable[Row]) -> str:
    """Table that compares peak, cost and proven gap of the plans."""
    timelines = [simulate(graph, run.plan) for run in runs]
    highest = max(1, timelines[0].peak_bytes - graph.resident_bytes)
    rows: list[list[str]] = [
        ["peak", *(format_bytes(timeline.peak_bytes) for timeline in timelines)],
        ["peak above resident memory", *(f"{(t.peak_bytes - graph.resident_bytes) / highest:.1%}" for t in timelines)],
        ["cost", *(format_cost(timeline.cost, graph.cost_unit) for timeline in timelines)],
        ["overhead", *(f"{t.cost / graph.cost if graph.cost else 1.0:.4f}x" for t in timelines)],
        ["computations", *(f"{len(run.plan.order):,}" for run in runs)],
        ["computed again", *(f"{len(run.plan.order) - len(set(run.plan.order)):,}" for run in runs)],
    ]
    if budget_bytes is not None:
        rows.insert(0, ["budget", *_second(format_bytes(budget_bytes), len(runs))])
    if result is not None and result.gap is not None:
        words = f"at most {result.gap:.2%} left to gain" if result.gap else "no plan is cheaper"
        rows.append(["proven, for every plan and order", *_second(words, len(runs))])
    if result is not None:
        rows.append(["found by", *_second(f"{result.solver}, {result.elapsed_s:.1f} s", len(runs))])
    rows += [[name, *cells, *[""] * (len(runs) - len(cells))] for name, *cells in more]
    return table(["", *(run.name for run in runs)], rows, range(1, len(runs) + 1), "facts")


def computed_again(graph: Graph, plan: Plan) -> str:
    """Recomputations by module, the most expensive first."""
    groups = remats_by_module(graph, plan)
    if not groups:
        return "<p>No op is computed again.</p>"
    total = max(1, simulate(graph, plan).cost)
    shown, rest = list(groups[:_SHOWN]), groups[_SHOWN:]
    if rest:
        ops, times, cost = (sum(amounts) for amounts in zip(*((g.ops, g.times, g.cost) for g in rest), strict=True))
        shown.append(ModuleRemats(f"{len(rest)} more", ops, times, cost))
    most = max(1, *(group.cost for group in shown))
    rows = [
        [name, str(ops), str(times), format_cost(cost, graph.cost_unit), f"{cost / total:.2%}", _bar(cost / most)]
        for name, ops, times, cost in shown
    ]
    times, cost = sum(group.times for group in groups), sum(group.cost for group in groups)
    words = f"<p>{times:,} computations, {format_cost(cost, graph.cost_unit)}, {cost / total:.2%} of the plan's cost.</p>"
    return words + table(["module", "ops", "times", "cost", "share", ""], rows, (1, 2, 3, 4), "computed-again")


def compared(difference: Comparison, first: str, second: str) -> str:
    """Differences between two plans: two lists for each plan."""
    parts: list[str] = []
    for name, more, held in (
        (first, difference.more_in_a, difference.held_in_a),
        (second, difference.more_in_b, difference.held_in_b),
    ):
        parts.append(f"<h3>Only in {html.escape(name)}</h3>")
        if not more and not held:
            parts.append("<p>Nothing.</p>")
        if more:
            rows = [[r.name, f"{r.times} x", format_cost(r.cost, difference.cost_unit), r.source] for r in more[:_SHOWN]]
            cost = format_cost(sum(r.cost for r in more), difference.cost_unit)
            rows.append(["in all", f"{sum(r.times for r in more)} x", cost, f"{len(more)} ops"])
            parts.append(table(["computed more often", "times", "cost", "source"], rows, (1, 2)))
        if held:
            rows = [[h.name, format_bytes(h.size_bytes), h.why] for h in held[:_SHOWN]]
            rows.append(["in all", format_bytes(sum(h.size_bytes for h in held)), f"{len(held)} of them"])
            parts.append(table(["held only at its peak", "size", "why"], rows, (1,)))
    return "\n".join(parts)


def curve_table(graph: Graph, curve: Curve) -> tuple[Row, list[Row], tuple[int, ...]]:
    """Header, rows and number columns of the table of a curve."""
    rows: list[Row] = [
        [
            format_bytes(point.budget_bytes),
            format_cost(point.cost, graph.cost_unit),
            f"{point.overhead:.4f}x",
            f"{point.bound / graph.cost if graph.cost else 1.0:.4f}x",
            f"{point.gap:.2%}",
        ]
        for point in curve.points
    ]
    return ["budget", "cost", "overhead", "bound", "gap"], rows, (0, 1, 2, 3, 4)


def _second(text: str, runs: int) -> list[str]:
    """A cell of the second column alone."""
    return ["", text, *[""] * (runs - 2)]


def _bar(share: float) -> str:
    return _Markup(f'<span class="bar" style="width: {10 * share:.2f}rem"></span>')
