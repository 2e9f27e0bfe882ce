"""Figures: every function draws on the `Axes` that the caller passes."""

from __future__ import annotations

from checkmate.core.errors import MissingExtraError

try:
    import matplotlib as _matplotlib
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "figures need matplotlib, which is not installed", hint='pip install "checkmate-remat[plot]"'
    ) from error

from checkmate.plot.figures import memory_timeline, pareto_curve, schedule, themed_svg

del _matplotlib

__all__ = ["memory_timeline", "pareto_curve", "schedule", "themed_svg"]
