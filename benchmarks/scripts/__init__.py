"""Training loops of public scripts, each a function that a reader of its source recognizes."""

from __future__ import annotations

from . import alignment, generative, language, science, selfsupervised, vision  # noqa: F401 - each lists its scripts
from .loop import SCRIPTS

__all__ = ["SCRIPTS"]
