"""The largest batch of the paper's networks in 16 GB with at most one extra forward pass, and what is proven of it.

    python benchmarks/max_batch.py                  # all networks, about a minute and a half on one core
    python benchmarks/max_batch.py --only MobileNet

The protocol of figure 6 of Jain et al. (2020): 16e9 bytes with parameters and their gradients counted once, sizes and
costs proportional to the batch, a plan's cost at most that of computing every op once and every forward op once more.
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
from checkmate import AffineGraph, Graph, Limits
from checkmate.core.budget import keep_all_bytes

HERE = Path(__file__).parent
GRAPHS = HERE / "graphs"
RESULTS = HERE / "results" / "max_batch.json"
BUDGET = 16_000_000_000


@dataclass(frozen=True, slots=True)
class Network:
    """A network, and what others report for it: the best simple heuristic, the paper's program on an open or its own engine."""

    name: str
    heuristic: int
    program: int
    note: str


NETWORKS = (
    Network("VGG19", 289, 289, "open engine, optimal"),
    Network("fcn_8_vgg", 55, 57, "open engine, optimal"),
    Network("segnet", 43, 61, "open engine, optimal"),
    Network("vgg_unet", 35, 59, "open engine, 600 s"),
    Network("MobileNet", 641, 1105, "paper, two days"),
    Network("ResNet50", 248, 193, "paper, two days"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    network: str
    keep_all: int
    batch: int
    upper_bound: int
    overhead: float
    peak_bytes: int
    elapsed_s: float
    why: str


def largest_kept(graph_at: AffineGraph) -> int:
    """The largest batch at which computing every op once, in the graph's order, fits."""
    low, high = 0, 1
    while keep_all_bytes(graph_at(high)) <= BUDGET:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keep_all_bytes(graph_at(middle)) <= BUDGET else (low, middle)
    return low


def measure(network: Network, time_s: float) -> Row:
    """Solve one network."""
    graph = checkmate.read(GRAPHS / f"{network.name}_b1.graph.json")
    assert isinstance(graph, Graph)
    graph_at = AffineGraph.proportional(graph)
    found = checkmate.max_batch(graph_at, budget_bytes=BUDGET, limits=Limits(time_s=time_s, threads=1))
    assert checkmate.validate(graph_at(found.batch), found.plan, BUDGET) == ()
    assert found.result.overhead is not None
    assert found.result.peak_bytes is not None
    return Row(
        network=network.name,
        keep_all=largest_kept(graph_at),
        batch=found.batch,
        upper_bound=found.upper_bound,
        overhead=found.result.overhead,
        peak_bytes=found.result.peak_bytes,
        elapsed_s=round(found.elapsed_s, 1),
        why=found.why,
    )


def main() -> int:
    """Run the networks and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="names of networks")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds a network")
    options = parser.parse_args()
    rows: list[Row] = []
    for network in NETWORKS:
        if not options.only or network.name in options.only:
            rows.append(measure(network, options.time_limit))
            print(rows[-1], flush=True)
    where = {
        "cpu": f"{os.cpu_count()} cores, {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("highspy", "numba", "numpy", "checkmate-remat")},
    }
    if not options.only:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"where": where, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
