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


def where() -> dict[str, str]:
    """Machine and versions."""
    packages = ("highspy", "numba", "numpy", "checkmate-remat")
    cpu = f"{os.cpu_count()} cores, {platform.machine()}"
    return {"cpu": cpu, "python": platform.python_version(), **{name: version(name) for name in packages}}


def said(stored: dict[str, Any]) -> str:
    """Machine and versions in words."""
    at = stored["where"]
    return f"{at['cpu']}, Python {at['python']}, HiGHS {at['highspy']}."


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
    """The command line of a paper's script: measure, write the JSON and print its tables, or print those of the committed one.

    Args:
        name: Name of the paper's files.
        about: The script's docstring.
        page: The results as Markdown.
        measure: A run, a quick one if True.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of it, with short limits; replaces no full run")
    parser.add_argument("--table", action="store_true", help="only print the committed results as Markdown")
    options = parser.parse_args()
    path = RESULTS / f"{name}.json"
    if options.table:
        print(page(json.loads(path.read_text())))
        return 0
    began = time.perf_counter()
    stored = {"where": where(), **measure(options.quick)}
    stored["seconds"] = round(time.perf_counter() - began)
    print(page(stored))
    if not options.quick:
        path.write_text(json.dumps(stored, indent=1) + "\n")
    return 0
