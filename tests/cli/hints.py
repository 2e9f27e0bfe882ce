"""Whether the budget that a refusal names is kept at the first try, for random graphs.

python -m tests.cli.hints FIRST LAST
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

import checkmate
from checkmate import Graph
from checkmate.cli import main
from checkmate.core.budget import keep_all_bytes
from checkmate.solvers.bounds.floor import floor
from tests.solvers.generators import transformer
from tests.strategies import random_graph

TRIES = 3


def graph_of(rng: random.Random) -> Graph:
    """A random graph of up to 120 ops, or that of a small transformer, in half of the cases with resident bytes."""
    if rng.random() < 0.25:
        graph = transformer(rng.randint(1, 6), width=rng.choice((8, 33, 64)), tokens=rng.choice((17, 128, 512)))
    else:
        graph = random_graph(rng, max_ops=rng.choice((6, 20, 60, 120)))
    resident = rng.randint(0, 2 ** rng.randint(1, 28)) if rng.random() < 0.5 else 0
    return msgspec.structs.replace(graph, resident_bytes=resident)


def follow(seed: int, folder: Path) -> dict[str, Any]:
    """Ask for a budget near or below the smallest one, and then for that which each refusal names."""
    rng = random.Random(seed)
    graph = graph_of(rng)
    checkmate.write(graph, folder / "graph.json")
    least = floor(graph).peak_bytes
    low = rng.random() < 0.6
    budget = str(int(least * rng.uniform(0.3, 1)) if low else least + int(rng.uniform(0, 0.1) * (keep_all_bytes(graph) - least)))
    limit = rng.choice(("0.2", "1", "3"))
    hints: list[str] = []
    for _ in range(TRIES):
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            words = ["plan", str(folder / "graph.json"), "--budget", budget, "--time-limit", limit]
            code = main([*words, "--out", str(folder / "plan.json")])
        if not code:
            break
        found = re.search(r"raise the budget to at least (\S+?)(?:,| \()", said.getvalue())
        assert found is not None, said.getvalue()
        budget = found[1]
        hints.append(budget)
    return {"seed": seed, "ops": len(graph.ops), "hints": hints}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(int(sys.argv[1]), int(sys.argv[2])):
            sys.stdout.write(f"{json.dumps(follow(seed, Path(folder)))}\n")
