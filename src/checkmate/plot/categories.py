"""Memory over one training step, by what it is held for."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from checkmate.core.plan import Compute
from checkmate.core.simulate import Timeline
from checkmate.core.units import format_bytes
from checkmate.plot import style
from checkmate.studies.lives import CATEGORIES, by_category


def memory_by_category(
    ax: Axes, timeline: Timeline, *, budget_bytes: int | None = None, most_bytes: int | None = None, title: str = ""
) -> Axes:
    """Draw the bytes that a plan holds while it runs, stacked by what they are held for.

    Args:
        ax: Where to draw.
        timeline: What the plan holds.
        budget_bytes: The budget, drawn as a line.
        most_bytes: Upper end of the axis, to draw several plans at one scale.
        title: Title of the figure.

    Returns:
        ``ax``, with one collection a category that holds anything, from the bottom up.

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
    scale, unit = style.time_scale(graph.cost_unit)
    costs = np.array([graph.ops[o].cost for o in timeline.plan.order], dtype=np.float64)
    if not costs.any():
        costs[:] = 1.0
    edges = np.concatenate([[0.0], np.cumsum(costs)]) * scale
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
        label = f"budget {format_bytes(budget_bytes)}"
        ax.axhline(budget_bytes, color=style.BUDGET, linewidth=1.4, linestyle=(0, (5, 3)), label=label)
    ax.set_xlim(0, edges[-1] or 1)
    ax.set_xlabel(f"cost of the ops so far ({unit})" if unit != "ms" else "time in ops (ms)")
    if title:
        ax.set_title(title, loc="left", pad=44)
    style.legend_above(ax)
    style.open_frame(ax)
    return ax
