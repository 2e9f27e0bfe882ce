"""The schedule of a plan, as Jain et al. (2020) draw it."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgba
from matplotlib.lines import Line2D

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.plot import style

_NOT, _FIRST, _AGAIN = 0, 1, 2


def schedule(ax: Axes, graph: Graph, plan: Plan, *, title: str = "") -> Axes:
    """Draw which ops each stage computes: the matrix R, first computations and recomputations apart.

    Args:
        ax: Where to draw.
        graph: The graph.
        plan: The plan.
        title: Title of the figure.

    Returns:
        ``ax``, with one image whose array has 1 for a first computation and 2 for a recomputation.

    Examples:
        >>> import checkmate
        >>> from matplotlib.figure import Figure
        >>> graph = checkmate.Graph.from_dag(cost=[1, 1, 1], size_bytes=[1, 1, 1], edges=[(0, 1), (0, 2), (1, 2)])
        >>> plan = checkmate.Plan.from_order(graph, [0, 1, 0, 2])
        >>> schedule(Figure().subplots(), graph, plan).images[0].get_array().tolist()
        [[1, 0, 0], [0, 1, 0], [2, 0, 1]]
    """
    R = plan.stages(graph).R
    seen = np.cumsum(R, axis=0)
    cells = np.where(R, np.where(seen > 1, _AGAIN, _FIRST), _NOT).astype(np.uint8)
    colours = ListedColormap([(0, 0, 0, 0), to_rgba(style.PLAN), to_rgba(style.RECOMPUTED)])
    ax.imshow(cells, cmap=colours, vmin=_NOT, vmax=_AGAIN, aspect="auto", interpolation="nearest", resample=False)
    ax.set_xlabel("op, in the order of the graph")
    ax.set_ylabel("stage")
    again = int((cells == _AGAIN).sum())
    marks = [
        Line2D([], [], marker="s", linestyle="", color=style.PLAN, label=f"computed first ({int((cells == _FIRST).sum())})"),
        Line2D([], [], marker="s", linestyle="", color=style.RECOMPUTED, label=f"computed again ({again})"),
    ]
    ax.legend(handles=marks, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, borderaxespad=0.2)
    if title:
        ax.set_title(title, loc="left", pad=28)
    return ax
