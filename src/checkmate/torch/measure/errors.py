"""Errors of measuring."""

from __future__ import annotations

from checkmate.core.errors import CheckmateError


class ProfilerBusyError(CheckmateError, RuntimeError):
    """Workspace cannot be measured while another torch profiler is on."""
