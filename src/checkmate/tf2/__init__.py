"""TensorFlow 2 and Keras: capture a training step, plan it, and run the plan."""

from __future__ import annotations

from importlib.util import find_spec

from checkmate.core.errors import MissingExtraError

if find_spec("tensorflow") is None:
    raise MissingExtraError("checkmate.tf2 needs TensorFlow, which is not installed", hint='pip install "checkmate-remat[tf2]"')

from checkmate.tf2.peak import NoStatisticsError, measure_peak
from checkmate.tf2.step import TrainStep, capture, compile  # noqa: A004 - `checkmate.tf2.compile` is the documented call
from checkmate.tf2.trace import NotBuiltError

__all__ = ["NoStatisticsError", "NotBuiltError", "TrainStep", "capture", "compile", "measure_peak"]
