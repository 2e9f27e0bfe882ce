"""A plan as stages by ops (Jain et al., 2020), the contents of its peak, the cost of its recomputations, and a curve of plans."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.lines import Line2D

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Curve
from checkmate.core.simulate import Timeline
from checkmate.core.units import format_bytes, format_cost
from checkmate.plot import style
from checkmate.studies.explain import held_at, remats_by_module


def schedule(ax: Axes, graph: Graph, plan: Plan, *, title: str = "") -> Axes:
    """Draw the ops that each stage computes (matrix R) and those whose values are held when it begins (matrix S).

    Args:
        ax: Axes to draw on.
        graph: The graph.
        plan: A plan of the graph.
        title: Title of the figure.

    Returns:
        ``ax``, with one image ``[stages, ops]`` whose entries are 1 for a value held when the stage begins, 2 for a first
        computation, 3 for a recomputation and 0 otherwise.

    Examples:
        >>> import checkmate
        >>> from matplotlib.figure import Figure
        >>> graph = checkmate.Graph.from_dag(cost=[1, 1, 1], size_bytes=[1, 1, 1], edges=[(0, 1), (0, 2), (1, 2)])
        >>> plan = checkmate.Plan.from_order(graph, [0, 1, 0, 2])
        >>> schedule(Figure().subplots(), graph, plan).images[0].get_array().tolist()
        [[2, 0, 0], [1, 2, 0], [3, 1, 2]]
    """
    R, S = plan.stages(graph)
    held, first, again = 1, 2, 3
    cells = np.where(R, np.where(np.cumsum(R, axis=0) > 1, again, first), np.where(S, held, 0)).astype(np.uint8)
    shades = ListedColormap([(0, 0, 0, 0), to_rgba(style.KEEP_ALL, 0.35), to_rgba(style.PLAN), to_rgba(style.RECOMPUTED)])
    ax.imshow(cells, cmap=shades, vmin=0, vmax=again, aspect="auto", interpolation="nearest", resample=False)
    marks: list[Line2D] = []
    for kind, colour, name in ((first, style.PLAN, "computed first"), (again, style.RECOMPUTED, "computed again")):
        stages, ops = np.nonzero(cells == kind)
        if len(graph.ops) > 150:  # a cell is thinner than a line
            ax.plot(ops, stages, "s", markersize=1.8, markeredgewidth=0, color=colour, rasterized=True)
        marks.append(Line2D([], [], marker="s", linestyle="", color=colour, label=f"{name} ({len(ops)})"))
    marks.append(Line2D([], [], marker="s", linestyle="", color=style.KEEP_ALL, label="held"))
    ax.set_xlabel("op, in the order of the graph")
    ax.set_ylabel("stage")
    return style.finished(ax, title, marks, closed=True)


def pareto_curve(ax: Axes, graph: Graph, curve: Curve, *, chosen: Timeline | None = None, title: str = "") -> Axes:
    """Draw overhead against budget, and the band down to the proven lower bound.

    Args:
        ax: Axes to draw on.
        graph: Graph of the curve.
        curve: Plans and bounds by budget.
        chosen: Simulated memory of a plan to mark at its peak and cost.
        title: Title of the figure.

    Returns:
        ``ax``, whose first line has the points of the curve.

    Examples:
        >>> import checkmate
        >>> from matplotlib.figure import Figure
        >>> graph = checkmate.Graph.from_dag(cost=[1] * 5, size_bytes=[4] * 5, edges=[(0, 1), (1, 2), (2, 3), (0, 4), (3, 4)])
        >>> ax = pareto_curve(Figure().subplots(), graph, checkmate.pareto(graph, points=2))
        >>> ax.get_lines()[0].get_xydata().tolist()
        [[12.0, 1.0]]
    """
    every_op_once = graph.cost or 1
    budgets = [point.budget_bytes for point in curve.points]
    found = [point.cost / every_op_once for point in curve.points]
    bounds = [point.bound / every_op_once for point in curve.points]
    # A plan is valid for every larger budget, a bound for every smaller one.
    ax.step(budgets, found, where="post", color=style.PLAN, linewidth=1.6, marker="o", markersize=4, label="plans found")
    ax.step(budgets, bounds, where="pre", color=style.PLAN, linewidth=1.0, linestyle=":", label="proven bound")
    for k in range(len(budgets) - 1):
        ax.fill_between(budgets[k : k + 2], bounds[k + 1], found[k], color=style.PLAN, alpha=0.18, linewidth=0)
    if chosen is not None:
        at = (chosen.peak_bytes, chosen.cost / every_op_once)
        ax.scatter(*([value] for value in at), s=52, color=style.RECOMPUTED, zorder=4, label="this plan")
    ax.set_xlabel(f"budget ({style.bytes_along(ax, budgets[0], budgets[-1])})")
    ax.set_ylabel("overhead")
    return style.finished(ax, title)


def peak_residents(ax: Axes, timeline: Timeline, *, most: int = 10, title: str = "") -> Axes:
    """Draw the largest entries of the peak as bars, and the rest as one bar.

    Args:
        ax: Axes to draw on.
        timeline: Simulated memory of the plan.
        most: Maximum number of bars, without the one for the rest.
        title: Title of the figure.

    Returns:
        ``ax``, whose bars sum to the peak.

    Examples:
        >>> import checkmate
        >>> from matplotlib.figure import Figure
        >>> graph = checkmate.Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], resident_bytes=8)
        >>> timeline = checkmate.simulate(graph, checkmate.Plan.from_order(graph, [0, 1]))
        >>> [int(bar.get_width()) for bar in peak_residents(Figure().subplots(), timeline).patches]
        [8, 4, 2]
    """
    held = held_at(timeline.graph, timeline.plan, timeline.peak_step)
    longest = _bars(ax, [(entry.name, entry.size_bytes) for entry in held], most, format_bytes, style.PLAN)
    unit = style.bytes_along(ax, 0, longest)
    ax.set_xlabel(f"held at the peak of {format_bytes(timeline.peak_bytes)} ({unit})")
    return style.titled(ax, title)


def computed_again(ax: Axes, graph: Graph, plan: Plan, *, most: int = 10, title: str = "") -> Axes:
    """Draw the cost of recomputation for each module, the most expensive first.

    Args:
        ax: Axes to draw on.
        graph: The graph.
        plan: A plan of the graph.
        most: Maximum number of bars, without the one for the rest.
        title: Title of the figure.

    Returns:
        ``ax``, whose bars sum to the cost of all recomputations.

    Examples:
        >>> import checkmate
        >>> from matplotlib.figure import Figure
        >>> graph = checkmate.Graph.from_dag(cost=[3, 1, 1], size_bytes=[1, 1, 1], edges=[(0, 1), (0, 2), (1, 2)])
        >>> ax = computed_again(Figure().subplots(), graph, checkmate.Plan.from_order(graph, [0, 1, 0, 2]))
        >>> [int(bar.get_width()) for bar in ax.patches]
        [3]
    """
    rows = [(group.name, group.cost) for group in remats_by_module(graph, plan)]
    _bars(ax, rows, most, lambda cost: format_cost(cost, graph.cost_unit), style.RECOMPUTED)
    scale, unit = style.time_scale(graph.cost_unit)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value * scale:g}")
    ax.set_xlabel(f"cost of recomputation ({unit})")
    return style.titled(ax, title)


def _bars(ax: Axes, rows: list[tuple[str, int]], most: int, label: Callable[[int], str], colour: str) -> int:
    """Draw the first rows as bars and the rest as one, and return the length of the longest."""
    rest = rows[most:]
    rows = [*rows[:most], *([(f"{len(rest)} more", sum(size for _, size in rest))] if rest else [])]
    places = range(len(rows))
    bars = ax.barh(places, [size for _, size in rows], color=colour, height=0.7)
    ax.bar_label(bars, [label(size) for _, size in rows], padding=4, fontsize="small")
    ax.set_yticks(places, [name if len(name) <= 40 else f"…{name[-39:]}" for name, _ in rows])
    ax.invert_yaxis()
    ax.margins(x=0.18)
    ax.spines[["top", "right"]].set_visible(False)
    return max((size for _, size in rows), default=1)
