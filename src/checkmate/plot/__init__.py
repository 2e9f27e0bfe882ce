"""Figures: every function draws on an `Axes` that it is given."""

from __future__ import annotations

from checkmate.core.errors import MissingExtraError

try:
    import matplotlib as _matplotlib
except ModuleNotFoundError as error:
    raise MissingExtraError(
        "figures need matplotlib, which is not installed", hint='pip install "checkmate-remat[plot]"'
    ) from error

from checkmate.plot.memory import memory_timeline
from checkmate.plot.schedule import schedule
from checkmate.plot.svg import themed_svg

del _matplotlib

__all__ = ["memory_timeline", "schedule", "themed_svg"]
