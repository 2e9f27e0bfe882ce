"""Overhead, proven bound and gap of `Auto` on the paper's graphs and on captured steps.

    python benchmarks/gaps.py                  # every point, about half an hour on one core
    python benchmarks/gaps.py --only unet bert
    python benchmarks/gaps.py --table          # the Markdown table from the committed JSON

Budgets are fractions of the way from the largest working set to the peak of keeping everything for
the paper's graphs, shares of what keeping everything takes above resident bytes for captured ones,
and the paper's absolute points. Every point has 60 s on one thread and stops at a gap of 0.01 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import checkmate
from checkmate import Graph, Limits, Problem
from checkmate.core.problem import keep_all_bytes
from checkmate.solvers.bounds.floor import floor

HERE = Path(__file__).parent
GRAPHS = HERE / "graphs"
RESULTS = HERE / "results" / "gaps.json"
TABLE = HERE.parent / "docs" / "benchmarks" / "gaps.md"
CAPTURED = ("bert", "gpt2_loss", "resnet50", "resnet50_split", "unet")
ABSOLUTE = {"vgg_unet_b32": (16e9, 12e9, 10e9), "MobileNet_b512": (16e9, 12e9, 8e9), "VGG16_b256": (14.3e9,)}


@dataclass(frozen=True, slots=True)
class Point:
    """One row of the table."""

    graph: str
    ops: int
    budget: str
    budget_bytes: int
    reason: str
    overhead: float | None
    bound: float
    gap: float | None
    peak_bytes: int | None
    elapsed_s: float
    detail: str


def budgets(name: str, graph: Graph) -> list[tuple[str, int]]:
    """Names and bytes of a graph's budgets."""
    keep = keep_all_bytes(graph)
    if name in CAPTURED:
        above = keep - graph.resident_bytes
        return [(f"{share} %", graph.resident_bytes + above * share // 100) for share in (70, 50, 40)]
    low = floor(graph).peak_bytes
    points = [(f"f = {fraction}", int(low + fraction * (keep - low))) for fraction in (0.3, 0.5, 0.7)]
    return points + [(f"{amount / 1e9:g} GB", int(amount)) for amount in ABSOLUTE.get(name, ())]


def measure(name: str, graph: Graph, label: str, budget: int, time_s: float) -> Point:
    """Solve one point."""
    limits = Limits(time_s=time_s, gap=1e-4, threads=1)
    result = checkmate.solve(Problem(graph, budget), limits=limits, raise_on_failure=False)
    if result.plan is not None:
        assert checkmate.validate(graph, result.plan, budget) == ()
    return Point(
        graph=name,
        ops=len(graph.ops),
        budget=label,
        budget_bytes=budget,
        reason=result.termination.reason.value,
        overhead=result.overhead,
        bound=result.bound / graph.cost,
        gap=result.gap,
        peak_bytes=result.peak_bytes,
        elapsed_s=round(result.elapsed_s, 2),
        detail="; ".join((result.termination.detail, *result.remarks)).strip("; "),
    )


def table(points: list[Point], where: dict[str, str]) -> str:
    """The Markdown page."""
    closed = [p for p in points if p.gap is not None]
    lines = [
        "# Gaps of the default solver",
        "",
        "Made by `python benchmarks/gaps.py` from the graphs in `benchmarks/graphs`: the networks of Jain et al. (2020) in",
        "the paper's cost model, and training steps captured from PyTorch. `f` is the fraction of the way from the largest",
        "working set to the peak of keeping everything; a share is of what keeping everything takes above resident bytes.",
        "The bound holds for every order of execution and any number of recomputations. One thread, at most 60 s a point,",
        f"stopped at a gap of 0.01 %. {where['cpu']}, Python {where['python']}, HiGHS {where['highspy']}.",
        "",
        f"{sum(p.gap <= 1e-3 for p in closed)} of {len(points)} points are proven within 0.1 %, "
        f"{sum(p.gap <= 1e-2 for p in closed)} within 1 %.",
        "",
        "| graph | ops | budget | overhead | proven bound | gap | seconds |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for p in points:
        overhead = p.reason if p.overhead is None else f"{p.overhead:.5f}"
        gap = "" if p.gap is None else f"{100 * p.gap:.3f} %"
        lines.append(f"| {p.graph} | {p.ops} | {p.budget} | {overhead} | {p.bound:.5f} | {gap} | {p.elapsed_s:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the points and write the JSON and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of graphs")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a point")
    parser.add_argument("--table", action="store_true", help="only rewrite the table")
    options = parser.parse_args()
    if options.table:
        stored = json.loads(RESULTS.read_text())
        TABLE.write_text(table([Point(**point) for point in stored["points"]], stored["where"]))
        return 0
    points: list[Point] = []
    for path in sorted(GRAPHS.glob("*.graph.json")):
        name = path.name.removesuffix(".graph.json")
        if options.only and name not in options.only:
            continue
        graph = checkmate.read(path)
        assert isinstance(graph, Graph)
        for label, budget in budgets(name, graph):
            point = measure(name, graph, label, budget, options.time_limit)
            points.append(point)
            sys.stdout.write(
                f"{name} {label}: overhead {point.overhead} bound {point.bound:.5f} gap {point.gap} {point.elapsed_s} s\n"
            )
            sys.stdout.flush()
    where = {
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("highspy", "numba", "numpy", "checkmate-remat")},
    }
    if not options.only:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"where": where, "points": [asdict(p) for p in points]}, indent=1) + "\n")
        TABLE.write_text(table(points, where))
    return 0


if __name__ == "__main__":
    sys.exit(main())
