"""Impose a plan on a joint graph: one node for every computation, in the plan's order, tagged by side.

Stock partitioning does the rest: every clone is explicit, so nothing is left for it to decide. Frees
need no imposing either, as boxed FX code frees every tensor after its last use.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from checkmate.core.plan import Plan
from checkmate.torch.graph.op_properties import BATCH_NORM_NO_STATS, op_properties, trains_batch_norm, unused_arguments
from checkmate.torch.graph.rng import emit_replay, emit_with_saved_state
from checkmate.torch.joint.capture import Capture, Member

_RECOMPUTE_TAGS = ("recompute", "ac_graph_id", "has_backward_hook")


def apply_plan(capture: Capture, plan: Plan) -> fx.GraphModule:
    """The joint module that computes what a plan says, in its order.

    Args:
        capture: The captured graph; its joint module is not changed.
        plan: A valid plan of ``capture.graph``.

    Returns:
        A new joint module, ready to be split into forward and backward; the graph of a whole step is ready to run.
    """
    return _Writer(capture, plan).write()


class _Writer:
    def __init__(self, capture: Capture, plan: Plan) -> None:
        self.capture = capture
        self.order = plan.order
        self.times = Counter(self.order)
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.done: set[int] = set()
        self.state: dict[int, fx.Node] = {}
        self.backward = False

    def write(self) -> fx.GraphModule:
        joint = self.capture.joint
        for node in joint.graph.nodes:
            if node.op == "placeholder" or (node.op == "get_attr" and not self._is_module(node)):
                self._copy(node)
        stats = self._stats_readers()
        returned: list[Any] = []
        for position, o in enumerate(self.order):
            if o == self.capture.graph.boundary:
                returned = [self._now(out) for out in self.capture.forward_outputs]
                self.backward = True
            else:
                self._emit(o, self.capture.members[o], position in stats)
        if self.capture.graph.boundary is None:
            returned = [self._now(out) for out in self.capture.forward_outputs]
        returned += [self._now(out) for out in self.capture.backward_outputs]
        output = self.graph.output(tuple(returned))
        output.meta = dict(next(iter(reversed(joint.graph.nodes))).meta)
        module = fx.GraphModule(joint, self.graph)
        module.graph.lint()
        return module

    def _emit(self, o: int, member: Member, with_stats: bool) -> None:
        node = member.node
        assert node is not None
        for used in node.all_input_nodes:
            # Bodies of higher-order ops are emitted at each use: before the boundary they would be saved.
            if self._is_module(used):
                self._tag(self._copy(used), used)
        first = o not in self.done
        self.done.add(o)
        skip = unused_arguments(node)
        args = tuple(None if i in skip else self._now(a) for i, a in enumerate(node.args))
        kwargs = {k: self._now(v) for k, v in node.kwargs.items()}
        emitted: list[fx.Node]
        getitems = member.getitems
        if self.times[o] > 1 and op_properties(node).random:
            if first:
                new, self.state[o], emitted = emit_with_saved_state(self.graph, node, args, kwargs)
            else:
                new = emit_replay(self.graph, node, self.state[o], args, kwargs)
                emitted = [new]
        elif trains_batch_norm(node) and not with_stats:
            x, weight, bias, _, _, _, momentum, eps = args
            new = self.graph.call_function(BATCH_NORM_NO_STATS, (x, weight, bias, True, momentum, eps))
            new.meta = {**node.meta, "val": tuple(node.meta["val"][:3])}
            emitted = [new]
            getitems = tuple(g for g in getitems if g.args[1] < 3)  # type: ignore[operator]
        else:
            new = self.graph.create_node(node.op, node.target, args, kwargs)
            new.meta = dict(node.meta)
            emitted = [new]
        self.env[node] = new
        for getitem in getitems:
            emitted.append(self._copy(getitem))
        for each in emitted:
            self._tag(each, node)

    def _tag(self, emitted: fx.Node, origin: fx.Node) -> None:
        for tag in _RECOMPUTE_TAGS:
            emitted.meta.pop(tag, None)
        if self.capture.graph.boundary is None:
            emitted.meta.pop("partitioner_tag", None)
            return
        old = str(origin.meta.get("partitioner_tag", ""))
        must = old.startswith("must_be_in") and ("backward" in old) == self.backward
        side = "backward" if self.backward else "forward"
        emitted.meta["partitioner_tag"] = f"must_be_in_{side}" if must else f"is_{side}"

    def _stats_readers(self) -> set[int]:
        """Positions of the BatchNorm computations whose new running statistics somebody reads.

        All the others compute without them, so that they neither touch statistics that have been
        updated since nor make what is not needed.
        """
        graph, members = self.capture.graph, self.capture.members
        norms = {o for o, m in enumerate(members) if m.node is not None and trains_batch_norm(m.node)}
        stats = {v: o for o in norms for v in graph.ops[o].outputs[3:]}
        newest: dict[int, int] = {}
        found: set[int] = set()
        for position, o in enumerate(self.order):
            found.update(newest[stats[v]] for v in graph.ops[o].inputs if v in stats)
            if o in norms:
                newest[o] = position
        kept = {stats[v] for v in stats if graph.values[v].kept}
        return found | {newest[o] for o in kept}

    def _copy(self, node: fx.Node) -> fx.Node:
        self.env[node] = self.graph.node_copy(node, self._get)
        return self.env[node]

    def _get(self, node: fx.Node) -> fx.Node:
        return self.env[node]

    def _now(self, argument: Any) -> Any:
        return fx.map_arg(argument, self._get)

    def _is_module(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and isinstance(getattr(self.capture.joint, str(node.target), None), torch.nn.Module)


def eliminate_dead_rng(module: fx.GraphModule) -> int:
    """Remove random ops that nobody reads from a backward module; return how many.

    Only there: in the forward they advance the generator as the user's program does.
    """
    dead = 0
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and not node.users and op_properties(node).random:
            module.graph.erase_node(node)
            dead += 1
    if dead:
        module.recompile()
    return dead
