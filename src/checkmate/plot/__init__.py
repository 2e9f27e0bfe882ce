"""Figures: every function draws on the `Axes` that the caller passes."""

from __future__ import annotations

from checkmate.core.errors import MissingExtraError

try:
    import matplotlib as _matplotlib
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "figures need matplotlib, which is not installed", hint='pip install "checkmate-remat[plot]"'
    ) from error

from checkmate.plot.memory import memory_by_category, memory_timeline
from checkmate.plot.plans import computed_again, pareto_curve, peak_residents, schedule
from checkmate.plot.style import themed_svg

del _matplotlib

__all__ = [
    "computed_again",
    "memory_by_category",
    "memory_timeline",
    "pareto_curve",
    "peak_residents",
    "schedule",
    "themed_svg",
]
