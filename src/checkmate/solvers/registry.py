"""Solvers by name, those of other packages included."""

from __future__ import annotations

from checkmate.core.errors import OptionError
from checkmate.solvers.session import Solver

GROUP = "checkmate.solvers"
"""Entry-point group under which a package offers a solver."""


def available() -> dict[str, type[Solver]]:
    """Solver classes by name, in alphabetical order."""
    from importlib.metadata import entry_points  # slow to import, and planning alone does without

    return {entry.name: entry.load() for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)}


def by_name(name: str) -> Solver:
    """A solver with its default options.

    Raises:
        OptionError: There is no such solver.
    """
    solvers = available()
    if name not in solvers:
        raise OptionError(f"there is no solver {name!r}", hint=f"choose one of {', '.join(solvers)}")
    return solvers[name]()
