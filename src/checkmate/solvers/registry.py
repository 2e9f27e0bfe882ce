"""Solvers by name, those of other packages included."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from checkmate.core.errors import OptionError
from checkmate.solvers.session import Solver

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "checkmate.solvers"
"""Entry-point group under which a package offers a solver."""

_log = logging.getLogger(__name__)


def available() -> dict[str, type[Solver]]:
    """Solver classes by name, in alphabetical order.

    One that cannot be imported is left out, with a warning in the log.
    """
    found: dict[str, type[Solver]] = {}
    for name, entry in _entries().items():
        try:
            found[name] = _load(entry)
        except OptionError as error:
            _log.warning("%s", error)
    return found


def by_name(name: str) -> Solver:
    """A solver with its default options.

    Args:
        name: Name of its entry point, such as ``"auto"``; `available` lists them.

    Raises:
        OptionError: There is no such solver, or it cannot be imported.
    """
    entries = _entries()
    if name not in entries:
        raise OptionError(f"there is no solver {name!r}", hint=f"choose one of {', '.join(entries)}")
    return _load(entries[name])()


def _entries() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, and planning alone does without

    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def _load(entry: EntryPoint) -> type[Solver]:
    try:
        return entry.load()
    except Exception as error:  # whatever a plug-in does when it is imported
        raise OptionError(
            f"solver {entry.name!r} cannot be imported from {entry.value}: {error}",
            hint="update, reinstall or uninstall the package that provides it",
        ) from error
