"""Architectures of transformers under a budget: bits, planned and measured peaks, each in a fresh process.

The check is that of `tests/torch/test_zoo.py`; this script keeps the results. Exit status 1 if a promise breaks.

    python benchmarks/torch_zoo.py [--models gpt2 vit]

Models that are not named keep their rows of the last run.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))
from fresh import ChildError, answer, child, earlier, hardware, parse, ran_on, save, versions


def main() -> int:
    """Run the benchmark, or one child of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=None)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parse(parser, __file__, table)
    from tests.torch.zoo import ZOO, as_row, check

    if options.child:
        logging.getLogger("checkmate").setLevel(logging.ERROR)
        try:
            answer(as_row(options.child, check(options.child)))
        except Exception as error:  # noqa: BLE001 - what fails is a row of the table, with its cause
            answer(_failed(options.child, f"{type(error).__name__}: {error}"))
        return 0
    rows = earlier(__file__)
    for name in options.models or ZOO:
        try:
            rows[name] = child(__file__, name)
        except ChildError as error:
            rows[name] = _failed(name, str(error))
        print(name, rows[name].get("error") or [p["holds"] for p in rows[name]["points"]], flush=True)
        report = {
            "hardware": hardware(),
            "versions": versions("torch", "transformers"),
            "models": {n: rows[n] for n in ZOO if n in rows},
        }
        save(__file__, report)
    broken = [n for n, row in rows.items() if row.get("error") or not all(p["holds"] for p in row["points"])]
    print("\n".join(broken) or "all promises hold")
    return bool(broken)


def _failed(name: str, why: str) -> dict[str, Any]:
    from tests.torch.zoo import ZOO

    where = re.sub(r"\S*site-packages/", "", why.splitlines()[0])  # the same on every machine
    return {"family": ZOO[name].family, "points": [], "error": where}


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Architectures under a budget",
        "",
        "Made by `benchmarks/torch_zoo.py`. Small models of `transformers` with random weights and their default",
        'dropout, at `"70%"` of the step, counted above parameters, batch, gradients and held outputs, and at the',
        "smallest budget found. *Bits* compares loss, gradients, buffers and random state of two steps with keeping",
        "everything on the same backend. Sizes are KiB above the resident memory; every row is a test of",
        "`tests/torch/test_zoo.py`.",
        "",
        ran_on(report),
        "",
        "| model | family | budget | limit | planned | measured | recomputed | bits | holds |",
        "|---|---|---|---:|---:|---:|---:|---|---|",
    ]
    for name, row in report["models"].items():
        if row.get("error"):
            lines.append(f"| {name} | {row['family']} | - | | | | | | **no**: {row['error'][:160].replace('|', '/')} |")
        for p in row["points"]:
            kib = [f"{p[k] / 1024:.1f}" for k in ("budget_bytes", "planned_bytes", "measured_bytes")]
            bits, holds = "equal" if not p["differs"] else ", ".join(p["differs"]) + " differ", "yes" if p["holds"] else "**no**"
            lines.append(f"| {name} | {row['family']} | {p['budget']} | {' | '.join(kib)} | {p['again']} | {bits} | {holds} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
