"""The report page: one HTML file without external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files

from checkmate.core.errors import WrongGraphError
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.result import Curve, Result
from checkmate.core.simulate import Timeline, simulate
from checkmate.core.units import format_bytes, format_cost
from checkmate.report.advice import advice
from checkmate.report.data import NamedPlan, embedded
from checkmate.report.tables import Markup, Row, compared, computed_again, curve_table, table
from checkmate.studies.compare import compare
from checkmate.studies.lifetimes import CATEGORIES, by_category

_LABELS = {
    "resident": "parameters and other resident memory",
    "activations": "activations kept",
    "recomputed": "computed again",
    "outputs": "outputs, held to the end",
    "gradients": "gradients",
    "updates": "updates of the optimizer",
    "workspace": "workspace",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageText:
    """Text of a page in addition to its numbers.

    Attributes:
        summary: First paragraph; by default made from the numbers.
        facts: Further rows of the table at the top: a name, then one cell for each plan.
        graph_file: File of the graph, for the commands under "What to do next".
        plan_file: File of the plan or its result, for the code there; "" if neither file is written.
    """

    summary: str = ""
    facts: Iterable[Sequence[str]] = ()
    graph_file: str = "model.graph.json"
    plan_file: str = "model.plan.json"


def html_report(
    graph: Graph,
    plan: Plan,
    *,
    against: Plan | None = None,
    result: Result | None = None,
    curve: Curve | None = None,
    budget_bytes: int | None = None,
    title: str = "",
    text: PageText = PageText(),
) -> str:
    """Render a plan as one HTML page: memory over the step, schedule, contents of the peak, recomputed ops.

    The page loads nothing. Every number comes from `checkmate.simulate`, or the page computes it from the simulated steps.

    Args:
        graph: The graph.
        plan: A plan of the graph, shown next to the one that computes every op once in the graph's order.
        against: Another plan of the graph to compare with.
        result: Result of the solve that found the plan, to show its lower bound.
        curve: Plans and bounds by budget, drawn with the point of this plan; needs the `plot` extra.
        budget_bytes: Budget to draw as a line; by default the result's.
        title: Heading; by default from the graph's name and the peak.
        text: Further text.

    Returns:
        The text of the page.

    Raises:
        PlanError: A plan cannot run.
        WrongGraphError: A plan or the curve was made for another graph.

    Examples:
        >>> import checkmate
        >>> graph = checkmate.Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> page = html_report(graph, checkmate.Plan.from_order(graph, [0, 1]), title="Two ops")
        >>> page.count("<canvas")
        3
    """
    if curve is not None and curve.graph_digest != graph.digest:
        raise WrongGraphError("the curve was made for another graph", hint="make it for this graph with `checkmate pareto`")
    plans = {"keeping everything": Plan.from_order(graph, range(len(graph.ops))), "the plan": plan}
    if against is not None:
        plans["the other plan"] = against
    runs = [NamedPlan(name, simulate(graph, each)) for name, each in plans.items()]
    if result is not None and result.measured is not None:
        runs[1] = runs[1]._replace(measured=result.measured)
    budget = result.budget_bytes if budget_bytes is None and result is not None else budget_bytes
    return _page(runs, result, curve, budget, title, text)


def _page(
    runs: Sequence[NamedPlan], result: Result | None, curve: Curve | None, budget: int | None, title: str, text: PageText
) -> Markup:
    kept, timeline, *others = (run.timeline for run in runs)
    graph = timeline.graph
    style = _asset("style.css")
    script = Markup("\n").join(_asset(f"{name}.js") for name in ("model", "memory", "schedule", "detail", "slides", "main"))
    items = advice(timeline, kept.peak_bytes, result, curve, (text.graph_file, text.plan_file))
    return _asset("page.html").format(
        policy=_policy(style, script),
        title=title or _title(timeline),
        summary=text.summary or _summary(timeline, kept.peak_bytes),
        style=style,
        facts=_facts(runs, result, budget, text.facts),
        legend=_legend(runs),
        charts=Markup("\n").join(_chart(index, run, budget) for index, run in enumerate(runs)),
        tabs=Markup(" ").join(_TAB.format(index, run.name) for index, run in enumerate(runs)),
        sections=Markup("\n").join(_sections(timeline, others, curve)),
        next=Markup('<ul id="next">\n{}\n</ul>').format(Markup("\n").join(Markup("<li>{}</li>").format(each) for each in items)),
        footer=f"Costs are in {graph.cost_unit}, bytes in binary units. Graph {graph.digest[:23]}.",
        data=embedded(graph, runs, budget),
        script=script,
    )


_TAB = Markup('<button data-run="{}" aria-pressed="false">{}</button>')


def _asset(name: str) -> Markup:
    return Markup((files("checkmate.report") / "assets" / name).read_text("utf-8"))


def _policy(style: str, script: str) -> Markup:
    """The content security policy: the page's own style and script, by their hashes, and nothing else."""
    style_hash, script_hash = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (style, script))
    return Markup(
        f"default-src 'none'; style-src 'sha256-{style_hash}'; script-src 'sha256-{script_hash}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _title(timeline: Timeline) -> str:
    name = timeline.graph.name
    return f"{f'{name}: a training step' if name.strip() else 'A training step'} in {format_bytes(timeline.peak_bytes)}"


def _summary(timeline: Timeline, keep_all_bytes: int) -> str:
    return (
        f"{format_bytes(timeline.peak_bytes)} at the peak instead of {format_bytes(keep_all_bytes)}, "
        f"{timeline.graph.overhead(timeline.cost):.3f} times the cost of computing every op once."
    )


def _facts(runs: Sequence[NamedPlan], result: Result | None, budget_bytes: int | None, more: Iterable[Row]) -> Markup:
    """Table that compares peak, cost and proven gap of the plans."""
    timelines = [run.timeline for run in runs]
    graph = timelines[0].graph
    highest = max(1, timelines[0].peak_bytes - graph.resident_bytes)
    again = [len(t.plan.order) - len(set(t.plan.order)) for t in timelines]
    rows: list[Row] = [] if budget_bytes is None else [["budget", "", format_bytes(budget_bytes)]]
    rows += [
        ["peak", *(format_bytes(t.peak_bytes) for t in timelines)],
        ["peak above resident memory", *(f"{(t.peak_bytes - graph.resident_bytes) / highest:.1%}" for t in timelines)],
        ["cost", *(format_cost(t.cost, graph.cost_unit) for t in timelines)],
        ["overhead", *(f"{t.graph.overhead(t.cost):.4f}x" for t in timelines)],
        ["computations", *(f"{len(t.plan.order):,}" for t in timelines)],
        ["computed again", *(f"{times:,}" for times in again)],
    ]
    if result is not None:
        proven = f"at most {result.gap:.2%} left to gain" if result.gap else "no plan is cheaper"
        rows.append(["proven, for every plan and order", "", proven])
        rows.append(["found by", "", f"{result.solver}, {result.elapsed_s:.1f} s"])
        if result.measured is not None:
            rows.append(["measured peak", "", format_bytes(result.measured.peak_bytes)])
            rows.append(["measured time", "", str(result.measured)])
    width = len(runs) + 1
    return table(
        ["", *(run.name for run in runs)],
        [[*row, *[""] * (width - len(row))] for row in (*rows, *more)],
        range(1, width),
        "facts",
    )


def _legend(runs: Sequence[NamedPlan]) -> Markup:
    rows = [zip(CATEGORIES, by_category(run.timeline.graph, run.timeline.plan), strict=True) for run in runs]
    held = {category for pairs in rows for category, row in pairs if row.any()}
    key = Markup('<span><span class="swatch {}" aria-hidden="true"></span>{}</span>')
    named = [(category, _LABELS[category]) for category in CATEGORIES if category in held]
    if any(run.measured is not None for run in runs):
        named.append(("measured", "measured, over its own time"))
    return Markup().join(key.format(*each) for each in named)


def _chart(index: int, run: NamedPlan, budget_bytes: int | None) -> Markup:
    """A canvas for the memory of a plan, and a sentence on its peak."""
    timeline, steps, ops = run.timeline, run.timeline.plan.steps, run.timeline.graph.ops
    moment = ""
    for step in steps[timeline.peak_step :][:1]:
        if isinstance(step, Compute):
            again = " again" if step in steps[: timeline.peak_step] else ""
            moment = f", while the {ops[step.op].phase} computes {ops[step.op].name}{again}"
    budget = f", budget {format_bytes(budget_bytes)}" if budget_bytes is not None else ""
    return Markup(
        "<h3>{name}</h3>\n<p>{peak}</p>\n"
        '<canvas class="memory" id="memory-{index}" tabindex="0" role="slider" aria-valuemin="1" aria-label="{label}"></canvas>\n'
        '<p class="slides" data-of="memory-{index}"></p>'
    ).format(
        name=run.name,
        peak=f"The peak is {format_bytes(timeline.peak_bytes)}{moment}.",
        index=index,
        label=f"Memory over the step, {run.name}{budget}",
    )


def _sections(timeline: Timeline, others: Sequence[Timeline], curve: Curve | None) -> Iterator[Markup]:
    graph, plan = timeline.graph, timeline.plan
    yield Markup("<h2>What is computed again</h2>\n{}").format(computed_again(graph, plan, timeline.cost))
    for other in others:
        yield Markup("<h2>Side by side</h2>\n{}").format(compared(compare(graph, plan, other.plan)))
    if curve is not None:
        yield Markup(
            '<h2>What memory buys</h2>\n<p class="reading">To the right there is more memory, further up a step costs more: 1x '
            "is the cost of computing every op once. Each small point is a plan that was found, the large one is this plan. The "
            "dotted line is proven: no plan in any order lies below it, so a better plan could save at most the shaded "
            "band.</p>\n"
            '<img id="curve" alt="Overhead against budget" src="data:image/svg+xml;base64,{}">\n'
            '<p class="slides" data-of="curve"></p>\n'
            "<details><summary>The points as a table</summary>{}</details>"
        ).format(_curve(timeline, curve), curve_table(graph, curve))


def _curve(timeline: Timeline, curve: Curve) -> str:
    """The figure of a curve in base64. An image keeps its own styles; the policy of the page would refuse them otherwise."""
    from checkmate.plot import pareto_curve, themed_svg  # first, because its error names the missing extra

    from matplotlib.figure import Figure  # isort: skip

    figure = Figure(figsize=(7.6, 3.4), layout="constrained")
    pareto_curve(figure.subplots(), timeline.graph, curve, chosen=timeline)
    return base64.b64encode(themed_svg(figure).encode()).decode()
