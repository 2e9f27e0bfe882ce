"""Solvers by name, including those of other packages."""

from __future__ import annotations

import difflib
import logging
from typing import TYPE_CHECKING, Any, cast

from checkmate.core.errors import OptionError
from checkmate.solvers.session import Solver

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "checkmate.solvers"
"""Entry-point group under which a package offers a solver."""

_log = logging.getLogger(__name__)


def available() -> dict[str, type[Solver]]:
    """Solver classes by name, in alphabetical order.

    A solver that cannot be imported is left out, with a warning in the log.
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

    The name is that of its entry point, like ``"auto"``, in any case of letters; `available` lists them. `OptionError`: no solver
    has this name, or it cannot be imported or made.
    """
    entries = _entries()
    known = name if name in entries else name.lower().replace("_", "-")
    if known not in entries:
        near = difflib.get_close_matches(known, entries, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise OptionError(f"there is no solver {name!r}", hint=f"{hint}choose one of {', '.join(entries)}")
    kind = _load(entries[known])
    try:
        solver = kind()
        if not callable(getattr(solver, "run", None)):
            raise TypeError("it has no method `run`")
        return solver
    except (Exception, SystemExit) as error:  # a plug-in can raise anything
        raise OptionError(
            f"solver {name!r} cannot be made: {_said(error)}",
            hint="update, reinstall or uninstall the package that provides it",
        ) from error


def _entries() -> dict[str, EntryPoint]:
    from importlib.metadata import entry_points  # slow to import, and planning alone does not need it

    return {entry.name: entry for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def _load(entry: EntryPoint) -> type[Solver]:
    try:
        kind: Any = entry.load()
        if callable(kind):
            return cast("type[Solver]", kind)
        raise TypeError(f"{kind!r} is no class of solvers")
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the import of a plug-in can raise anything, also by `sys.exit`
        raise OptionError(
            f"solver {entry.name!r} cannot be imported from {entry.value}: {_said(error)}",
            hint="update, reinstall or uninstall the package that provides it",
        ) from error


def _said(error: BaseException) -> str:
    """An error in words; the text of `sys.exit`'s error is not enough."""
    return f"it ended the program: {error!r}" if isinstance(error, SystemExit) else str(error) or type(error).__name__
