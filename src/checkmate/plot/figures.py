"""Memory over a training step, a plan as stages by ops (Jain et al., 2020), and the plans of a range of budgets.

Colours are legible on white and on black; `themed_svg` gives a figure as text.
"""

from __future__ import annotations

import io
import re

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.result import Curve
from checkmate.core.simulate import Timeline
from checkmate.core.units import format_bytes
from checkmate.studies.lifetimes import begins_backward

_PLAN, _KEEP_ALL, _BUDGET, _RECOMPUTED = "#2f7ed8", "#9a9a9a", "#d6453d", "#e08a1e"
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
_TIMES = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}


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
        ax.stairs(held, edges, baseline=0, fill=True, color=_KEEP_ALL, alpha=0.22, linewidth=0)
        label = f"keeping everything, peak {format_bytes(keep_all.peak_bytes)}"
        ax.step(edges, np.append(held, held[-1]), where="post", color=_KEEP_ALL, linewidth=1.2, label=label)
    edges, held = _curve(timeline)
    ax.stairs(held, edges, baseline=0, fill=True, color=_PLAN, alpha=0.25, linewidth=0)
    label = f"plan, peak {format_bytes(timeline.peak_bytes)}"
    ax.step(edges, np.append(held, held[-1]), where="post", color=_PLAN, linewidth=1.6, label=label)
    most = max(timeline.peak_bytes, keep_all.peak_bytes if keep_all is not None else 0, budget_bytes or 0)
    top_bytes = round(1.22 * max(1, most))
    ax.set_ylim(0, top_bytes)
    ax.set_ylabel(f"memory held ({_byte_ticks(ax.yaxis, 0, top_bytes)})")
    at = int(held.argmax())
    middle = (edges[at] + edges[at + 1]) / 2
    ax.scatter([middle], [held[at]], s=34, color=_PLAN, zorder=4)
    if budget_bytes is not None:
        label = f"budget {format_bytes(budget_bytes)}"
        ax.axhline(budget_bytes, color=_BUDGET, linewidth=1.4, linestyle=(0, (5, 3)), label=label, zorder=3)
    _mark_boundary(ax, timeline, edges)
    ax.set_xlim(0, max(edges[-1], longest) or 1)
    unit = timeline.graph.cost_unit
    ax.set_xlabel("time in ops (ms)" if unit in _TIMES else f"cost of the ops so far ({unit})")
    return _finished(ax, title)


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
    shades = ListedColormap([(0, 0, 0, 0), to_rgba(_KEEP_ALL, 0.35), to_rgba(_PLAN), to_rgba(_RECOMPUTED)])
    ax.imshow(cells, cmap=shades, vmin=0, vmax=again, aspect="auto", interpolation="nearest", resample=False)
    marks: list[Line2D] = []
    for kind, colour, name in ((first, _PLAN, "computed first"), (again, _RECOMPUTED, "computed again")):
        stages, ops = np.nonzero(cells == kind)
        if len(graph.ops) > 150:  # a cell is thinner than a line
            ax.plot(ops, stages, "s", markersize=1.8, markeredgewidth=0, color=colour, rasterized=True)
        marks.append(Line2D([], [], marker="s", linestyle="", color=colour, label=f"{name} ({len(ops)})"))
    marks.append(Line2D([], [], marker="s", linestyle="", color=_KEEP_ALL, label="held"))
    ax.set_xlabel("op, in the order of the graph")
    ax.set_ylabel("stage")
    return _finished(ax, title, marks, closed=True)


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
    ax.step(budgets, found, where="post", color=_PLAN, linewidth=1.6, marker="o", markersize=4, label="plans found")
    ax.step(budgets, bounds, where="pre", color=_PLAN, linewidth=1.0, linestyle=":", label="proven bound")
    for k in range(len(budgets) - 1):
        ax.fill_between(budgets[k : k + 2], bounds[k + 1], found[k], color=_PLAN, alpha=0.18, linewidth=0)
    if chosen is not None:
        at = (chosen.peak_bytes, chosen.cost / every_op_once)
        ax.scatter(*([value] for value in at), s=52, color=_RECOMPUTED, zorder=4, label="this plan")
    ax.set_xlabel(f"budget ({_byte_ticks(ax.xaxis, budgets[0], budgets[-1])})")
    ax.set_ylabel("overhead")
    return _finished(ax, title)


