"""Results of a benchmark as Markdown, every row of them.

    python benchmarks/table.py torch_peaks
    python benchmarks/table.py benchmarks/gpu/results/*.json

A nested object of the JSON file is a row, named by its path; rows with the same keys are one table. Sizes are MiB.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Print the tables of files of results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="+", help="name of committed results, or a file")
    for name in parser.parse_args().name:
        path = Path(name) if name.endswith(".json") else RESULTS / f"{name}.json"
        show(json.loads(path.read_text()))


def show(report: dict[str, Any]) -> None:
    """Print the tables of a report."""
    path = (report["part"],) if "part" in report else ()
    for keys, rows in itertools.groupby(rows_of(report, path), key=lambda row: tuple(row[1])):
        print("| |", *(f"{key.removesuffix('_bytes')} |" for key in keys))
        print("|---|" + "---:|" * len(keys))
        for name, values in rows:
            print(f"| {name} |", *(f"{cell(key, value)} |" for key, value in values.items()))
        print()


def rows_of(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object with a number, text or truth value in it: its path, and these."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    named = [(str(item.get("name", key) if isinstance(item, dict) else key), item) for key, item in items]
    inner = [(name, item) for name, item in named if isinstance(item, (dict, list))]
    if isinstance(node, dict) and (plain := {k: v for k, v in node.items() if not isinstance(v, (dict, list))}):
        yield " ".join(path), plain
    for name, item in inner:
        yield from rows_of(item, (*path, name))


def cell(key: str, value: Any) -> str:
    """A value as text."""
    if value is None:
        return "-"
    if key.endswith("_bytes"):
        return f"{value / 2**20:.2f}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
