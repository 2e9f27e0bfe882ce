"""Optional dependencies of verbs."""

from __future__ import annotations

import importlib.util

from checkmate.core.errors import MissingExtraError


def needs(module: str, extra: str) -> None:
    """Check that a module of an extra is installed.

    Raises:
        MissingExtraError: The module is missing; the hint has the command that installs it.
    """
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(
            f"this command needs {module}, which is not installed", hint=f'pip install "checkmate-remat[{extra}]"'
        )
