"""The protocol of FastSA (2023): unit costs, 50 % and 25 % of the initial peak, graphs to over 8,000 ops.

python benchmarks/papers/2023-fastsa/run.py --quick    # some three minutes
python benchmarks/papers/2023-fastsa/run.py            # all, about ten minutes; writes the JSON
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[3]))

import checkmate
from benchmarks.fresh import paper
from benchmarks.generate import gpt_of
from benchmarks.networks import training_step
from checkmate import Auto, Graph, Limits, Problem
from checkmate.core.budget import keep_all_bytes

NAME = "2023-fastsa"
SHARES = (0.5, 0.25)
GRAPHS = Path(__file__).parents[2] / "graphs"
CAPTURED = ("resnet50", "unet", "bert", "gpt2_loss")
NETWORKS = (("VGG16", 256), ("ResNet50", 256), ("MobileNet", 512), ("DenseNet121", 1), ("vgg_unet", 32))
GENERATED = (1300, 2600, 5200, 8330)


def graphs(quick: bool) -> list[Graph]:
    """Graphs of the protocol."""
    found = [checkmate.read(GRAPHS / f"{name}.graph.json") for name in CAPTURED]
    captured = [graph for graph in found if isinstance(graph, Graph)]
    networks = [training_step(name, batch) for name, batch in NETWORKS]
    made = [gpt_of(ops) for ops in (GENERATED[:1] if quick else GENERATED)]
    return [unit_cost(graph) for graph in ([*captured, *networks[:2]] if quick else [*captured, *networks]) + made]


def unit_cost(graph: Graph) -> Graph:
    """The same graph with every op at cost 1; views cost nothing."""
    ops = tuple(msgspec.structs.replace(op, cost=0 if o in graph.view_ops else 1) for o, op in enumerate(graph.ops))
    return msgspec.structs.replace(graph, ops=ops, cost_unit="ops")


def measure(graph: Graph, share: float, time_s: float) -> dict[str, Any]:
    """One graph at one share of its peak above what is resident."""
    problem = Problem(graph, graph.resident_bytes + int(share * (keep_all_bytes(graph) - graph.resident_bytes)))
    result = checkmate.solve(problem, Auto(), limits=Limits(time_s=time_s), raise_on_failure=False)
    costs = [point for point in result.history if point.cost is not None]
    peak = None if result.peak_bytes is None else result.peak_bytes - graph.resident_bytes
    row = {
        "graph": graph.name,
        "ops": len(graph.ops),
        "share": share,
        "overhead": result.overhead,
        "bound": result.bound / graph.cost,
        "gap": result.gap,
        "peak": None if peak is None else peak / (keep_all_bytes(graph) - graph.resident_bytes),
        "first_s": round(costs[0].time_s, 2) if costs else None,
        "seconds": round(result.elapsed_s, 1),
        "status": result.termination.reason.value,
        "detail": result.termination.detail,
    }
    print(row, flush=True)
    return row


def measured(quick: bool) -> dict[str, Any]:
    """All graphs at all shares."""
    time_s = 10.0 if quick else 36.0
    return {"time_s": time_s, "rows": [measure(graph, share, time_s) for graph in graphs(quick) for share in SHARES]}


if __name__ == "__main__":
    paper(NAME, __doc__, measured)
