"""Figures 5 and 6 and table 2 of Jain et al. (2020), with ours beside.

python benchmarks/papers/2020-jain/run.py --quick    # three networks, short limits; under ten minutes on two cores
python benchmarks/papers/2020-jain/run.py            # all, about 40 minutes; writes the JSON
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from reported import CHAINS, KNOWN

import checkmate
from benchmarks import max_batch
from benchmarks.networks import training_step
from benchmarks.papers.record import run
from checkmate import AffineGraph, ChenGreedy, ChenSqrtN, Graph, Griewank, Limits, LpRounding, Milp, Problem
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.session import Solver

NAME = "2020-jain"
SHARES = (0.03, 0.1, 0.25, 0.5, 0.75)
"""Budgets of figure 5: the floor that no plan can go below, plus these shares of what keeping everything takes above it."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A network of figure 5 and the batch it is drawn at."""

    network: str
    batch: int
    quick: bool = False
    program: bool = True


FIGURE_5 = (
    Figure("VGG16", 256, quick=True),
    Figure("MobileNet", 512, quick=True),
    Figure("vgg_unet", 32, quick=True),
    Figure("VGG19", 256),
    Figure("ResNet50", 256, program=False),
)


@dataclass(frozen=True, slots=True)
class Effort:
    """Seconds a solve."""

    ours: float
    program: float
    rounding: float
    batch: float


QUICK = Effort(ours=6, program=10, rounding=5, batch=8)
FULL = Effort(ours=30, program=45, rounding=25, batch=60)

HEURISTICS: dict[str, Solver] = {
    "AP sqrt(n)": ChenSqrtN("articulation"),
    "linearised sqrt(n)": ChenSqrtN("linearized"),
    "AP greedy": ChenGreedy("articulation"),
    "linearised greedy": ChenGreedy("linearized"),
    "Griewank log n": Griewank("articulation"),
}


def solved(graph: Graph, budget_bytes: int, solver: Solver, time_s: float, gap: float = 0.0) -> dict[str, Any]:
    """One solve, as overheads."""
    result = checkmate.solve(Problem(graph, budget_bytes), solver, limits=Limits(time_s=time_s, gap=gap), raise_on_failure=False)
    if result.plan is not None:
        assert checkmate.validate(graph, result.plan, budget_bytes) == ()
    return {
        "overhead": result.overhead,
        "bound": result.bound / graph.cost,
        "seconds": round(result.elapsed_s, 2),
        "status": result.termination.reason.value,
    }


def figure_5(figure: Figure, effort: Effort, quick: bool) -> dict[str, Any]:
    """Overhead against budget of one network, by every method."""
    graph = training_step(figure.network, figure.batch)
    low, high = floor(graph).peak_bytes, keep_all_bytes(graph)
    shares = SHARES[1:4] if quick else SHARES
    budgets = {low + round(share * (high - low)) for share in shares} | {b for name, b in KNOWN if name == figure.network}
    points: list[dict[str, Any]] = []
    for budget in sorted(budgets):
        point: dict[str, Any] = {"budget_bytes": budget, "methods": {}}
        for name, solver in HEURISTICS.items():
            point["methods"][name] = solved(graph, budget, solver, effort.ours)
        if figure.program:
            point["methods"]["LP rounding"] = solved(graph, budget, LpRounding(), effort.rounding)
            point["methods"]["program"] = solved(graph, budget, Milp(), effort.program)
        point["methods"]["ours"] = solved(graph, budget, checkmate.Auto(), effort.ours, 1e-4)
        points.append(point)
        print(figure.network, budget, {name: m["overhead"] for name, m in point["methods"].items()}, flush=True)
    return {"network": figure.network, "batch": figure.batch, "floor_bytes": low, "keep_all_bytes": high, "points": points}


def chains(effort: Effort) -> list[dict[str, Any]]:
    """Unit chains, where the paper's solver is slowest for its size."""
    rows: list[dict[str, Any]] = []
    for layers, budget, known, ended in CHAINS:
        graph = training_step(f"linear{layers}")
        ours = solved(graph, budget, checkmate.Auto(), effort.ours)
        rows.append({"layers": layers, "budget": budget, "known": known, "ended": ended, "ours": ours, "ops": graph.cost})
    return rows


def figure_6(network: max_batch.Network, effort: Effort) -> dict[str, Any]:
    """The largest batch of one network by the simple methods and by ours."""
    graph_at = AffineGraph.proportional(training_step(network.name))
    row = max_batch.measure(network, effort.batch)
    simple = {name: largest(graph_at, solver) for name, solver in HEURISTICS.items() if not isinstance(solver, Griewank)}
    print(row, simple, flush=True)
    return {
        "network": network.name,
        "keep_all": row.keep_all,
        "simple": simple,
        "known": network.program,
        "note": network.note,
        "ours": row.batch,
        "upper_bound": row.upper_bound,
        "overhead": row.overhead,
        "seconds": row.elapsed_s,
    }


def largest(graph_at: AffineGraph, solver: Solver) -> int:
    """The largest batch for which a simple method has a plan within the limits on memory and cost."""

    def fits(batch: int) -> bool:
        graph = graph_at(batch)
        most = graph.cost + sum(op.cost for op in graph.ops if op.phase != "backward")
        problem = Problem(graph, max_batch.BUDGET)
        found = checkmate.solve(problem, solver, limits=Limits(target_cost=most), raise_on_failure=False)
        return found.cost is not None and found.cost <= most

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def means(figures: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Table 2: the geometric mean of a method's cost over ours at budgets for which both have a plan, and their number.

    The two forms of a heuristic count as one method, the better of them at each budget.
    """
    found: dict[str, dict[str, Any]] = {}
    for figure in figures:
        points = [point["methods"] for point in figure["points"]]
        for method in ("LP rounding", "sqrt(n)", "greedy", "Griewank", "program"):
            costs = [[row["overhead"] for name, row in p.items() if method in name and row["overhead"]] for p in points]
            ratios = [min(c) / p["ours"]["overhead"] for c, p in zip(costs, points, strict=True) if c and p["ours"]["overhead"]]
            mean = statistics.geometric_mean(ratios) if ratios else None
            found.setdefault(figure["network"], {})[method] = {
                "mean": mean,
                "points": len(ratios),
                "least": min(ratios, default=None),
            }
    return found


def measured(quick: bool) -> dict[str, Any]:
    """Both figures, table 2 and the chains."""
    effort = QUICK if quick else FULL
    figures = [figure_5(f, effort, quick) for f in FIGURE_5 if f.quick or not quick]
    return {
        "effort": {"ours": effort.ours, "program": effort.program, "rounding": effort.rounding, "batch": effort.batch},
        "figure_5": figures,
        "table_2": means(figures),
        "figure_6": [figure_6(network, effort) for network in max_batch.NETWORKS],
        "chains": chains(effort),
    }


if __name__ == "__main__":
    run(NAME, __doc__, measured)
