"""Errors raised while time or memory is measured."""

from __future__ import annotations

from checkmate.core.errors import CheckmateError


class ProfilerBusyError(CheckmateError, RuntimeError):
    """Memory on the CPU cannot be measured while another torch profiler is active."""
