"""The report page: one HTML file without external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files

from checkmate.core.errors import WrongGraphError
from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.result import Curve, Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes
from checkmate.report.curve_svg import curve_svg
from checkmate.report.data import Run, embedded
from checkmate.report.markup import Markup
from checkmate.report.next_steps import Sources, next_steps
from checkmate.report.sections import compared, computed_again, curve_table, facts_of, table
from checkmate.studies.compare import compare
from checkmate.studies.lifetimes import CATEGORIES, by_category

_SCRIPTS = ("model.js", "memory.js", "schedule.js", "detail.js", "main.js")
_LABELS = {
    "resident": "parameters and other resident memory",
    "activations": "activations kept",
    "recomputed": "computed again",
    "gradients": "gradients",
    "updates": "updates of the optimizer",
    "workspace": "workspace",
}


def html_report(
    graph: Graph,
    plan: Plan,
    *,
    before: Plan | None = None,
    against: Plan | None = None,
    names: Sequence[str] = ("keeping everything", "the plan", "the other plan"),
    result: Result | None = None,
    curve: Curve | None = None,
    budget_bytes: int | None = None,
    title: str = "",
    summary: str = "",
    facts: Iterable[Sequence[str]] = (),
    graph_file: str = "model.graph.json",
    plan_file: str = "model.plan.json",
) -> str:
    """Render a plan as one HTML page: memory over the step, schedule, contents of the peak, recomputed ops.

    The page loads nothing. Every number comes from `checkmate.simulate`, or the page computes it from the same steps.

    Args:
        graph: The graph.
        plan: A plan of the graph.
        before: Plan for comparison; by default the one that computes every op once in the graph's order.
        against: Another plan of the graph to compare with.
        names: Names of the three plans on the page.
        result: Result of the solve that found the plan, to show its lower bound.
        curve: Plans and bounds by budget, drawn with the point of this plan.
        budget_bytes: Budget to draw as a line; that of the result by default.
        title: Heading; by default from the graph's name and the peak.
        summary: First paragraph; by default made from the numbers.
        facts: Further rows of the table at the top: a name, then one cell for each plan.
        graph_file: File of the graph, for the commands under "What to do next".
        plan_file: File of the plan or its result, for the code there.

    Returns:
        The text of the page.

    Raises:
        PlanError: A plan cannot run.
        WrongGraphError: A plan or the curve was made for another graph.

    Examples:
        >>> import checkmate
        >>> graph = checkmate.Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> page = html_report(graph, checkmate.Plan.from_order(graph, [0, 1]), title="Two ops")
        >>> "<h1>Two ops</h1>" in page
        True
    """
    if curve is not None and curve.graph_digest != graph.digest:
        raise WrongGraphError("the curve was made for another graph", hint="make it for this graph with `checkmate pareto`")
    once = Plan.from_order(graph, range(len(graph.ops))) if before is None else before
    runs = [Run(names[0], once), Run(names[1], plan)]
    if against is not None:
        runs.append(Run(names[2], against))
    budget = result.budget_bytes if budget_bytes is None and result is not None else budget_bytes
    kept, timeline, *_ = (simulate(graph, run.plan) for run in runs)  # which refuses plans that cannot run
    overhead = timeline.cost / graph.cost if graph.cost else 1.0
    step = f"{graph.name}: a training step" if graph.name.strip() else "A training step"
    heading = title or f"{step} in {format_bytes(timeline.peak_bytes)}"
    words = summary or (
        f"{format_bytes(timeline.peak_bytes)} at the peak instead of {format_bytes(kept.peak_bytes)}, "
        f"{overhead:.3f} times the cost of computing every op once."
    )
    held = {category for run in runs for category, row in zip(CATEGORIES, by_category(graph, run.plan), strict=True) if row.any()}
    style, script = _asset("style.css"), Markup("\n").join(_asset(name) for name in _SCRIPTS)
    return _asset("page.html").format(
        policy=_policy(style, script),
        title=heading,
        summary=words,
        style=style,
        facts=facts_of(graph, runs, result, budget, facts),
        legend=Markup().join(_key(category) for category in CATEGORIES if category in held),
        charts=Markup("\n").join(_chart(graph, index, run, budget) for index, run in enumerate(runs)),
        tabs=Markup(" ").join(_tab(index, run) for index, run in enumerate(runs)),
        sections=Markup("\n").join(_sections(graph, plan, against, names, curve, timeline.peak_bytes, timeline.cost)),
        next=next_steps(graph, timeline, kept.peak_bytes, result, curve, Sources(graph_file, plan_file)),
        footer=f"Costs are in {graph.cost_unit}, bytes in binary units. Graph {graph.digest[:23]}.",
        data=embedded(graph, tuple(runs), budget),
        script=script,
    )


def _asset(name: str) -> Markup:
    return Markup((files("checkmate.report") / "assets" / name).read_text("utf-8"))


def _policy(style: str, script: str) -> Markup:
    """The content security policy: the page's own style and script, by their hashes, and nothing else."""

    def source(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = ("default-src 'none'", f"style-src {source(style)}", f"script-src {source(script)}", "img-src data:")
    return Markup("; ").join(Markup(rule) for rule in (*rules, "base-uri 'none'", "form-action 'none'"))


def _key(category: str) -> Markup:
    key = Markup('<span><span class="swatch {}" aria-hidden="true"></span>{}</span>')
    return key.format(category, _LABELS[category])


def _chart(graph: Graph, index: int, run: Run, budget_bytes: int | None) -> Markup:
    budget = f", budget {format_bytes(budget_bytes)}" if budget_bytes is not None else ""
    return Markup(
        "<h3>{name}</h3>\n<p>{peak}</p>\n"
        '<canvas class="memory" id="memory-{index}" tabindex="0" role="slider" aria-valuemin="1" aria-label="{label}"></canvas>'
    ).format(name=run.name, peak=_peak(graph, run), index=index, label=f"Memory over the step, {run.name}{budget}")


def _peak(graph: Graph, run: Run) -> str:
    """Say when the peak of a plan is, and how much it holds."""
    timeline = simulate(graph, run.plan)
    peak, before = run.plan.steps[timeline.peak_step :][:1], run.plan.steps[: timeline.peak_step]
    moment = "".join(
        f", while the {graph.ops[step.op].phase} computes {graph.ops[step.op].name}{' again' if step in before else ''}"
        for step in peak
        if isinstance(step, Compute)
    )
    return f"The peak is {format_bytes(timeline.peak_bytes)}{moment}."


def _tab(index: int, run: Run) -> Markup:
    return Markup('<button data-run="{}" aria-pressed="false">{}</button>').format(index, run.name)


def _sections(
    graph: Graph, plan: Plan, against: Plan | None, names: Sequence[str], curve: Curve | None, peak_bytes: int, cost: int
) -> Iterable[Markup]:
    yield Markup("<h2>What is computed again</h2>\n{}").format(computed_again(graph, plan))
    if against is not None:
        difference = compared(compare(graph, plan, against), names[1], names[2])
        yield Markup("<h2>Side by side</h2>\n{}").format(difference)
    if curve is not None:
        yield Markup("<h2>What memory buys</h2>")
        yield Markup(
            '<p class="reading">To the right there is more memory, further up a step costs more: 1x is the cost of computing '
            "every op once. Each small point is a plan that was found, the large one is this plan. The dashed line is proven: no "
            "plan in any order lies below it, so a better plan could save at most the shaded band.</p>"
        )
        yield curve_svg(graph, curve, peak_bytes, cost)
        points = table(*curve_table(graph, curve))
        yield Markup("<details><summary>The points as a table</summary>{}</details>").format(points)
