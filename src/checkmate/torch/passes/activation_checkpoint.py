"""Regions under ``torch.utils.checkpoint`` as the user meant them: computed again in the backward, and not held for it.

By default such a region is a hint, and a plan may keep what it likes. To respect it, what the backward of a region
reads of it is made by ops of its own, which come after the boundary; a planner has nothing left to decide there, and
decides on the rest.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import HigherOrderOperator, detect_fake_mode
from checkmate.torch.graph.mutations import mutators, overwriters
from checkmate.torch.graph.op_properties import FORWARD_ONLY, op_names, op_properties, trains_batch_norm
from checkmate.torch.graph.rng import emit_replay, emit_with_saved_state
from checkmate.torch.graph.storages import leaves, storage_key

_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
_TAGS = ("recompute", "ac_graph_id", FORWARD_ONLY)
_UNKNOWN = -1


def honour_checkpoints(graph: fx.Graph, no_recompute: frozenset[str]) -> int:
    """Give the backward of every checkpointed region ops of its own for what it reads of the region.

    What other parts of the step read of a region, its result above all, is held as elsewhere. So is what cannot be
    computed again: what must be saved, effects, readers of what the step overwrites, higher-order ops.

    Args:
        graph: A joint graph; changed in place.
        no_recompute: Names of ops that run once.

    Returns:
        How many ops it got.
    """
    nodes = list(graph.nodes)
    backward = _backward(nodes)
    forward = [n for n in nodes if n.op == "call_function" and n not in backward]
    known = mutators((i, n, op_properties(n)) for i, n in enumerate(nodes) if n.op == "call_function")
    marked: dict[fx.Node, int] = {}
    regions: dict[int, int | None] = {}  # autograd's number of an op -> its region
    for node in forward:
        if "seq_nr" in node.meta:
            # What needs no gradient has the number of the op before it.
            regions.setdefault(node.meta["seq_nr"], node.meta.get("ac_graph_id"))
        overwritten = not trains_batch_norm(node) and any(True for _ in overwriters(node, known))
        if _is_recomputable(node, marked, no_recompute) and not overwritten:
            marked[node] = node.meta["ac_graph_id"]
            node.meta[FORWARD_ONLY] = _allocates(node)
    writer = _RegionRecomputation(graph, marked)
    for reader in nodes:
        if reader in backward and reader.op == "call_function":
            here = regions.get(reader.meta.get("seq_nr", _UNKNOWN), _UNKNOWN)
            writer.recompute_for(reader, [n for n in reader.all_input_nodes if n in marked and here in (_UNKNOWN, marked[n])])
    return writer.finish()


class _RegionRecomputation:
    def __init__(self, graph: fx.Graph, marked: dict[fx.Node, int]) -> None:
        self.graph = graph
        self.marked = marked
        self.position = {n: i for i, n in enumerate(graph.nodes)}
        self.recomputed: dict[fx.Node, fx.Node] = {}
        self.replacement: dict[fx.Node, fx.Node] = {}  # random op -> what is read since its state is saved

    def recompute_for(self, reader: fx.Node, own: list[fx.Node]) -> None:
        """Make what a reader reads of its region, and what that takes, right before it."""
        stack, needed = list(own), set[fx.Node]()
        while stack:
            node = stack.pop()
            if node not in needed and node not in self.recomputed:
                needed.add(node)
                stack += [i for i in node.all_input_nodes if self._same_region(i, node)]
        for node in sorted(needed, key=self.position.__getitem__):
            self._recompute(node, reader)
        for node in own:
            read = self.replacement.get(node, node)
            reader.replace_input_with(read, self.recomputed[read])

    def finish(self) -> int:
        """Drop what nobody reads any more."""
        for node in reversed(list(self.marked)):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        return len(self.recomputed)

    def _same_region(self, read: fx.Node, node: fx.Node) -> bool:
        return read in self.marked and self.marked[read] == self.marked[node]

    def _recompute(self, node: fx.Node, reader: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.recomputed[n] if self._same_region(n, node) else n)
        value = _computed(node, args, kwargs)
        meta = {k: v for k, v in node.meta.items() if k not in _TAGS} | {"partitioner_tag": "is_backward", "val": value}
        if op_properties(node).random:
            with self.graph.inserting_before(node):
                output, state, _ = emit_with_saved_state(self.graph, node, node.args, node.kwargs)
            with self.graph.inserting_before(reader):
                new = emit_replay(self.graph, node, state, args, kwargs)
            node.replace_all_uses_with(output)
            self.graph.erase_node(node)
            self.marked[output] = self.marked.pop(node)
            self.replacement[node] = node = output
        else:
            with self.graph.inserting_before(reader):
                new = self.graph.create_node(node.op, node.target, args, kwargs, name=f"{node.name}_again")
        new.meta = meta
        self.recomputed[node] = new


def _backward(nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in nodes:
        tagged = "backward" in str(node.meta.get("partitioner_tag", ""))
        if tagged or is_tangent(node) or any(i in found for i in node.all_input_nodes):
            found.add(node)
    return found


def _is_recomputable(node: fx.Node, marked: dict[fx.Node, int], no_recompute: frozenset[str]) -> bool:
    if node.meta.get("recompute") not in _RECOMPUTE or "ac_graph_id" not in node.meta:
        return False
    if node.target is operator.getitem:
        return node.args[0] in marked
    known = op_properties(node)
    return (
        not known.pinned
        and not isinstance(node.target, HigherOrderOperator)
        and bool(leaves(node.meta.get("val")))
        and no_recompute.isdisjoint(op_names(node))
    )


def _allocates(node: fx.Node) -> bool:
    """Whether an op makes storage: views are made where they are read."""
    given = {storage_key(t) for i in node.all_input_nodes for t in leaves(i.meta.get("val"))}
    return any(storage_key(t) not in given for t in leaves(node.meta.get("val")))


def _computed(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What an op returns, traced once more: storages of its own."""
    mode = detect_fake_mode(node.meta["val"])
    assert mode is not None
    with mode, torch.no_grad():
        given, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        return node.target(*given, **named)  # type: ignore[operator]
