"""Overhead and lower bound against budget."""

from __future__ import annotations

from matplotlib.axes import Axes

from checkmate.core.graph import Graph
from checkmate.core.result import Curve
from checkmate.core.simulate import Timeline
from checkmate.plot import style


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
    if title:
        ax.set_title(title, loc="left", pad=28)
    style.legend_above(ax)
    style.open_frame(ax)
    return ax
