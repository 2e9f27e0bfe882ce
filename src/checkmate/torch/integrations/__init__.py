"""Callbacks for trainers of other libraries, one module per library; `PeakCallback` is for transformers' ``Trainer``."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import a callback when it is first used, so that only the library of that trainer needs to be installed."""
    if name == "PeakCallback":
        from checkmate.torch.integrations.transformers import PeakCallback

        return PeakCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
