"""The schedule of a plan as stages by ops, as in Jain et al. (2020)."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.lines import Line2D

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.plot import style

_NOT, _HELD, _FIRST, _AGAIN = 0, 1, 2, 3
_FINE = 150
"""With more ops than this a cell is thinner than a line, so computations are also drawn as points."""


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
    computed = np.where(np.cumsum(R, axis=0) > 1, _AGAIN, _FIRST)
    cells = np.where(R, computed, np.where(S, _HELD, _NOT)).astype(np.uint8)
    shades = ListedColormap([(0, 0, 0, 0), to_rgba(style.KEEP_ALL, 0.35), to_rgba(style.PLAN), to_rgba(style.RECOMPUTED)])
    ax.imshow(cells, cmap=shades, vmin=_NOT, vmax=_AGAIN, aspect="auto", interpolation="nearest", resample=False)
    if len(graph.ops) > _FINE:
        for kind, colour in ((_FIRST, style.PLAN), (_AGAIN, style.RECOMPUTED)):
            stages, ops = np.nonzero(cells == kind)
            ax.plot(ops, stages, "s", markersize=1.8, markeredgewidth=0, color=colour, rasterized=True)
    ax.set_xlabel("op, in the order of the graph")
    ax.set_ylabel("stage")
    names = ((style.PLAN, "computed first", _FIRST), (style.RECOMPUTED, "computed again", _AGAIN), (style.KEEP_ALL, "held", None))
    marks: list[Line2D] = []
    for colour, name, kind in names:
        label = name if kind is None else f"{name} ({int((cells == kind).sum())})"
        marks.append(Line2D([], [], marker="s", linestyle="", color=colour, label=label))
    style.legend_above(ax, marks)
    if title:
        ax.set_title(title, loc="left", pad=28)
    return ax
