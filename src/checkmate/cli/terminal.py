"""Output of verbs: data to stdout, messages to stderr."""

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
    """Console for data, on stdout."""
    return Console(highlight=False, markup=False)


def messages() -> Console:
    """Console for progress, remarks and errors, on stderr."""
    return Console(stderr=True, highlight=False, markup=False)


def emit(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout."""
    sys.stdout.write(json.dumps(value, allow_nan=False) + "\n")
    sys.stdout.flush()


def say_error(message: str, hint: str = "") -> None:
    """Print an error message and, after a blank line, its hint."""
    console = messages()
    console.print(Text.assemble(("error", "bold red"), f": {message}"), soft_wrap=True)
    if hint:
        console.print()
        console.print(Text.assemble(("hint", "bold"), f": {hint}"), soft_wrap=True)


def facts(rows: Sequence[tuple[str, str]]) -> None:
    """Print names and texts in two columns."""
    console = data()
    width = max(len(name) for name, _ in rows) + 2
    for name, text in rows:
        console.print(Text.assemble((f"{name:<{width}}", "bold"), text), soft_wrap=True)


def table(header: Iterable[tuple[str, bool]], rows: Iterable[Iterable[str]]) -> None:
    """Print a table without boxes.

    Args:
        header: Name of each column, and whether it is right-aligned, as numbers are.
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
    """Print the files that were written and a hint on the next command."""
    sys.stdout.flush()
    console = messages()
    for path in wrote:
        console.print(Text.assemble((f"{'wrote':<8}", "bold"), str(path)), soft_wrap=True)
    if hint:
        console.print()
        console.print(Text.assemble(("hint", "bold"), f": {hint}"), soft_wrap=True)
