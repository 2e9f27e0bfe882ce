"""Colours and axes that the figures share; all of them read on white and on black."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
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
"""Colour and name of what memory is held for; the page of `checkmate.report` has the same."""

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_TIMES = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3}


def bytes_axis(ax: Axes, most_bytes: int) -> None:
    """Let the y axis start at zero and count in one binary unit, at round numbers of it."""
    unit, scale = byte_unit(most_bytes)
    ax.set_ylim(0, max(1, most_bytes) * 1.22)
    ticks = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 4, 5, 8, 10]).tick_values(0, most_bytes / scale)
    ax.set_yticks([t * scale for t in ticks if t * scale <= most_bytes * 1.22])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}"))
    ax.set_ylabel(f"memory held ({unit})")


def bytes_along(ax: Axes, least_bytes: int, most_bytes: int) -> str:
    """Let the x axis count in one binary unit, at round numbers of it; gives the unit."""
    unit, scale = byte_unit(most_bytes)
    ticks = MaxNLocator(nbins=7, steps=[1, 2, 2.5, 5, 10]).tick_values(least_bytes / scale, most_bytes / scale)
    ax.set_xticks([t * scale for t in ticks if least_bytes <= t * scale <= most_bytes])
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / scale:g}"))
    return unit


def byte_unit(most_bytes: int) -> tuple[str, int]:
    """Name and size of the largest binary unit that an amount has one of."""
    return next(((name, size) for name, size in _UNITS if most_bytes >= size), _UNITS[-1])


def time_scale(cost_unit: str) -> tuple[float, str]:
    """Factor and name of the unit in which a cost axis counts."""
    return (_TIMES[cost_unit], "ms") if cost_unit in _TIMES else (1.0, cost_unit)


def time_edges(timeline: Timeline) -> npt.NDArray[np.float64]:
    """Cost, in the axis's unit, at which each computation begins, and the last ends; one each if none costs anything."""
    costs = np.array([timeline.graph.ops[o].cost for o in timeline.plan.order], dtype=np.float64)
    if not costs.any():
        costs[:] = 1.0
    return np.concatenate([[0.0], np.cumsum(costs)]) * time_scale(timeline.graph.cost_unit)[0]


def time_axis(ax: Axes, cost_unit: str, end: float) -> None:
    """Let the x axis count what the ops so far cost."""
    _, unit = time_scale(cost_unit)
    ax.set_xlim(0, end or 1)
    ax.set_xlabel(f"cost of the ops so far ({unit})" if unit != "ms" else "time in ops (ms)")


def budget_line(ax: Axes, budget_bytes: int) -> None:
    """A dashed line at the budget."""
    label = f"budget {format_bytes(budget_bytes)}"
    ax.axhline(budget_bytes, color=BUDGET, linewidth=1.4, linestyle=(0, (5, 3)), label=label, zorder=3)


def open_frame(ax: Axes) -> None:
    """Leave out the upper and the right spine."""
    ax.spines[["top", "right"]].set_visible(False)


def legend_above(ax: Axes, handles: list[Line2D] | None = None) -> None:
    """Put the legend in one row above the axes, where it covers nothing."""
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
