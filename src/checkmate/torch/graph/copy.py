"""Copies of FX graphs."""

from __future__ import annotations

from torch import fx


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph: new nodes, whose metadata dictionaries are shallow copies."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
    return copy
