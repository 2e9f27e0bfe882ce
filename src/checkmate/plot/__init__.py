"""Figures: every function draws on the `Axes` that the caller passes."""

from __future__ import annotations

from checkmate.core.errors import MissingExtraError

try:
    import matplotlib as _matplotlib
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "figures need matplotlib, which is not installed", hint='pip install "checkmate-remat[plot]"'
    ) from error

from checkmate.plot.categories import memory_by_category
from checkmate.plot.curve import pareto_curve
from checkmate.plot.memory import memory_timeline
from checkmate.plot.peak import computed_again, peak_residents
from checkmate.plot.schedule import schedule
from checkmate.plot.svg import themed_svg

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
