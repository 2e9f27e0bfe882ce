"""``checkpoints="respected"``: recompute regions under ``torch.utils.checkpoint`` in the backward, and never keep them.

AOTAutograd traces through ``torch.utils.checkpoint`` and leaves tags on the ops of a region: ``recompute`` (the policy) and
``ac_graph_id`` (which region). By default they are hints, and a plan may keep any value. To enforce them, this pass gives the
backward its own copies, after the boundary, of the region's ops that it reads, and marks the originals as ``FORWARD_ONLY``. The
planner sees an ordinary graph in which no value of the region crosses the boundary.

The alternative, a constraint "this value is not live at the boundary", would need support in every solver, bound and
validator (docs/decisions/0006).
"""

from __future__ import annotations

import operator

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.solvers.walks import reached
from checkmate.torch._compat.dispatch import HigherOrderOperator, detect_fake_mode
from checkmate.torch.graph.op_properties import (
    FORWARD_ONLY,
    makes_views,
    mutators,
    op_names,
    op_properties,
    overwriters,
    trains_batch_norm,
)
from checkmate.torch.graph.rng import emit_replay, emit_with_saved_state
from checkmate.torch.graph.storages import leaves
from checkmate.torch.graph.traced import in_backward, retraced

_RECOMPUTE = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def honour_checkpoints(graph: fx.Graph, no_recompute: frozenset[str]) -> None:
    """Copy the ops of checkpointed regions into the backward, for the backward ops of the same region, in place.

    Values of a region that other parts of the step read, above all its result, are treated like any other value. So are values
    that cannot be recomputed: of ops with the policy "must save", of ops with side effects, of ops that read a storage that the
    step overwrites, and of higher-order ops.

    The region of a backward op follows from ``seq_nr``. Autograd numbers the nodes of its graph in the order of
    creation; AOTAutograd writes that number on the forward op and on the backward ops of the same autograd node. A backward op
    therefore has the region of the first forward op of its number. Two cases need care:

    - A forward op that creates no autograd node has the number of the op before it, which may lie outside of its region. Only
      the first op with a number decides, hence ``setdefault``.
    - A backward op without a known number, for example a sum of gradients, may belong to any region. It reads the copy: reading
      the original would keep it alive across the boundary, which the user asked to avoid.

    A backward op of another region reads the original, which is then held, as eager mode holds values that a later op saved.
    Reading a copy there would be correct too, but would recompute values that eager mode does not.
    """
    nodes = list(graph.nodes)
    backward = in_backward(graph)
    forward = [n for n in nodes if n.op == "call_function" and n not in backward]
    known = mutators((i, n, op_properties(n)) for i, n in enumerate(nodes) if n.op == "call_function")
    marked: dict[fx.Node, int] = {}
    regions: dict[int, int | None] = {}  # seq_nr -> region
    for node in forward:
        if "seq_nr" in node.meta:
            regions.setdefault(node.meta["seq_nr"], node.meta.get("ac_graph_id"))
        # A recomputation after the overwrite would read new numbers. BatchNorm is exempt: its recomputation is the variant
        # without running statistics, the only storages that it overwrites.
        overwritten = not trains_batch_norm(node) and any(True for _ in overwriters(node, known))
        if _is_recomputable(node, marked, no_recompute) and not overwritten:
            marked[node] = node.meta["ac_graph_id"]
            node.meta[FORWARD_ONLY] = not makes_views(node)  # a planner may make views beside any reader
    writer = _RegionRecomputation(graph, marked)
    for reader in nodes:
        if reader in backward and reader.op == "call_function":
            number = reader.meta.get("seq_nr")
            own = [n for n in reader.all_input_nodes if n in marked and regions.get(number, marked[n]) == marked[n]]
            writer.recompute_for(reader, own)
    for node in reversed(list(marked)):
        if node.target is operator.getitem and not node.users:
            graph.erase_node(node)


class _RegionRecomputation:
    """Emits copies of region ops into the backward."""

    def __init__(self, graph: fx.Graph, marked: dict[fx.Node, int]) -> None:
        self.graph = graph
        self.marked = marked
        self.recomputed: dict[fx.Node, fx.Node] = {}  # op -> its copy in the backward
        self.replacement: dict[fx.Node, fx.Node] = {}  # random op -> output of the op that replaced it to save the RNG state

    def recompute_for(self, reader: fx.Node, own: list[fx.Node]) -> None:
        """Recompute region values that ``reader`` uses, with their dependencies, directly before ``reader``."""
        needed = reached(own, self._read_in_region, lambda node: node not in self.recomputed)
        for node in sorted(needed):
            self._recompute(node, reader)
        for node in own:
            read = self.replacement.get(node, node)
            reader.replace_input_with(read, self.recomputed[read])

    def _read_in_region(self, node: fx.Node) -> list[fx.Node]:
        return [read for read in node.all_input_nodes if read in self.marked and self.marked[read] == self.marked[node]]

    def _recompute(self, node: fx.Node, reader: fx.Node) -> None:
        again = {read: self.recomputed[read] for read in self._read_in_region(node)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: again.get(read, read))
        meta = {k: v for k, v in node.meta.items() if k not in ("recompute", "ac_graph_id", FORWARD_ONLY)}
        mode = detect_fake_mode(node.meta["val"])
        assert mode is not None
        # Traced again: a copied result would share its storages with the original, and the planner would take both for one
        # allocation.
        if op_properties(node).random:
            value = retraced(node, mode)
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
            value = retraced(new, mode)
        new.meta = meta | {"partitioner_tag": "is_backward", "val": value}
        self.recomputed[node] = new


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
