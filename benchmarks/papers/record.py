"""What the papers' scripts share: where a run took place, and its JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
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


Stored = dict[str, Any]
"""What a run found, as its JSON."""


def run(name: str, about: str | None, measure: Callable[[bool], Stored]) -> None:
    """The command line of a paper's script: measure and write the JSON, or measure less and print it.

    Args:
        name: Name of the paper's files.
        about: The script's docstring.
        measure: A run, a quick one if True.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="less of it, with short limits; replaces no full run")
    quick = parser.parse_args().quick
    began = time.perf_counter()
    stored = {"where": where(), **measure(quick)}
    stored["seconds"] = round(time.perf_counter() - began)
    if quick:
        print(json.dumps(stored, indent=1))
    else:
        (RESULTS / f"{name}.json").write_text(json.dumps(stored, indent=1) + "\n")
