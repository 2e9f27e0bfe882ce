"""Memory over one training step, as a curve or stacked by category."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes

from checkmate.core.plan import Compute
from checkmate.core.simulate import Timeline
from checkmate.core.units import format_bytes
from checkmate.plot import style
from checkmate.studies.lifetimes import CATEGORIES, by_category


def memory_timeline(
    ax: Axes,
    timeline: Timeline,
    *,
    keep_all: Timeline | None = None,
    budget_bytes: int | None = None,
    title: str = "",
) -> Axes:
    """Draw the bytes that a plan holds over the step, against the cost of the ops so far.

    The peak and the start of the backward pass are marked.

    Args:
        ax: Axes to draw on.
        timeline: Simulated memory of the plan.
        keep_all: Simulated memory of keeping everything, for comparison.
        budget_bytes: Budget to draw as a line.
        title: Title of the figure.

    Returns:
        ``ax``.

    Examples:
        >>> import checkmate
        >>> from matplotlib.figure import Figure
        >>> graph = checkmate.Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> timeline = checkmate.simulate(graph, checkmate.Plan.from_order(graph, [0, 1]))
        >>> ax = memory_timeline(Figure().subplots(), timeline, budget_bytes=8)
        >>> [line.get_label() for line in ax.get_lines()]
        ['plan, peak 6 B', 'budget 8 B']
    """
    longest = 0.0
    if keep_all is not None:
        edges, held = _curve(keep_all)
        longest = edges[-1]
        ax.stairs(held, edges, baseline=0, fill=True, color=style.KEEP_ALL, alpha=0.22, linewidth=0)
        label = f"keeping everything, peak {format_bytes(keep_all.peak_bytes)}"
        ax.step(edges, np.append(held, held[-1]), where="post", color=style.KEEP_ALL, linewidth=1.2, label=label)
    edges, held = _curve(timeline)
    ax.stairs(held, edges, baseline=0, fill=True, color=style.PLAN, alpha=0.25, linewidth=0)
    label = f"plan, peak {format_bytes(timeline.peak_bytes)}"
    ax.step(edges, np.append(held, held[-1]), where="post", color=style.PLAN, linewidth=1.6, label=label)
    most = max(timeline.peak_bytes, keep_all.peak_bytes if keep_all is not None else 0, budget_bytes or 0)
    style.bytes_axis(ax, most)
    at = int(held.argmax())
    middle = (edges[at] + edges[at + 1]) / 2
    ax.scatter([middle], [held[at]], s=34, color=style.PLAN, zorder=4)
    if budget_bytes is not None:
        style.budget_line(ax, budget_bytes)
    _mark_boundary(ax, timeline, edges)
    style.time_axis(ax, timeline.graph.cost_unit, max(edges[-1], longest))
    return style.finished(ax, title)


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
    return style.finished(ax, title, legend_rows=2)


def _curve(timeline: Timeline) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Edges in time ``[n + 1]`` and the bytes held between them ``[n]``, one span for each computation."""
    runs = [p for p, step in enumerate(timeline.plan.steps) if isinstance(step, Compute)]
    if not runs:
        return np.array([0.0, 1.0]), np.array([timeline.graph.resident_bytes], dtype=np.int64)
    return style.time_edges(timeline), timeline.bytes[runs]


def _mark_boundary(ax: Axes, timeline: Timeline, edges: npt.NDArray[np.float64]) -> None:
    """Mark the start of the first backward op with a line, if there is one."""
    ops = timeline.graph.ops
    first = next((p for p, o in enumerate(timeline.plan.order) if ops[o].phase == "backward"), None)
    if first is None:
        return
    ax.axvline(edges[first], color=style.KEEP_ALL, linewidth=1.0, linestyle=":", zorder=1, gid="boundary")
    for side, text, shift in (("right", "forward", -5), ("left", "backward", 5)):
        ax.annotate(
            text,
            (edges[first], 0.985),
            xycoords=("data", "axes fraction"),
            xytext=(shift, 0),
            textcoords="offset points",
            ha=side,
            va="top",
            fontsize="small",
        )
