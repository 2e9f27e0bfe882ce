"""JAX: capture a function or a whole step, plan it, and run the plan under JAX's transformations."""

from __future__ import annotations

from importlib.util import find_spec

from checkmate.core.errors import MissingExtraError

if find_spec("jax") is None:
    raise MissingExtraError("checkmate.jax needs JAX, which is not installed", hint='pip install "checkmate-remat[jax]"')

from checkmate.jax._compat import compiler_options
from checkmate.jax.planned_function import PlannedFunction, remat
from checkmate.jax.scan_policy import ScanPolicy, maxtext_config, policy
from checkmate.jax.step import PlannedStep, capture, plan

__all__ = [
    "PlannedFunction",
    "PlannedStep",
    "ScanPolicy",
    "capture",
    "compiler_options",
    "maxtext_config",
    "plan",
    "policy",
    "remat",
]
