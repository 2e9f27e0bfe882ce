"""The protocol of Moccasin (Bartan et al. 2023): its random layered graphs and the Checkmate graphs at 0.9 and 0.8 of the peak.

python benchmarks/papers/2023-moccasin/run.py --quick    # graphs to 250 nodes, short limits; some five minutes
python benchmarks/papers/2023-moccasin/run.py            # all, about 25 minutes; writes the JSON
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import checkmate
from benchmarks.fresh import paper
from benchmarks.generate import layered
from benchmarks.networks import training_step
from checkmate import Graph, Limits, Problem
from checkmate.core.budget import keep_all_bytes

NAME = "2023-moccasin"
SHARES = (0.9, 0.8)
LAYERED = (100, 250, 500, 1000)
NETWORKS = (("fcn_8_vgg", 1), ("segnet", 1), ("vgg_unet", 32), ("ResNet50", 256), ("DenseNet121", 1))


def graphs(quick: bool) -> list[Graph]:
    """Graphs of the protocol."""
    made = [layered(nodes) for nodes in (LAYERED[:2] if quick else LAYERED)]
    return made + [training_step(name, batch) for name, batch in (NETWORKS[:3] if quick else NETWORKS)]


def above_resident(graph: Graph) -> Graph:
    """The graph without what is resident: a share of the peak is one of what can be planned."""
    return checkmate.Graph(graph.ops, graph.values, order=graph.order, cost_unit=graph.cost_unit, name=graph.name)


def measure(graph: Graph, share: float, time_s: float) -> dict[str, Any]:
    """One graph at one share of its peak, in its own order and in any."""
    budget = int(share * keep_all_bytes(graph))
    row: dict[str, Any] = {"graph": graph.name, "ops": len(graph.ops), "share": share, "methods": {}}
    for name, reorder in (("ours, their order", False), ("ours", True)):
        problem = Problem(graph, budget, reorder=reorder)
        limits = Limits(time_s=time_s, gap=1e-4)
        result = checkmate.solve(problem, limits=limits, raise_on_failure=False)
        costs = [point for point in result.history if point.cost is not None]
        row["methods"][name] = {
            "overhead": result.overhead,
            "bound": result.bound / graph.cost,
            "status": result.termination.reason.value,
            "first_s": round(costs[0].time_s, 2) if costs else None,
            "best_s": round(next(p.time_s for p in costs if p.cost == result.cost), 2) if costs else None,
        }
    print(row, flush=True)
    return row


def measured(quick: bool) -> dict[str, Any]:
    """All graphs at all shares."""
    time_s = 8.0 if quick else 20.0
    rows = [measure(above_resident(graph), share, time_s) for graph in graphs(quick) for share in SHARES]
    return {"time_s": time_s, "rows": rows}


if __name__ == "__main__":
    paper(NAME, __doc__, measured)
