"""How PyTorch's CUDA allocator is set up in this process, from the environment variables that configure it."""

from __future__ import annotations

import os
from collections.abc import Mapping

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""The variables, the one that wins first (c10/core/AllocatorConfig.cpp)."""


def allocator_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The allocator's settings by name; empty where all are the defaults.

    Args:
        environment: Environment variables; those of the process by default.

    Examples:
        >>> allocator_settings({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True, max_split_size_mb:128"})
        {'expandable_segments': 'True', 'max_split_size_mb': '128'}
    """
    given = os.environ if environment is None else environment
    text = next((given[name] for name in _VARIABLES if given.get(name)), "")
    pairs = (part.partition(":") for part in text.split(","))
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}


def has_expandable_segments(environment: Mapping[str, str] | None = None) -> bool:
    """Whether segments grow and shrink page by page, in place of segments of fixed sizes."""
    return allocator_settings(environment).get("expandable_segments", "").lower() == "true"
