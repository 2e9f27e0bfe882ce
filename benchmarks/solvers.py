"""Overhead, proven bound, gap and seconds of solvers on the paper's graphs, captured steps, generated graphs and a grid.

    python benchmarks/solvers.py                            # every point with Auto, about an hour on one core
    python benchmarks/solvers.py --jobs 2                   # points side by side, one core each
    python benchmarks/solvers.py --only unet bert           # these graphs only; the others keep their rows
    python benchmarks/solvers.py --suite grid               # 140 points with 10 s each, ten minutes
    python benchmarks/solvers.py --suite paper --solver chen-sqrt-n griewank local-search    # prints, writes nothing
    python benchmarks/solvers.py --summary                  # sums of the committed results

Budgets: fractions of the way from the largest working set to the peak of keeping everything, and the absolute
points of Jain et al. (2020), for the paper's graphs; shares of what keeping everything takes above resident bytes,
and the smallest budget found plus 3 %, for captured steps. Every point has 60 s on one thread, those of the grid 10;
Auto stops at a gap of 0.01 %. The grid has the paper's graphs and networks that no parameter was chosen on.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import checkmate
from benchmarks.fresh import add_rows, earlier, parser
from benchmarks.generate import gpt_of, layered
from benchmarks.networks import training_step
from checkmate import Graph, Limits, Problem
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.registry import by_name

GRAPHS = Path(__file__).parent / "graphs"
CAPTURED = ("bert", "gpt2_loss", "resnet50", "resnet50_split", "unet")
UNTRIED = {
    "ResNet101": (1,),
    "ResNet152": (1, 64),
    "DenseNet169": (1,),
    "DenseNet201": (1,),
    "VGG11": (1,),
    "VGG13": (64,),
    "MobileNet": (64,),
    "segnet": (16,),
    "fcn_8_vgg": (16,),
    "linear24": (1,),
}
"""Networks of the grid that no parameter was chosen on, and their batches."""
CHAINS = {8: (4,), 16: (4, 6, 8), 32: (6,)}
ABSOLUTE = {"vgg_unet_b32": (16e9, 12e9, 10e9), "MobileNet_b512": (16e9, 12e9, 8e9), "VGG16_b256": (14.3e9,)}


def paper() -> Iterator[tuple[str, Graph, list[tuple[str, int]]]]:
    """The graphs of Jain et al. (2020) in the paper's cost model."""
    for path in sorted(GRAPHS.glob("*.graph.json")):
        name = path.name.removesuffix(".graph.json")
        if name not in CAPTURED:
            graph = read(name)
            absolute = [(f"{amount / 1e9:g} GB", int(amount)) for amount in ABSOLUTE.get(name, ())]
            yield name, graph, fractions(graph, (0.03, 0.1, 0.3, 0.5, 0.7, 0.9)) + absolute
    for layers, units in CHAINS.items():
        name = f"linear{layers}_b1"
        yield name, read(name), [(f"{unit} units", unit) for unit in units]


