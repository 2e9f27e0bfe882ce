"""Cost against budget of a captured GPT-2 step, twelve points on two cores, on a process pool and on a Dask cluster.

python benchmarks/pareto.py            # about a minute on two cores
python benchmarks/pareto.py --table    # the Markdown table from the committed JSON
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import checkmate
from checkmate import Curve, Graph

HERE = Path(__file__).parent
GRAPH = HERE / "graphs" / "gpt2_loss.graph.json"
RESULTS = HERE / "results" / "pareto.json"
TABLE = HERE.parent / "docs" / "benchmarks" / "pareto.md"
MIB = 2**20


def executor(kind: str, stack: ExitStack) -> Executor:
    """Two workers of a kind."""
    if kind == "process pool":
        return stack.enter_context(ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")))
    from distributed import Client, LocalCluster

    cluster = stack.enter_context(LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None))
    return stack.enter_context(Client(cluster)).get_executor()


def measure(graph: Graph, kind: str) -> tuple[float, Curve]:
    """Seconds and curve, workers started."""
    with ExitStack() as stack:
        workers = executor(kind, stack)
        list(workers.map(abs, range(8)))
        began = time.perf_counter()
        curve = checkmate.pareto(graph, executor=workers)
        return time.perf_counter() - began, curve


def table(stored: dict[str, object]) -> str:
    """The Markdown page."""
    runs, points, where = stored["runs"], stored["points"], stored["where"]
    assert isinstance(runs, dict)
    assert isinstance(points, list)
    assert isinstance(where, dict)
    seconds = " and ".join(f"{s:.1f} s on a {kind}" for kind, s in runs.items())
    worst = 100 * float(str(stored["worst"]))
    lines = [
        "# A curve of cost against budget",
        "",
        "Made by `python benchmarks/pareto.py`: a captured GPT-2 step of 1300 ops, twelve budgets, at most ten seconds for",
        f"each point, stopped at a gap of 0.5 %, on two cores: {seconds}, with running workers.",
        f"{stored['same']} of {len(points)} points are equal in both; the time limit ended the solve of the others, whose costs",
        f"differ by {worst:.2f} % at most. Python {where['python']}, HiGHS {where['highspy']}, distributed "
        f"{where['distributed']}.",
        "",
        "| budget, MiB | overhead | proven bound | gap | seconds |",
        "|---:|---:|---:|---:|---:|",
    ]
    for p in points:
        shares = f"{p['overhead']:.4f} | {p['bound']:.4f} | {100 * p['gap']:.2f} %"
        lines.append(f"| {p['budget_bytes'] / MIB:.1f} | {shares} | {p['elapsed_s']:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run both and write the JSON and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="only rewrite the table")
    options = parser.parse_args()
    if not options.table:
        graph = checkmate.read(GRAPH)
        assert isinstance(graph, Graph)
        runs = {kind: measure(graph, kind) for kind in ("process pool", "local Dask cluster")}
        (_, here), (_, there) = runs.values()
        pairs = list(zip(here.points, there.points, strict=True))
        stored = {
            "where": {
                "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
                "python": platform.python_version(),
                **{name: version(name) for name in ("highspy", "numba", "numpy", "distributed", "checkmate-remat")},
            },
            "runs": {kind: round(seconds, 1) for kind, (seconds, _) in runs.items()},
            "same": sum((a.budget_bytes, a.cost, a.bound) == (b.budget_bytes, b.cost, b.bound) for a, b in pairs),
            "worst": max(abs(a.cost - b.cost) / a.cost for a, b in pairs),
            "points": [
                {
                    "budget_bytes": p.budget_bytes,
                    "overhead": p.overhead,
                    "bound": p.bound / graph.cost,
                    "gap": p.gap,
                    "peak_bytes": p.peak_bytes,
                    "elapsed_s": round(p.elapsed_s, 2),
                }
                for p in here.points
            ],
        }
        RESULTS.write_text(json.dumps(stored, indent=1) + "\n")
    stored = json.loads(RESULTS.read_text())
    TABLE.write_text(table(stored))
    print(TABLE.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
