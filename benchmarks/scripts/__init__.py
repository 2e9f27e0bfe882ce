"""Training loops of public scripts, each a function that a reader of its source recognizes."""

from __future__ import annotations

from . import (  # noqa: F401 - each lists its scripts
    control,
    huggingface,
    images,
    language,
    science,
    vision,
)
from .loop import SCRIPTS

__all__ = ["SCRIPTS"]
