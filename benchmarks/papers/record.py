"""What the papers' scripts share: where a run took place, its JSON, and Markdown tables of it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "benchmarks"


def where() -> dict[str, str]:
    """Machine and versions."""
    packages = ("highspy", "numba", "numpy", "ortools", "checkmate-remat")
    cpu = f"{os.cpu_count()} cores, {platform.machine()}"
    return {"cpu": cpu, "python": platform.python_version(), **{name: version(name) for name in packages}}


def said(stored: dict[str, Any]) -> str:
    """Machine and versions in words."""
    at = stored["where"]
    return f"{at['cpu']}, Python {at['python']}, HiGHS {at['highspy']}, OR-Tools {at['ortools']}."


def save(name: str, stored: dict[str, Any], page: str, *, quick: bool) -> None:
    """Write the JSON and the page; a quick run is only shown, so that it replaces no full one."""
    print(page)
    if not quick:
        (RESULTS / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")
        (DOCS / f"{name}.md").write_text(page)


def load(name: str) -> dict[str, Any]:
    """The JSON of the committed run."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """Lines of a table, all but the first columns to the right."""
    ruled = ["---"] * left + ["---:"] * (len(header) - left)
    return [f"| {' | '.join(header)} |", f"|{'|'.join(ruled)}|", *(f"| {' | '.join(str(c) for c in row)} |" for row in rows)]


def ratio(value: float | None, digits: int = 4) -> str:
    """A number, or a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


Stored = dict[str, Any]
"""What a run found, as its JSON."""


def run(name: str, about: str | None, page: Callable[[Stored], str], measure: Callable[[bool], Stored]) -> int:
    """The command line of a paper's script: measure and write the JSON and the page, or the page alone.

    Args:
        name: Name of the paper's files.
        about: The script's docstring.
        page: The Markdown page of a run.
        measure: A run, a quick one if True.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of it, with short limits; writes nothing")
    parser.add_argument("--table", action="store_true", help="only rewrite the page")
    options = parser.parse_args()
    if options.table:
        stored = load(name)
        save(name, stored, page(stored), quick=False)
        return 0
    began = time.perf_counter()
    stored = {"where": where(), **measure(options.quick)}
    stored["seconds"] = round(time.perf_counter() - began)
    save(name, stored, page(stored), quick=options.quick)
    return 0
