"""Adapters to trainers of other libraries, one module per library, and figures of steps for loggers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "BudgetCallback": "transformers",
    "PeakCallback": "transformers",
    "MetricsCallback": "lightning_metrics",
    "StepMetrics": "metrics",
    "BudgetPlugin": "accelerate",
    "train_within": "trl",
    "CheckmatePlugin": "axolotl",
    "with_budget": "torchtitan",
}


def __getattr__(name: str) -> Any:
    """Import an adapter at first use: only the library of that trainer needs to be installed."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
