"""Memory of an op that runs piece by piece, from the graphs of its pieces, where it is not measured."""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from checkmate.torch.graph.op_properties import PIECES, Pieces, out_argument
from checkmate.torch.graph.storages import leaves, storage_bytes, storage_key

WorkspaceOf = Callable[[fx.Node], int]


def pieces_workspace_bytes(node: fx.Node, workspace_of: WorkspaceOf = lambda op: 0) -> int:
    """The most bytes that an op holds besides its operands and results while it runs its pieces.

    Args:
        node: The op, which has `Pieces`.
        workspace_of: Workspace of an op of a piece; none by default.
    """
    pieces: Pieces = node.meta[PIECES]
    first = pieces.graphs[0]
    terms = [value.meta["val"] for value in first.output_node().args[0]]  # type: ignore[union-attr]
    results = [made for made, is_sum in zip(leaves(node.meta["val"]), pieces.sums, strict=True) if is_sum]
    # A sum in a wider type than its result's exists besides it at the end.
    wider = [(term, made) for term, made in zip(terms, results, strict=True) if term.dtype is not made.dtype]
    sums = sum(storage_bytes(term) for term, _ in wider)
    not_yet = sum(storage_bytes(made) for _, made in wider)
    there = {storage_key(term) for term in terms}
    runs = {id(graph): (graph, buffers) for graph, buffers in zip(pieces.graphs, pieces.buffers_bytes, strict=True)}
    held = max(buffers + _temporary_bytes(graph, there, workspace_of) for graph, buffers in runs.values())
    return max(held + sums - not_yet, pieces.buffers_bytes[-1] + sums)


def _temporary_bytes(graph: fx.Graph, there: set[int], workspace_of: WorkspaceOf) -> int:
    """The most bytes of temporary tensors of a piece and workspace at once.

    Args:
        graph: The graph of the piece.
        there: Storages of sums.
        workspace_of: Workspace of an op.
    """
    nodes = list(graph.nodes)
    given = {storage_key(t) for node in nodes if node.op == "placeholder" for t in leaves(node.meta.get("val"))}
    ends = {
        storage_key(t): position
        for position, node in enumerate(nodes)
        for read in (node, *node.all_input_nodes)
        for t in leaves(read.meta.get("val"))
    }
    for node in nodes:
        if out_argument(node):  # traced before it was given a tensor to write to
            given.update(map(storage_key, leaves(node.meta.get("val"))))
    live: dict[int, int] = {}
    most = 0
    for position, node in enumerate(nodes):
        if node.op == "call_function" and node.target is not operator.getitem:
            made = {storage_key(t): storage_bytes(t) for t in leaves(node.meta.get("val"))}
            live |= {key: size for key, size in made.items() if key not in given and key not in there}
            most = max(most, sum(live.values()) + workspace_of(node))
        live = {key: size for key, size in live.items() if ends[key] > position}
    return most
