"""HTML as a type of text, and the tables of the report."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Curve
from checkmate.core.units import format_bytes, format_cost
from checkmate.studies.compare import Comparison
from checkmate.studies.explain import ModuleRemats, remats_by_module

Row = Sequence[str]


class Markup(str):
    """HTML, or a template of HTML. Text that is formatted into it or joined by it is escaped, unless it is `Markup` itself.

    Nothing else in the report escapes or joins HTML.

    Examples:
        >>> Markup("<td>{}</td>").format("a < b")
        '<td>a &lt; b</td>'
        >>> Markup(", ").join([Markup("<b>1</b>"), "<b>"])
        '<b>1</b>, &lt;b&gt;'
    """

    __slots__ = ()

    def format(self, *values: object, **named: object) -> Markup:
        """The template with values in its fields."""
        return Markup(super().format(*map(_safe, values), **{name: _safe(value) for name, value in named.items()}))

    def join(self, parts: Iterable[str], /) -> Markup:
        """The parts with this markup between them."""
        return Markup(super().join(str(_safe(part)) for part in parts))


def _safe(value: object) -> object:
    """A number or `Markup` as it is, everything else as escaped text."""
    return value if isinstance(value, Markup | int | float) else html.escape(str(value))


def table(header: Row, rows: Iterable[Row], numbers: Iterable[int] = (), identity: str = "") -> Markup:
    """Render a table; the columns in ``numbers`` are right-aligned."""
    right = set(numbers)

    def line(tag: str, texts: Row) -> Markup:
        number = Markup(' class="number"')
        cells = (
            Markup("<{0}{1}>{2}</{0}>").format(tag, number if k in right else Markup(), text) for k, text in enumerate(texts)
        )
        return Markup("<tr>{}</tr>").format(Markup().join(cells))

    return Markup('<div class="scroll"><table{}>\n<thead>{}</thead>\n<tbody>{}</tbody>\n</table></div>').format(
        Markup(' id="{}"').format(identity) if identity else "",
        line("th", header),
        Markup("\n").join(line("td", row) for row in rows),
    )


def computed_again(graph: Graph, plan: Plan, plan_cost: int) -> Markup:
    """Recomputations by module, the most expensive first."""
    groups = remats_by_module(graph, plan)
    if not groups:
        return Markup("<p>No op is computed again.</p>")
    total, most_rows = max(1, plan_cost), 15
    shown, rest = list(groups[:most_rows]), groups[most_rows:]
    if rest:
        ops, times, cost = (sum(amounts) for amounts in zip(*((g.ops, g.times, g.cost) for g in rest), strict=True))
        shown.append(ModuleRemats(f"{len(rest)} more", ops, times, cost))
    most = max(1, *(group.cost for group in shown))
    bar = Markup('<svg class="bar" aria-hidden="true"><rect width="{:.2%}" height="100%"/></svg>')
    rows = [
        [name, str(ops), str(times), format_cost(cost, graph.cost_unit), f"{cost / total:.2%}", bar.format(cost / most)]
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


def compared(difference: Comparison) -> Markup:
    """Differences between two plans: two lists for each plan."""
    most = 15
    parts = [
        Markup(
            '<p class="reading">The same step under two plans: the ops that only one of them computes again, and the values that '
            "only one of them holds when its memory is highest.</p>"
        )
    ]
    for name, more, held in (
        ("the plan", difference.more_in_a, difference.held_in_a),
        ("the other plan", difference.more_in_b, difference.held_in_b),
    ):
        parts.append(Markup("<h3>Only in {}</h3>").format(name))
        if not more and not held:
            parts.append(Markup("<p>Nothing.</p>"))
        if more:
            rows = [[r.name, f"{r.times} x", format_cost(r.cost, difference.cost_unit), r.source] for r in more[:most]]
            cost = format_cost(sum(r.cost for r in more), difference.cost_unit)
            rows.append(["in all", f"{sum(r.times for r in more)} x", cost, f"{len(more)} ops"])
            parts.append(table(["computed more often", "times", "cost", "source"], rows, (1, 2)))
        if held:
            rows = [[h.name, format_bytes(h.size_bytes), h.why] for h in held[:most]]
            rows.append(["in all", format_bytes(sum(h.size_bytes for h in held)), f"{len(held)} of them"])
            parts.append(table(["held only at its peak", "size", "why"], rows, (1,)))
    return Markup("\n").join(parts)


def curve_table(graph: Graph, curve: Curve) -> Markup:
    """The points of a curve."""
    rows = [
        [
            format_bytes(point.budget_bytes),
            format_cost(point.cost, graph.cost_unit),
            f"{point.overhead:.4f}x",
            f"{graph.overhead(point.bound):.4f}x",
            f"{point.gap:.2%}",
        ]
        for point in curve.points
    ]
    return table(["budget", "cost", "overhead", "bound", "gap"], rows, range(5), "points")
