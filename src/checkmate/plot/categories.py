"""Memory over one training step, stacked by category."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from checkmate.core.plan import Compute
from checkmate.core.simulate import Timeline
from checkmate.plot import style
from checkmate.studies.lifetimes import CATEGORIES, by_category


def memory_by_category(
    ax: Axes, timeline: Timeline, *, budget_bytes: int | None = None, most_bytes: int | None = None, title: str = ""
) -> Axes:
    """Draw the bytes that a plan holds over the step, stacked by category.

    Args:
        ax: Axes to draw on.
        timeline: Simulated memory of the plan.
        budget_bytes: Budget to draw as a line.
        most_bytes: Upper end of the memory axis, to draw several plans on one scale.
        title: Title of the figure.

    Returns:
        ``ax``, with one collection for each category that is not empty, from the bottom up.

    Examples:
        >>> import checkmate
        >>> from matplotlib.figure import Figure
        >>> graph = checkmate.Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], resident_bytes=8)
        >>> timeline = checkmate.simulate(graph, checkmate.Plan.from_order(graph, [0, 1]))
        >>> ax = memory_by_category(Figure().subplots(), timeline)
        >>> [collection.get_label() for collection in ax.collections]
        ['resident', 'activations kept']
    """
    graph = timeline.graph
    runs = [p for p, step in enumerate(timeline.plan.steps) if isinstance(step, Compute)]
    held = by_category(graph, timeline.plan)[:, runs]
    edges = style.time_edges(timeline)
    base = np.zeros(len(runs) + 1)
    for category, row in zip(CATEGORIES, held, strict=True):
        if row.any():
            top = base + np.append(row, row[-1:])
            colour, label = style.CATEGORIES[category]
            ax.fill_between(edges, base, top, step="post", color=colour, linewidth=0, label=label)
            base = top
    highest = max(timeline.peak_bytes, budget_bytes or 0, most_bytes or 0)
    style.bytes_axis(ax, highest)
    if budget_bytes is not None:
        style.budget_line(ax, budget_bytes)
    style.time_axis(ax, graph.cost_unit, edges[-1])
    if title:
        ax.set_title(title, loc="left", pad=44)
    style.legend_above(ax)
    style.open_frame(ax)
    return ax
