"""PyTorch: capture a training step, plan it, and run the plan.

``torch.compile(model, backend="checkmate", options={"budget": "8GiB"})`` needs nothing from here; its options are in `Options`.

Only the names in ``checkmate.torch.__all__`` and the callbacks of `checkmate.torch.integrations` are public; sub-packages and
their other contents may change in any release.
"""

from __future__ import annotations

from importlib.util import find_spec

from checkmate.core.errors import MissingExtraError

if find_spec("torch") is None:
    raise MissingExtraError("checkmate.torch needs PyTorch, which is not installed", hint='pip install "checkmate-remat[torch]"')

from checkmate.frontend.options import CommonOptions
from checkmate.oom import OutOfMemory, read_oom
from checkmate.regions import RegionPolicy
from checkmate.studies.fit_report import Fits
from checkmate.torch.compilation.call import NothingPlannedError
from checkmate.torch.distributed.consensus import RankError
from checkmate.torch.forecast.fits import fits
from checkmate.torch.forecast.largest_batch import LargestBatch, largest_batch
from checkmate.torch.measure.peak import measure_peak
from checkmate.torch.options import ForecastOptions, GraphOptions, Options, StepOptions
from checkmate.torch.partition.check_peak import SplitError
from checkmate.torch.step.planned_step import PlannedStep, Saved, StepExplanation, explain, last_plan
from checkmate.torch.step.region_policy import checkpoint_regions, context_fn, region_policy
from checkmate.torch.step.step import Step, capture, compile  # noqa: A004 - named like torch.compile
from checkmate.torch.step.tracing import GraphBreakError
from checkmate.torch.steps.program import LateGradientError

__all__ = [
    "CommonOptions",
    "Fits",
    "ForecastOptions",
    "GraphBreakError",
    "GraphOptions",
    "LargestBatch",
    "LateGradientError",
    "NothingPlannedError",
    "Options",
    "OutOfMemory",
    "PlannedStep",
    "RankError",
    "RegionPolicy",
    "Saved",
    "SplitError",
    "Step",
    "StepExplanation",
    "StepOptions",
    "capture",
    "checkpoint_regions",
    "compile",
    "context_fn",
    "explain",
    "fits",
    "largest_batch",
    "last_plan",
    "measure_peak",
    "read_oom",
    "region_policy",
]
