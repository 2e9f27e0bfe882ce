"""Optional dependencies that a verb needs."""

from __future__ import annotations

import importlib.util

from checkmate.core.errors import MissingExtraError


def needs(module: str, extra: str) -> None:
    """Make sure that a module of an extra is installed.

    Raises:
        MissingExtraError: It is not; the hint has the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(f"this needs {module}, which is not installed", hint=f'pip install "checkmate-remat[{extra}]"')
