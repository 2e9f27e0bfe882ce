"""What splitting the backward of convolutions buys: peak and step time of plans with it and without it, in one run.

A convolution's backward makes the gradients of its input and of its weight at once. Split by its output mask into two ops, the
weight's gradient can wait until the end, as long as what it is made of is smaller. For every model one process that has all
variants in it: eager mode, keeping everything and plans for shares of what that takes unsplit, with and without the split.
Rounds of one step each are interleaved and the fastest counts, in time of the process on one thread. The promises checked:
measured peaks keep their budgets and are as planned within 1 %; loss, gradients and buffers are equal to the bit in
all variants; a split plan takes no more time than an unsplit one for the same peak, and in 80 % of the memory no more than
keeping everything unsplit (3 % is left for the clock). Exit status 1 if one breaks.

    python benchmarks/torch_split.py [--models resnet50_32 unet] [--time-limit 30] [--rounds 9]
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from fresh import by_model, mib, ran_on
from models import build
from steps import CLOCK, Variant, backward, by_backend, observe, timed

MODELS = ("resnet50_32", "mobilenet_v2", "unet")
SHARES = (80, 50, 40)
"""Budgets, as per cent of what keeping everything takes unsplit."""


def main() -> int:
    """Run the benchmark, or one child of it."""
    return by_model(__file__, str(__doc__), MODELS, run=run, table=table, verdict=verdict, rounds=9)


def run(name: str, time_limit_s: float, rounds: int) -> list[dict[str, Any]]:
    """Child: all variants of a model."""
    from checkmate import CheckmateError

    logging.disable(logging.WARNING)
    case = build(name)
    eager = Variant("eager", "eager", lambda: backward(lambda: case.model(**case.batch)), case.model)
    variants = [eager, planned(name, "unsplit", None, time_limit_s), planned(name, "split", None, time_limit_s)]
    for variant in variants:
        observe(variant)
    top = variants[1].row["peak_bytes"]
    for share in SHARES:
        for kind in ("unsplit", "split"):
            try:
                variant = planned(name, kind, top * share // 100, time_limit_s)
                observe(variant)
            except CheckmateError as error:  # no plan is as small
                print(f"{name}: {kind} at {share} %: {error}", file=sys.stderr, flush=True)
                continue
            variants.append(variant)
    for variant in variants:
        print(f"{name}: {variant.name}: {mib(variant.row['peak_bytes'])} MiB", file=sys.stderr, flush=True)
        variant.row["identical"] = variant.row.pop("bits") == variants[1].row["own_bits"]
    timed(variants, rounds)
    return [{"name": v.name, "kind": v.kind, **{k: x for k, x in v.row.items() if k != "own_bits"}} for v in variants]


def planned(name: str, kind: str, peak_bytes: int | None, time_limit_s: float) -> Variant:
    """A plan for a peak above what is resident; None keeps everything."""
    from checkmate import Limits, Problem, solve
    from checkmate.frontend.planner import keep_everything

    options = {"split_convolutions": kind == "split"}
    _, graph = by_backend(build(name), **options)
    result = keep_everything(graph)
    if peak_bytes is not None:
        result = solve(Problem(graph, graph.resident_bytes + peak_bytes), limits=Limits(time_s=time_limit_s))
    row: dict[str, Any] = {
        "budget_bytes": peak_bytes,
        "planned_bytes": result.peak_bytes - graph.resident_bytes,
        "cost_s": result.cost / 1e9,
        "overhead": result.overhead,
        "bound_overhead": max(1.0, result.bound / graph.cost),
    }
    case = build(name)
    step, _ = by_backend(case, result.plan, **options)
    return Variant(f"{kind}, {'keep all' if peak_bytes is None else mib(peak_bytes)}", kind, step, case.model, row)


def verdict(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Promises that a model's rows break, in words."""
    broken = []
    for v in rows[1:]:
        over = v["budget_bytes"] is not None and v["peak_bytes"] > v["budget_bytes"] + 64
        if over or abs(v["peak_bytes"] - v["planned_bytes"]) > 0.01 * v["planned_bytes"]:
            broken.append(f"{name}: {v['name']}: measured {mib(v['peak_bytes'])}, planned {mib(v['planned_bytes'])}")
        if not v["identical"]:
            broken.append(f"{name}: {v['name']}: not equal to the bit to keeping everything")
    keep, most = rows[1], max((v for v in rows[3:] if v["kind"] == "split"), key=lambda v: v["budget_bytes"])
    if most["time_s"] > CLOCK * keep["time_s"]:
        broken.append(f"{name}: {most['name']}: slower than keeping everything unsplit")
    for share, both in _pairs(rows):
        if both["split"]["time_s"] > CLOCK * both["unsplit"]["time_s"]:
            broken.append(f"{name}: at {share} the split plan is slower")
    return broken


def _pairs(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Budget -> the plans of both kinds, where there are two."""
    found: dict[int, dict[str, Any]] = {}
    for v in rows[3:]:
        found.setdefault(v["budget_bytes"], {})[v["kind"]] = v
    return [(mib(budget), both) for budget, both in found.items() if len(both) == 2]


def table(report: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        "# Convolutions whose backward is split",
        "",
        "Made by `benchmarks/torch_split.py`; do not edit. All variants of a model ran in one process, their steps interleaved.",
        "Peaks are MiB above the resident memory; time is the fastest of the rounds, as a ratio to keeping everything unsplit.",
        "Shares are relative to the peak of the same. *Right* compares loss, gradients and buffers with it, byte by byte.",
        "",
        ran_on(report),
        "",
    ]
    for name, rows in report["models"].items():
        keep = rows[1]
        lines += [
            f"## {name}",
            "",
            f"Keeping everything unsplit takes {keep['time_s']:.3f} s.",
            "",
            "| variant | share | planned | measured | overhead | proven at least | time | right |",
            "|---|---:|---:|---:|---:|---:|---:|---|",
        ]
        for v in rows:
            share = "" if not v.get("budget_bytes") else f"{v['budget_bytes'] / keep['peak_bytes']:.0%}"
            told = ["", "", ""]
            if "planned_bytes" in v:
                told = [mib(v["planned_bytes"]), f"{v['overhead']:.4f}", f"{v['bound_overhead']:.4f}"]
            figures = f"{share} | {told[0]} | {mib(v['peak_bytes'])} | {told[1]} | {told[2]} | {v['time_s'] / keep['time_s']:.3f}"
            lines.append(f"| {v['name']} | {figures} | {'yes' if v['identical'] else 'NO'} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
