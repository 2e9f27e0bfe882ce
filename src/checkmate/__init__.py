"""Checkmate: the fastest way to run a training step within a memory budget, with proof."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from checkmate.core.budget import Budget, ResidentMemory
from checkmate.core.errors import (
    CheckmateError,
    FileFormatError,
    GraphError,
    InfeasibleBudgetError,
    MissingExtraError,
    OptionError,
    PlanError,
    PlanNotFoundError,
    SolverError,
    UnitError,
    WrongGraphError,
)
from checkmate.core.evaluate import evaluate
from checkmate.core.files import read, write
from checkmate.core.graph import Graph, Op, Value
from checkmate.core.plan import Compute, Discard, Fetch, Free, HostMemory, Offload, Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Curve, CurvePoint, Limits, Measured, MinBudget, NoPlan, Reason, Result, Termination
from checkmate.core.simulate import Timeline, simulate
from checkmate.core.units import format_bytes, parse_bytes
from checkmate.core.validate import Violation, validate
from checkmate.cost.device import Device, device_names, load_device
from checkmate.frontend.progress import install_last_resort
from checkmate.solvers import (
    AStar,
    Auto,
    BruteForce,
    ChenGreedy,
    ChenSqrtN,
    Griewank,
    KeepAll,
    LocalSearch,
    LpRounding,
    Milp,
)
from checkmate.solvers.solve import solve
from checkmate.studies.affine import AffineGraph
from checkmate.studies.compare import Comparison, compare
from checkmate.studies.explain import Explanation, Held, Remat, explain
from checkmate.studies.max_batch import MaxBatch, max_batch
from checkmate.studies.min_budget import min_budget
from checkmate.studies.pareto import pareto

if TYPE_CHECKING:  # loaded at their first use; editors complete their names and check calls all the same
    from checkmate import cost, jax, keras, plot, report, tf2, torch  # noqa: F401 - they are attributes

__version__ = "0.1.0"

__all__ = [
    "AStar",
    "AffineGraph",
    "Auto",
    "BruteForce",
    "Budget",
    "CheckmateError",
    "ChenGreedy",
    "ChenSqrtN",
    "Comparison",
    "Compute",
    "Curve",
    "CurvePoint",
    "Device",
    "Discard",
    "Explanation",
    "Fetch",
    "FileFormatError",
    "Free",
    "Graph",
    "GraphError",
    "Griewank",
    "Held",
    "HostMemory",
    "InfeasibleBudgetError",
    "KeepAll",
    "Limits",
    "LocalSearch",
    "LpRounding",
    "MaxBatch",
    "Measured",
    "Milp",
    "MinBudget",
    "MissingExtraError",
    "NoPlan",
    "Offload",
    "Op",
    "OptionError",
    "Plan",
    "PlanError",
    "PlanNotFoundError",
    "Problem",
    "Reason",
    "Remat",
    "ResidentMemory",
    "Result",
    "SolverError",
    "Termination",
    "Timeline",
    "UnitError",
    "Value",
    "Violation",
    "WrongGraphError",
    "compare",
    "device_names",
    "evaluate",
    "explain",
    "format_bytes",
    "load_device",
    "max_batch",
    "min_budget",
    "pareto",
    "parse_bytes",
    "read",
    "simulate",
    "solve",
    "validate",
    "write",
]

install_last_resort()

_LAZY = ("torch", "tf2", "jax", "keras", "plot", "report", "cost")


def __getattr__(name: str) -> Any:
    """Load a front end at its first use, so that planning alone needs no framework."""
    if name in _LAZY:
        return importlib.import_module(f"checkmate.{name}")
    raise AttributeError(f"module 'checkmate' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Names to complete, the front ends among them."""
    return sorted({*__all__, *_LAZY, "__version__"})
