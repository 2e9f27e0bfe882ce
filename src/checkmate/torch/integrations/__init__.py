"""Callbacks for the trainers of other libraries, one file a library; `PeakCallback` is for transformers' Trainer."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """Import a callback at its first use, so that no trainer's library is needed for the others."""
    if name == "PeakCallback":
        from checkmate.torch.integrations.transformers import PeakCallback

        return PeakCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
