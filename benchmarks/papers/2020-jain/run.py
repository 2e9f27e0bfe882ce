"""Figures 5 and 6 and table 2 of Jain et al. (2020), with ours beside.

python benchmarks/papers/2020-jain/run.py --quick    # three networks, short limits; under ten minutes on two cores
python benchmarks/papers/2020-jain/run.py            # all, about 40 minutes; writes the JSON
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import checkmate
from benchmarks.fresh import paper
from benchmarks.networks import training_step
from checkmate import AffineGraph, ChenGreedy, ChenSqrtN, Graph, Griewank, Limits, LpRounding, Milp, Problem
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.session import Solver

NAME = "2020-jain"
# Budgets for which the original's own program on an open engine is known, 600 s and one thread a point.
KNOWN = {
    "VGG16": (14_300_000_000,),
    "vgg_unet": (16_000_000_000, 12_000_000_000, 10_000_000_000),
    "MobileNet": (16_000_000_000, 12_000_000_000, 8_000_000_000),
}

# Unit chains: layers, budget, cost of the original's program on an open engine, and how it ended.
CHAINS = (
    (8, 4, 26, "optimal"),
    (8, 6, 21, "optimal"),
    (8, 8, 19, "optimal"),
    (16, 4, 70, "open, 120 s"),
    (16, 6, 47, "open, 120 s"),
    (16, 8, 43, "optimal"),
    (32, 6, 120, "open, 120 s"),
)

# Figure 6: the largest batch of the paper's program on an open or its own engine, in 16e9 bytes with parameters and their
# gradients counted once, sizes and costs proportional to the batch, and at most one extra forward pass.
BUDGET = 16_000_000_000
NETWORKS = (
    ("VGG19", 289, "open engine, optimal"),
    ("fcn_8_vgg", 57, "open engine, optimal"),
    ("segnet", 61, "open engine, optimal"),
    ("vgg_unet", 59, "open engine, 600 s"),
    ("MobileNet", 1105, "paper, two days"),
    ("ResNet50", 193, "paper, two days"),
)

SHARES = (0.03, 0.1, 0.25, 0.5, 0.75)
"""Budgets of figure 5: the floor that no plan can go below, plus these shares of what keeping everything takes above it."""


# The networks of figure 5, and the batch that each is drawn at.
FIGURE_5 = {"VGG16": 256, "MobileNet": 512, "vgg_unet": 32, "VGG19": 256, "ResNet50": 256}
QUICK_FIGURE_5 = ("VGG16", "MobileNet", "vgg_unet")
WITHOUT_PROGRAM = ("ResNet50",)

# Seconds a solve.
QUICK = {"ours": 6.0, "program": 10.0, "rounding": 5.0, "batch": 8.0}
FULL = {"ours": 30.0, "program": 45.0, "rounding": 25.0, "batch": 60.0}

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


def figure_5(network: str, effort: dict[str, float], quick: bool) -> dict[str, Any]:
    """Overhead against budget of one network, by every method."""
    graph = training_step(network, FIGURE_5[network])
    low, high = floor(graph).peak_bytes, keep_all_bytes(graph)
    shares = SHARES[1:4] if quick else SHARES
    budgets = {low + round(share * (high - low)) for share in shares} | set(KNOWN.get(network, ()))
    points: list[dict[str, Any]] = []
    for budget in sorted(budgets):
        point: dict[str, Any] = {"budget_bytes": budget, "methods": {}}
        for name, solver in HEURISTICS.items():
            point["methods"][name] = solved(graph, budget, solver, effort["ours"])
        if network not in WITHOUT_PROGRAM:
            point["methods"]["LP rounding"] = solved(graph, budget, LpRounding(), effort["rounding"])
            point["methods"]["program"] = solved(graph, budget, Milp(), effort["program"])
        point["methods"]["ours"] = solved(graph, budget, checkmate.Auto(), effort["ours"], 1e-4)
        points.append(point)
        print(network, budget, {name: m["overhead"] for name, m in point["methods"].items()}, flush=True)
    return {"network": network, "batch": FIGURE_5[network], "floor_bytes": low, "keep_all_bytes": high, "points": points}


def chains(effort: dict[str, float]) -> list[dict[str, Any]]:
    """Unit chains, where the paper's solver is slowest for its size."""
    rows: list[dict[str, Any]] = []
    for layers, budget, known, ended in CHAINS:
        graph = training_step(f"linear{layers}")
        ours = solved(graph, budget, checkmate.Auto(), effort["ours"])
        rows.append({"layers": layers, "budget": budget, "known": known, "ended": ended, "ours": ours, "ops": graph.cost})
    return rows


def figure_6(network: str, known: int, note: str, effort: dict[str, float]) -> dict[str, Any]:
    """The largest batch of one network by the simple methods and by ours."""
    graph_at = AffineGraph.proportional(training_step(network))
    found = checkmate.max_batch(graph_at, budget_bytes=BUDGET, limits=Limits(time_s=effort["batch"], threads=1))
    assert checkmate.validate(graph_at(found.batch), found.plan, BUDGET) == ()

    def planned(solver: Solver) -> Callable[[int], bool]:
        return lambda batch: fits(graph_at(batch), solver)

    row = {
        "network": network,
        "keep_all": largest(lambda batch: keep_all_bytes(graph_at(batch)) <= BUDGET),
        "simple": {name: largest(planned(solver)) for name, solver in HEURISTICS.items() if not isinstance(solver, Griewank)},
        "known": known,
        "note": note,
        "ours": found.batch,
        "upper_bound": found.upper_bound,
        "overhead": found.result.overhead,
        "seconds": round(found.elapsed_s, 1),
    }
    print(row, flush=True)
    return row


def fits(graph: Graph, solver: Solver) -> bool:
    """Whether a simple method has a plan within the limits on memory and cost."""
    most = graph.cost + sum(op.cost for op in graph.ops if op.phase != "backward")
    found = checkmate.solve(Problem(graph, BUDGET), solver, limits=Limits(target_cost=most), raise_on_failure=False)
    return found.cost is not None and found.cost <= most


def largest(fits: Callable[[int], bool]) -> int:
    """The largest batch that fits."""
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
    figures = [figure_5(network, effort, quick) for network in (QUICK_FIGURE_5 if quick else FIGURE_5)]
    return {
        "effort": effort,
        "figure_5": figures,
        "table_2": means(figures),
        "figure_6": [figure_6(*network, effort) for network in NETWORKS],
        "chains": chains(effort),
    }


if __name__ == "__main__":
    paper(NAME, __doc__, measured)
