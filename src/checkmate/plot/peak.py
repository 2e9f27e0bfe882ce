"""Contents of a plan's peak, and cost of its recomputations, as bars."""

from __future__ import annotations

from matplotlib.axes import Axes

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.simulate import Timeline
from checkmate.core.units import format_bytes, format_cost
from checkmate.plot import style
from checkmate.studies.explain import held_at, remats_by_module


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
    rows = [(entry.name, entry.size_bytes) for entry in held[:most]]
    rest = held[most:]
    if rest:
        rows.append((f"{len(rest)} more", sum(entry.size_bytes for entry in rest)))
    _bars(ax, rows, [format_bytes(size) for _, size in rows], style.PLAN)
    unit = style.bytes_along(ax, 0, max((size for _, size in rows), default=1))
    ax.set_xlabel(f"held at the peak of {format_bytes(timeline.peak_bytes)} ({unit})")
    if title:
        ax.set_title(title, loc="left")
    return ax


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
    groups = remats_by_module(graph, plan)
    rows = [(group.name, group.cost) for group in groups[:most]]
    rest = groups[most:]
    if rest:
        rows.append((f"{len(rest)} more", sum(group.cost for group in rest)))
    _bars(ax, rows, [format_cost(cost, graph.cost_unit) for _, cost in rows], style.RECOMPUTED)
    scale, unit = style.time_scale(graph.cost_unit)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value * scale:g}")
    ax.set_xlabel(f"cost of recomputation ({unit})")
    if title:
        ax.set_title(title, loc="left")
    return ax


def _bars(ax: Axes, rows: list[tuple[str, int]], labels: list[str], colour: str) -> None:
    places = range(len(rows))
    bars = ax.barh(places, [size for _, size in rows], color=colour, height=0.7)
    ax.bar_label(bars, labels, padding=4, fontsize="small")
    ax.set_yticks(places, [name if len(name) <= 40 else f"…{name[-39:]}" for name, _ in rows])
    ax.invert_yaxis()
    ax.margins(x=0.18)
    style.open_frame(ax)