def captured() -> Iterator[tuple[str, Graph, list[tuple[str, int]]]]:
    """Training steps captured from PyTorch."""
    for name in CAPTURED:
        graph = read(name)
        above = keep_all_bytes(graph) - graph.resident_bytes
        shares = [(f"{share} %", graph.resident_bytes + above * share // 100) for share in (70, 50, 40, 30)]
        smallest = checkmate.min_budget(graph).peak_bytes
        assert smallest is not None
        yield name, graph, [*shares, ("smallest + 3 %", smallest + (smallest - graph.resident_bytes) * 3 // 100)]


def generated() -> Iterator[tuple[str, Graph, list[tuple[str, int]]]]:
    """GPT-like steps and random layered graphs."""
    for ops in (1000, 4000, 10_000):
        graph = gpt_of(ops)
        yield f"gpt {ops}", graph, fractions(graph, (0.3, 0.5))
    for nodes in (100, 250, 500, 1000):
        graph = layered(nodes)
        peak = keep_all_bytes(graph)
        yield f"layered {nodes}", graph, [(f"{share} of the peak", int(share * peak)) for share in (0.9, 0.8)]


def grid() -> Iterator[tuple[str, Graph, list[tuple[str, int]]]]:
    """The paper's graphs and others of their kind, at budgets from tight to wide."""
    known = [path.name.removesuffix(".graph.json") for path in sorted(GRAPHS.glob("*_b*.graph.json"))]
    graphs = [(name, read(name)) for name in known]
    graphs += [(f"{name}_b{batch}", training_step(name, batch)) for name, batches in UNTRIED.items() for batch in batches]
    for name, graph in graphs:
        yield name, graph, fractions(graph, (0.1, 0.3, 0.5, 0.7, 0.9))


SUITES = {"paper": paper, "captured": captured, "generated": generated, "grid": grid}
TIME_S = {"grid": 10.0}
"""Seconds a point, 60 for all other suites."""


def read(name: str) -> Graph:
    """A graph of the folder."""
    graph = checkmate.read(GRAPHS / f"{name}.graph.json")
    assert isinstance(graph, Graph)
    return graph


def fractions(graph: Graph, which: tuple[float, ...]) -> list[tuple[str, int]]:
    """Budgets between the largest working set and the peak of keeping everything."""
    low, high = floor(graph).peak_bytes, keep_all_bytes(graph)
    return [(f"f = {fraction}", int(low + fraction * (high - low))) for fraction in which]


def measure(suite: str, solver: str, name: str, graph: Graph, label: str, budget: int, time_s: float) -> dict[str, Any]:
    """Solve one point; `first_s` and `closed_s` are the seconds to the first plan and to a gap of 0.1 %."""
    limits = Limits(time_s=time_s, gap=1e-4, threads=1)
    result = checkmate.solve(Problem(graph, budget), by_name(solver), limits=limits, raise_on_failure=False)
    if result.plan is not None:
        assert checkmate.validate(graph, result.plan, budget) == ()
    plans = [point for point in result.history if point.cost is not None]
    closed = (point.time_s for point in plans if point.cost is not None and point.cost - point.bound <= 1e-3 * point.cost)
    return {
        "suite": suite,
        "solver": solver,
        "graph": name,
        "ops": len(graph.ops),
        "budget": label,
        "budget_bytes": budget,
        "reason": result.termination.reason.value,
        "overhead": result.overhead,
        "bound": result.bound / graph.cost,
        "gap": result.gap,
        "peak_bytes": result.peak_bytes,
        "elapsed_s": round(result.elapsed_s, 2),
        "first_s": round(plans[0].time_s, 3) if plans else None,
        "closed_s": next((round(s, 2) for s in closed), None),
        "detail": "; ".join((result.termination.detail, *result.remarks)).strip("; "),
    }


def summary(points: list[dict[str, Any]]) -> str:
    """How near to the bound each suite ends, and its geometric mean of overheads."""
    lines = []
    for suite in SUITES:
        rows = [p for p in points if p["suite"] == suite]
        gaps = [p["gap"] for p in rows if p["gap"] is not None]
        mean = statistics.geometric_mean([p["overhead"] for p in rows if p["overhead"] is not None] or [1.0])
        close = ", ".join(f"{sum(gap <= most for gap in gaps)} within {most:.1%}" for most in (1e-3, 1e-2))
        lines.append(
            f"{suite}: {len(rows)} points, {len(gaps)} with a plan, {close}, largest {max(gaps, default=0):.3%}, mean {mean:.5f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the points and write the JSON."""
    command = parser(__doc__)
    command.add_argument("--only", nargs="*", help="names of graphs")
    command.add_argument("--suite", nargs="*", choices=SUITES, default=list(SUITES))
    command.add_argument("--solver", nargs="*", default=["auto"], help="names as `checkmate solvers` lists them")
    command.add_argument("--time-limit", type=float, help="seconds a point, instead of those of each suite")
    command.add_argument("--jobs", type=int, default=1, help="points side by side")
    command.add_argument("--summary", action="store_true", help="only sum up the committed results")
    options = command.parse_args()
    if options.summary:
        print(summary(earlier(__file__, "points")))
        return
    with ProcessPoolExecutor(options.jobs) as pool:
        waiting = [
            pool.submit(measure, suite, solver, name, graph, label, budget, options.time_limit or TIME_S.get(suite, 60.0))
            for suite in options.suite
            for name, graph, budgets in SUITES[suite]()
            if not options.only or name in options.only
            for label, budget in budgets
            for solver in options.solver
        ]
        points = (future.result() for future in waiting)
        if options.solver == ["auto"]:
            print(summary(add_rows(__file__, points, ("suite", "graph", "budget"), rows="points", packages=("numba",))))
        else:
            for point in points:
                print(*point.values(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
