"""Time to the first step of a model with 8 and with 32 equal layers, compiled by Inductor: stock, and ours within budgets.

A small Llama of width 256 on 2 sequences of 128 tokens, so that most of a first step is compilation. Every figure is wall time of
a fresh process with empty caches, the model built before the clock starts; both models in turn, the faster of the rounds
counts. Four times the layers may take less than twice the time. Exit status 1 if they take more.

    python benchmarks/inductor_layers.py [--rounds 2] [--time-limit 30]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import hardware, publish, ran_on, versions
from inductor_start import in_fresh_processes

LAYERS = (8, 32)
BUDGETS = {"stock Inductor": "-1", "keep all": "0", "75 %": "75%", "60 %": "60%", "50 %": "50%", "40 %": "40%"}
MOST = 2.0
"""Time of 32 layers, as a ratio to that of 8."""


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds a solve may take")
    options = parser.parse_args()
    rows = []
    for label, budget in BUDGETS.items():
        found: dict[int, list[dict[str, Any]]] = {n: [] for n in LAYERS}
        for _ in range(options.rounds):
            for n in LAYERS:
                found[n] += in_fresh_processes(f"layers_{n}", budget, options.time_limit, 1)
        fastest = {n: min(runs, key=lambda run: run["first_s"]) for n, runs in found.items()}
        rows.append({"budget": label, **{f"{n}_layers": fastest[n] for n in LAYERS}})
        print(label, *(f"{n}: {fastest[n]['first_s']:.1f} s" for n in LAYERS), file=sys.stderr, flush=True)
    report = {"hardware": hardware(), "versions": versions("torch", "transformers"), "rows": rows}
    publish(__file__, report, table(report))
    broken = [f"{row['budget']}: {ratio(row):.2f}" for row in rows[1:] if ratio(row) > MOST]
    print("\n".join(broken) or "all promises hold")
    return bool(broken)


def ratio(row: dict[str, Any]) -> float:
    """Time of the deep model over that of the other."""
    shallow, deep = (row[f"{n}_layers"]["first_s"] for n in LAYERS)
    return float(deep / shallow)


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# First steps of deep models under Inductor",
        "",
        "Made by `benchmarks/inductor_layers.py`; do not edit. Seconds to the end of the first step of a small Llama, in fresh",
        "processes with empty caches. *Plans* says for how many plans code was generated.",
        "",
        ran_on(report),
        "",
        "| budget | 8 layers | plans | 32 layers | plans | ratio |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in report["rows"]:
        both = " | ".join(f"{row[f'{n}_layers']['first_s']:.1f} | {row[f'{n}_layers']['plans']}" for n in LAYERS)
        lines.append(f"| {row['budget']} | {both} | {ratio(row):.2f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
