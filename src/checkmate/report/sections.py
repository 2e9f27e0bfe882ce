"""The tables of the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Curve, Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes, format_cost
from checkmate.report.data import Run
from checkmate.report.markup import Markup
from checkmate.studies.compare import Comparison
from checkmate.studies.explain import ModuleRemats, remats_by_module

_SHOWN = 15

Row = Sequence[str]


def table(header: Row, rows: Iterable[Row], numbers: Iterable[int] = (), identity: str = "") -> Markup:
    """Render a table; the columns in ``numbers`` are right-aligned."""
    right = set(numbers)

    def cell(index: int, text: str) -> Markup:
        return (Markup('<td class="number">{}</td>') if index in right else Markup("<td>{}</td>")).format(text)

    def title(index: int, text: str) -> Markup:
        return (Markup('<th scope="col" class="number">{}</th>') if index in right else Markup('<th scope="col">{}</th>')).format(
            text
        )

    def line(row: Row) -> Markup:
        return Markup("<tr>{}</tr>").format(Markup().join(cell(index, text) for index, text in enumerate(row)))

    return Markup('<div class="scroll"><table{}>\n<thead><tr>{}</tr></thead>\n<tbody>{}</tbody>\n</table></div>').format(
        Markup(' id="{}"').format(identity) if identity else "",
        Markup().join(title(index, text) for index, text in enumerate(header)),
        Markup("\n").join(line(row) for row in rows),
    )


def facts_of(graph: Graph, runs: Sequence[Run], result: Result | None, budget_bytes: int | None, more: Iterable[Row]) -> Markup:
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


def computed_again(graph: Graph, plan: Plan) -> Markup:
    """Recomputations by module, the most expensive first."""
    groups = remats_by_module(graph, plan)
    if not groups:
        return Markup("<p>No op is computed again.</p>")
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
    return Markup(
        "<p>{:,} computations, {}, {:.2%} of the plan's cost.</p>\n"
        '<p class="reading">This is the price of the memory saved, by module of the model. If one bar is far longer than the '
        "others, a cheaper op in that module, or a little more memory, pays most.</p>{}"
    ).format(
        times,
        format_cost(cost, graph.cost_unit),
        cost / total,
        table(["module", "ops", "times", "cost", "share", ""], rows, (1, 2, 3, 4), "computed-again"),
    )


def compared(difference: Comparison, first: str, second: str) -> Markup:
    """Differences between two plans: two lists for each plan."""
    parts = [
        Markup(
            '<p class="reading">The same step under two plans: the ops that only one of them computes again, and the values that '
            "only one of them holds when its memory is highest.</p>"
        )
    ]
    for name, more, held in (
        (first, difference.more_in_a, difference.held_in_a),
        (second, difference.more_in_b, difference.held_in_b),
    ):
        parts.append(Markup("<h3>Only in {}</h3>").format(name))
        if not more and not held:
            parts.append(Markup("<p>Nothing.</p>"))
        if more:
            rows = [[r.name, f"{r.times} x", format_cost(r.cost, difference.cost_unit), r.source] for r in more[:_SHOWN]]
            cost = format_cost(sum(r.cost for r in more), difference.cost_unit)
            rows.append(["in all", f"{sum(r.times for r in more)} x", cost, f"{len(more)} ops"])
            parts.append(table(["computed more often", "times", "cost", "source"], rows, (1, 2)))
        if held:
            rows = [[h.name, format_bytes(h.size_bytes), h.why] for h in held[:_SHOWN]]
            rows.append(["in all", format_bytes(sum(h.size_bytes for h in held)), f"{len(held)} of them"])
            parts.append(table(["held only at its peak", "size", "why"], rows, (1,)))
    return Markup("\n").join(parts)


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


def _bar(share: float) -> Markup:
    return Markup('<svg class="bar" aria-hidden="true"><rect width="{:.2%}" height="100%"/></svg>').format(share)
