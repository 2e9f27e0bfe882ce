"""``checkmate solvers``: the installed solvers."""

from __future__ import annotations

import dataclasses
import difflib

from checkmate.cli import terminal
from checkmate.core.errors import OptionError
from checkmate.solvers.registry import available, made
from checkmate.solvers.session import Solver


def solvers(*, json: terminal.Json = False) -> int:
    """List the installed solvers with their options.

    Args:
        json: Print one JSON object on stdout.

    Returns:
        The exit code.
    """
    kinds = available()
    if json:
        terminal.emit({"solvers": [{"name": n, "about": _about(k), "options": _options(k)} for n, k in kinds.items()]})
        return 0
    rows = [(name, _about(kind), ", ".join(f"{o}={d}" for o, d in _options(kind).items())) for name, kind in kinds.items()]
    terminal.table([("solver", False), ("method", False), ("options", False)], rows)
    terminal.closing([], "choose one with `checkmate plan GRAPH --budget 8GiB --solver NAME`")
    return 0


def solver_named(name: str) -> Solver:
    """The solver with a given name, with its default options.

    Raises:
        OptionError: No installed solver has that name.
    """
    kinds = available()
    kind = kinds.get(name.lower().replace("_", "-"))
    if kind is None:
        near = difflib.get_close_matches(name.lower(), kinds, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise OptionError(f"there is no solver {name!r}", hint=f"{hint}choose one of {', '.join(sorted(kinds))}")
    return made(name, kind)


def _about(kind: type) -> str:
    return " ".join((kind.__doc__ or "").strip().partition("\n\n")[0].split())


def _options(kind: type) -> dict[str, str]:
    if not dataclasses.is_dataclass(kind):
        return {}
    return {field.name: str(field.default) for field in dataclasses.fields(kind) if field.init}
