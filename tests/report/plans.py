"""Plans that compute much again, made without a solver, so that they are the same on a busy machine."""

from __future__ import annotations

import random
from pathlib import Path

import checkmate
from checkmate import Graph, Plan

GRAPHS = Path(__file__).parent.parent.parent / "benchmarks" / "graphs"


def captured(name: str) -> tuple[Graph, Plan]:
    """A real step with views, workspace and random ops, and a plan of it."""
    graph = checkmate.read(GRAPHS / f"{name}.graph.json")
    assert isinstance(graph, Graph)
    return graph, again(graph)


def again(graph: Graph, share: float = 0.3) -> Plan:
    """A plan that computes a share of the ops a second time, somewhere between its first computation and the end."""
    rng = random.Random(len(graph.ops))
    count = len(graph.ops)
    extra: dict[int, list[int]] = {}
    for o, op in enumerate(graph.ops):
        last = min(op.clobbered_by, default=count)
        if op.recomputable and o + 1 < last and rng.random() < share:
            extra.setdefault(rng.randrange(o + 1, last), []).append(o)
    order = [o for p in range(count) for o in (*extra.get(p, ()), p)]
    found = Plan.from_order(graph, order)
    assert checkmate.validate(graph, found) == ()
    return found
