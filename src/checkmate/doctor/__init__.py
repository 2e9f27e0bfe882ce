"""Checks of an installation on the user's own machine: versions, compilers, caches, solvers, and small training steps.

Every check is a function that returns a `Check`: what was found, a verdict, and what to do about it. `examine` runs them all.
Nothing here prints; ``checkmate doctor`` shows the checks and writes them as JSON.
"""

from __future__ import annotations

from checkmate.doctor.check import Check
from checkmate.doctor.examine import Report, examine

__all__ = ["Check", "Report", "examine"]
