"""Copies of FX graphs."""

from __future__ import annotations

from torch import fx


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph with nodes of its own, metadata shared item by item."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
    return copy
