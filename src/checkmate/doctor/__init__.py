"""Checks of an installation on the user's own machine: versions, stores, solvers, the device, and small training steps.

Every check is a function that returns a `Check`: a finding, a verdict and a cure. `examine` runs them all.
Nothing here prints; ``checkmate doctor`` prints the checks, or all of them as JSON.
"""

from __future__ import annotations

from checkmate.doctor.checks import Check
from checkmate.doctor.examine import Report, examine

__all__ = ["Check", "Report", "examine"]