def themed_svg(figure: Figure) -> str:
    """Render a figure as one SVG element with a transparent background, whose text is legible in a light and in a dark theme.

    Args:
        figure: The figure; its text, ticks and spines get the theme's colour.

    Returns:
        The SVG element; the same figure gives the same text.
    """
    stream, ink = io.StringIO(), "#010203"  # a colour that no figure has stands for that of the theme
    figure.patch.set_alpha(0.0)
    for text in figure.findobj(Text):
        text.set_color(ink)
    for ax in figure.axes:
        ax.patch.set_alpha(0.0)
        for spine in ax.spines.values():
            spine.set_edgecolor(ink)
        ax.tick_params(color=ink, labelcolor=ink)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "checkmate", "font.family": "sans-serif"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(ink, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    theme = "svg { color: #24292f } @media (prefers-color-scheme: dark) { svg { color: #d0d7de } }"
    text = re.sub(r"(<svg[^>]*>)", lambda match: f"{match[1]}<style>{theme}</style>", text, count=1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _curve(timeline: Timeline) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Edges in time or cost ``[n + 1]`` and the bytes held between them ``[n]``, one span for each computation.

    Costs that are all zero count as one.
    """
    runs = [p for p, step in enumerate(timeline.plan.steps) if isinstance(step, Compute)]
    if not runs:
        return np.array([0.0, 1.0]), np.array([timeline.graph.resident_bytes], dtype=np.int64)
    costs = np.array([timeline.graph.ops[o].cost for o in timeline.plan.order], dtype=np.float64)
    if not costs.any():
        costs[:] = 1.0
    return np.cumsum([0.0, *costs]) * _TIMES.get(timeline.graph.cost_unit, 1.0), timeline.bytes[runs]


def _mark_boundary(ax: Axes, timeline: Timeline, edges: npt.NDArray[np.float64]) -> None:
    """Mark the start of the backward with a line, if there is one."""
    first = next((p for p, o in enumerate(timeline.plan.order) if begins_backward(timeline.graph, o)), None)
    if first is None:
        return
    ax.axvline(edges[first], color=_KEEP_ALL, linewidth=1.0, linestyle=":", zorder=1, gid="boundary")
    top, points = ax.get_xaxis_transform(), "offset points"
    for text, ha, x in (("forward", "right", -4), ("backward", "left", 4)):
        ax.annotate(text, (edges[first], 0.985), (x, 0), xycoords=top, textcoords=points, ha=ha, va="top", fontsize="small")


def _byte_ticks(axis: Axis, least_bytes: int, most_bytes: int) -> str:
    """Put the ticks of an axis at round numbers of one binary unit, and return the unit."""
    unit = next((name for name, size in _UNITS.items() if most_bytes >= size), "B")
    scale = _UNITS[unit]
    ticks = MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]).tick_values(least_bytes / scale, most_bytes / scale)
    axis.set_ticks([tick * scale for tick in ticks if least_bytes <= tick * scale <= most_bytes])
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}"))
    return unit


def _finished(ax: Axes, title: str, handles: list[Line2D] | None = None, *, closed: bool = False) -> Axes:
    """Set the title, put the legend above the axes, so that it does not cover the figure, and open the frame."""
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=3,
        borderaxespad=0.2,
        frameon=False,
        handlelength=1.4,
        handletextpad=0.5,
        columnspacing=1.4,
    )
    ax.spines[["top", "right"]].set_visible(closed)
    if title:
        ax.set_title(title, loc="left", pad=28)
    return ax
