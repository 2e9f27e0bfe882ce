"""JAX: capture a function or a whole step, plan it, and run the plan under JAX's transformations.

Examples:
    >>> import jax, jax.numpy as jnp
    >>> import checkmate.jax as cj
    >>> def loss(w, x):
    ...     return jnp.tanh(jnp.tanh(x @ w) @ w).sum()
    >>> step = jax.jit(jax.value_and_grad(cj.remat(loss, budget="100%", costs="estimated")))
    >>> value, gradient = step(jnp.ones((8, 8)), jnp.ones((8, 8)))
    >>> gradient.shape
    (8, 8)
"""

from __future__ import annotations

from importlib.util import find_spec

from checkmate.core.errors import MissingExtraError

if find_spec("jax") is None:
    raise MissingExtraError("checkmate.jax needs JAX, which is not installed", hint='pip install "checkmate-remat[jax]"')

from checkmate.jax.calibrate import compiler_options
from checkmate.jax.planned_function import PlannedFunction, remat
from checkmate.jax.scan.groups import LayerGroup
from checkmate.jax.scan.planned_scan import PlannedScan, ScanPolicy, policy, scan
from checkmate.jax.step import PlannedStep, capture, plan

__all__ = [
    "LayerGroup",
    "PlannedFunction",
    "PlannedScan",
    "PlannedStep",
    "ScanPolicy",
    "capture",
    "compiler_options",
    "plan",
    "policy",
    "remat",
    "scan",
]
