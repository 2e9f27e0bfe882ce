"""Where output goes: data to stdout, talk to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table
from rich.text import Text

Json = Annotated[bool, Parameter(name="--json", negative="")]


def data() -> Console:
    """Console for what the user asked for."""
    return Console(highlight=False, markup=False)


def talk() -> Console:
    """Console for progress, remarks and errors."""
    return Console(stderr=True, highlight=False, markup=False)


def emit(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
    sys.stdout.flush()


def say_error(message: str, hint: str = "") -> None:
    """Print what was wrong, and what to do about it after a blank line."""
    console = talk()
    console.print(Text.assemble(("error", "bold red"), f": {message}"), soft_wrap=True)
    if hint:
        console.print()
        console.print(Text.assemble(("hint", "bold"), f": {hint}"), soft_wrap=True)


def facts(rows: Sequence[tuple[str, str]]) -> None:
    """Print named facts, one a line, the names in one column."""
    console = data()
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        console.print(Text.assemble((f"{name:<{width}}", "bold"), text), soft_wrap=True)


def table(header: Iterable[tuple[str, bool]], rows: Iterable[Iterable[str]]) -> None:
    """Print a table without boxes.

    Args:
        header: Name of each column, and whether it holds numbers and goes to the right.
        rows: Text of the cells.
    """
    console = data()
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_edge=False)
    for name, right in header:
        grid.add_column(Text(name), justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    console.print()
    with console.capture() as capture:
        console.print(grid)
    console.print("\n".join(line.rstrip() for line in capture.get().splitlines()) if not console.is_terminal else grid)
    console.print()


def closing(wrote: Iterable[object], hint: str = "") -> None:
    """Say what was written and what to try next."""
    sys.stdout.flush()
    console = talk()
    for path in wrote:
        console.print(Text.assemble((f"{'wrote':<8}", "bold"), str(path)), soft_wrap=True)
    if hint:
        console.print()
        console.print(Text.assemble(("hint", "bold"), f": {hint}"), soft_wrap=True)
