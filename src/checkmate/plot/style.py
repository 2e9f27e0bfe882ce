"""Shared colours and axes of the figures, legible on white and on black, and figures as SVG text."""

from __future__ import annotations

import io
import re

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, MaxNLocator

from checkmate.core.simulate import Timeline
from checkmate.core.units import format_bytes

PLAN = "#2f7ed8"
KEEP_ALL = "#9a9a9a"
BUDGET = "#d6453d"
RECOMPUTED = "#e08a1e"
CATEGORIES = {
    "resident": ("#8b949e", "resident"),
    "activations": (PLAN, "activations kept"),
    "recomputed": (RECOMPUTED, "computed again"),
    "gradients": ("#3f9b5a", "gradients"),
    "updates": ("#8e5bd0", "updates"),
    "workspace": ("#c2549d", "workspace"),
}
"""Colour and label of each memory category; the page of `checkmate.report` uses the same."""

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_TIMES = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}


def bytes_axis(ax: Axes, most_bytes: int) -> None:
    """Start the y axis at zero, with ticks at round numbers of one binary unit."""
    unit, scale = byte_unit(most_bytes)
    ax.set_ylim(0, max(1, most_bytes) * 1.22)
    ticks = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 4, 5, 8, 10]).tick_values(0, most_bytes / scale)
    ax.set_yticks([t * scale for t in ticks if t * scale <= most_bytes * 1.22])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}"))
    ax.set_ylabel(f"memory held ({unit})")


def bytes_along(ax: Axes, least_bytes: int, most_bytes: int) -> str:
    """Put the ticks of the x axis at round numbers of one binary unit, and return the unit."""
    unit, scale = byte_unit(most_bytes)
    ticks = MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]).tick_values(least_bytes / scale, most_bytes / scale)
    ax.set_xticks([t * scale for t in ticks if least_bytes <= t * scale <= most_bytes])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}"))
    return unit


def byte_unit(most_bytes: int) -> tuple[str, int]:
    """Name and size of the largest binary unit that is not larger than an amount."""
    return next(((name, size) for name, size in _UNITS if most_bytes >= size), _UNITS[-1])


def time_scale(cost_unit: str) -> tuple[float, str]:
    """Factor and name of the unit of a cost axis."""
    return (_TIMES[cost_unit], "ms") if cost_unit in _TIMES else (1.0, cost_unit)


def time_edges(timeline: Timeline) -> npt.NDArray[np.float64]:
    """Cost, in the axis's unit, at the start of each computation and at the end, ``[n + 1]``; unit costs if all are zero."""
    costs = np.array([timeline.graph.ops[o].cost for o in timeline.plan.order], dtype=np.float64)
    if not costs.any():
        costs[:] = 1.0
    return np.concatenate([[0.0], np.cumsum(costs)]) * time_scale(timeline.graph.cost_unit)[0]


def time_axis(ax: Axes, cost_unit: str, end: float) -> None:
    """Label the x axis with the cost of the ops so far."""
    _, unit = time_scale(cost_unit)
    ax.set_xlim(0, end or 1)
    ax.set_xlabel(f"cost of the ops so far ({unit})" if unit != "ms" else "time in ops (ms)")


def budget_line(ax: Axes, budget_bytes: int) -> None:
    """Draw a dashed line at the budget."""
    label = f"budget {format_bytes(budget_bytes)}"
    ax.axhline(budget_bytes, color=BUDGET, linewidth=1.4, linestyle=(0, (5, 3)), label=label, zorder=3)


def titled(ax: Axes, title: str, pad: float | None = None) -> Axes:
    """Set the title, if there is one."""
    if title:
        ax.set_title(title, loc="left", pad=pad)
    return ax


def finished(ax: Axes, title: str, handles: list[Line2D] | None = None, *, legend_rows: int = 1, closed: bool = False) -> Axes:
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
    return titled(ax, title, 12 + 16 * legend_rows)


def themed_svg(figure: Figure, *, standalone: bool = True) -> str:
    """Render a figure as one SVG element with a transparent background and the text colour of its surroundings.

    Args:
        figure: The figure; its text, ticks and spines get the theme's colour.
        standalone: Whether the SVG includes both themes; without them it uses the colour of the HTML page around it.

    Returns:
        The SVG element; the same figure gives the same text.
    """
    stream, ink = io.StringIO(), "#010203"  # a colour that no figure has stands for that of the theme
    figure.patch.set_alpha(0.0)
    for ax in figure.axes:
        ax.patch.set_alpha(0.0)
        for text in ax.findobj(Text):
            text.set_color(ink)
        for spine in ax.spines.values():
            spine.set_edgecolor(ink)
        ax.tick_params(color=ink, labelcolor=ink)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "checkmate", "font.family": "sans-serif"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(ink, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    if standalone:
        theme = "svg { color: #24292f } @media (prefers-color-scheme: dark) { svg { color: #d0d7de } }"
        text = re.sub(r"(<svg[^>]*>)", lambda match: f"{match[1]}<style>{theme}</style>", text, count=1)
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
