"""A graph that the figures are drawn of: a chain with its backward."""

from __future__ import annotations

from checkmate import Graph, Plan

LAYERS = 6
KEEP_ALL = tuple(range(2 * LAYERS))
AGAIN = (0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 9, 10, 11)


def chain() -> Graph:
    edges = [(i, i + 1) for i in range(2 * LAYERS - 1)]
    edges += [(LAYERS - 2 - i, LAYERS + i) for i in range(LAYERS - 1)]
    return Graph.from_dag(
        cost=[1_000_000] * LAYERS + [2_000_000] * LAYERS,
        size_bytes=[2**20] * (2 * LAYERS),
        edges=edges,
        backward=[False] * LAYERS + [True] * LAYERS,
        resident_bytes=2**19,
        name="chain",
    )


def plan(order: tuple[int, ...]) -> Plan:
    return Plan.from_order(chain(), order)
