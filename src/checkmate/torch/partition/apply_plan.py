"""Apply a plan to a joint graph: emit one node for every computation, in the plan's order, tagged as forward or backward.

PyTorch's alternative, recompute tags for its partitioner, states which nodes may be recomputed, but not when, how often or in
which order; the partitioner decides that. Here every recomputation is a separate node at its place in the plan.
``default_partition`` then has nothing to decide: it splits at the tags. Three mistakes would break this:

- without ``must_be``/``is`` tags on every node, the partitioner would move ops that depend only on inputs to the forward, and
  save their results instead of recomputing them;
- with recompute tags left on nodes, it would pass the graph to the min-cut partitioner, which would ignore the plan;
- with a module attribute (body of a higher-order op) shared between forward and backward, it would save the module as a value.

Copies to the host and from it are nodes too, and so are the waits for them (`checkmate.torch.partition.copies`). Only tensors go
from the forward to the backward: a fetch ends in the module that began it.

Other frees of the plan need no nodes: boxed FX code frees every tensor after its last use, never later than the plan
(`checkmate.torch._compat.aot.boxed`). `checkmate.torch.partition.check_peak` verifies the outcome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from checkmate.allocators import packed
from checkmate.core.errors import OptionError
from checkmate.core.plan import Compute, Discard, Fetch, Free, Offload, Plan
from checkmate.core.units import format_at_least, format_bytes
from checkmate.torch.graph.host_weights import ON_DEVICE
from checkmate.torch.graph.op_properties import (
    BATCH_NORM,
    BATCH_NORM_UPDATE,
    OpProperties,
    makes_views,
    op_properties,
    random_op,
    tagged_random,
    trains_batch_norm,
    used_arguments,
    without_update,
)
from checkmate.torch.graph.rng import emit_replay, emit_with_saved_state
from checkmate.torch.graph.symbolic import size_arithmetic
from checkmate.torch.graph.traced import producer
from checkmate.torch.joint.capture import Capture, Member
from checkmate.torch.partition import copies

_DROPPED_TAGS = ("recompute", "ac_graph_id", "has_backward_hook", "saved_tensor_with_no_vc_check")
"""Metadata of other partitioners. AOTAutograd holds a tensor with the last one, an attribute of the context of a
`torch.autograd.Function`, until the backward is over."""


def apply_plan(capture: Capture, plan: Plan) -> fx.GraphModule:
    """A new joint module that runs a plan, ready for ``default_partition``; a whole step is ready to run."""
    return _Writer(capture, plan).write()


class _Writer:
    """Emits the nodes of a plan."""

    def __init__(self, capture: Capture, plan: Plan) -> None:
        self.capture = capture
        self.steps = plan.steps
        self.order = plan.order
        self.times = Counter(self.order)  # number of computations of each op
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}  # node to its newest copy, which readers read
        self.done: set[int] = set()  # ops that were computed
        self.state: dict[int, fx.Node] = {}  # random op to its saved generator state
        self.backward = False
        self.node_of = {v: node for node, v in capture.value_of.items()}
        self.host: dict[int, fx.Node] = {}  # value to its copy on the host
        self.sending: set[int] = set()  # values whose free must wait for their copy to the host
        self.arriving: set[int] = set()  # values whose next read or free must wait for their copy from the host
        self.begun: list[fx.Node] = []  # weights that are on the device when the step begins and ends
        self.offsets = self._host_offsets(plan)

    def write(self) -> fx.GraphModule:
        joint = self.capture.joint
        sizes = size_arithmetic(joint.graph.nodes)
        for node in joint.graph.nodes:
            if node.op == "placeholder" or (node.op == "get_attr" and not self._is_module(node)):
                self._copy(node)
            elif node in sizes:
                self._tag(self._copy(node), node)
        self._find_weights()
        stats = self._stats_readers()
        returned: list[Any] = []
        position = -1
        for step in self.steps:
            if not isinstance(step, Compute):
                self._move(step)
                continue
            o, position = step.op, position + 1
            for v in self.arriving.intersection(self.capture.graph.ops[o].inputs):
                self._wait_fetched(v)
            if o == self.capture.graph.boundary:
                for v in sorted(self.arriving):
                    # PyTorch's partitioner ends the forward with the last node that has the plain tag of the forward.
                    self._wait_fetched(v)
                    node = self.node_of[v]
                    self.env[node] = self._call(copies.hand_over, (self.env[node],), node)
                returned = [self._now(out) for out in self.capture.forward_outputs]
                self.backward = True
                self._find_weights()
            else:
                self._emit(o, self.capture.members[o], position in stats)
        for v in sorted(self.arriving):
            self._wait_fetched(v)
        for node in self.begun:
            self._call(copies.keep, (*self._now(node.args), self.env[node]), None)
        if self.capture.graph.boundary is None:
            returned = [self._now(out) for out in self.capture.forward_outputs]
        returned += [self._now(out) for out in self.capture.backward_outputs]
        output = self.graph.output(tuple(returned))
        output.meta = dict(joint.graph.output_node().meta)
        module = fx.GraphModule(joint, self.graph)
        module.graph.lint()
        return module

    def _move(self, step: Offload | Fetch | Discard | Free) -> None:
        """Emit the nodes of a copy, or of the wait for a copy before a free; other frees need none."""
        v = step.value
        if isinstance(step, Offload):
            self.host[v] = self._call(copies.offload, (self.env[self.node_of[v]], next(self.offsets)), None)
            self.sending.add(v)
        elif isinstance(step, Fetch):
            node = self.node_of[v]
            if v not in self.host:
                self._find_weight(v)
            self.env[node] = self._call(copies.fetch, (self.host[v],), node)
            self.arriving.add(v)
        elif isinstance(step, Discard):
            self._call(copies.discard, (self.host.pop(v),), None)
            self.sending.discard(v)
        else:
            if v in self.sending:
                self._call(copies.wait_sent, (self.host[v], self.env[self.node_of[v]]), None)
                self.sending.remove(v)
            if v in self.arriving:
                self._wait_fetched(v)

    def _host_offsets(self, plan: Plan) -> Iterator[int]:
        """Reserve memory of the host for the copies of a plan; the place of each in it, in the order of the plan."""
        sizes, made, blocks = self.capture.graph.values, dict[int, int](), list[tuple[int, int, int]]()
        for position, step in enumerate(plan.steps):
            if isinstance(step, Offload):
                made[step.value] = len(blocks)
                blocks.append((position, len(plan.steps), sizes[step.value].size_bytes))
            elif isinstance(step, Discard):
                blocks[made[step.value]] = (blocks[made[step.value]][0], position, sizes[step.value].size_bytes)
        offsets, size = packed(blocks)
        if size:
            assert plan.host is not None
            if size > plan.host.bytes:
                told = (
                    f"in one piece the copies of the plan take {format_bytes(size)}, of {format_bytes(plan.host.bytes)} of host"
                )
                raise OptionError(told, hint=f"raise host to at least {format_at_least(size)}")
            copies.BUFFERS.reserve(size, self.node_of[next(iter(made))].meta["val"].device)
        return iter(offsets)

    def _find_weights(self) -> None:
        """Emit a call for each weight that a module fetches, before all else: a copy on the device from another plan is freed."""
        graph = self.capture.graph
        split = len(self.steps) if graph.boundary is None else self.steps.index(Compute(graph.boundary))
        steps = self.steps[split:] if self.backward else self.steps[:split]
        for v in sorted({s.value for s in steps if isinstance(s, Fetch) and graph.values[s.value].on_host}):
            if graph.producer[v] not in self.times:
                self._find_weight(v)
            else:  # the step begins with it on the device
                self.host.pop(v, None)

    def _find_weight(self, v: int) -> None:
        self.host[v] = self._call(copies.weight, self._now(self.node_of[v].args), None)

    def _wait_fetched(self, v: int) -> None:
        node = self.node_of[v]
        self.env[node] = self._call(copies.wait_fetched, (self.env[node], self.host[v]), node)
        self.arriving.remove(v)

    def _call(self, function: Any, arguments: tuple[Any, ...], like: fx.Node | None) -> fx.Node:
        """Emit a call; its result is like the node ``like`` of the original graph, or no tensor."""
        emitted = self.graph.call_function(function, arguments)
        emitted.meta = {"val": None} if like is None else dict(like.meta)
        self._tag(emitted, emitted)
        return emitted

    def _emit(self, o: int, member: Member, with_stats: bool) -> None:
        node = member.node
        assert node is not None
        for used in node.all_input_nodes:
            # The body of a higher-order op gets a get_attr node at each use. One node in the forward that the backward reads
            # would be an output of the forward, and a module cannot be an output.
            if self._is_module(used):
                self._tag(self._copy(used), used)
        first = o not in self.done
        self.done.add(o)
        args, kwargs = self._now((used_arguments(node), dict(node.kwargs)))
        emitted: list[fx.Node]
        getitems = member.getitems
        if node.target is ON_DEVICE:
            emitted = [new := self._call(copies.resident, args, node)]
            self.begun.append(node)
        elif self.times[o] > 1 and op_properties(node).random:
            if first:
                new, self.state[o], emitted = emit_with_saved_state(self.graph, node, args, kwargs)
            else:
                new = emit_replay(self.graph, node, self.state[o], args, kwargs)
                emitted = [new]
        elif trains_batch_norm(node) and not (first if node.target is BATCH_NORM_UPDATE else with_stats):
            # Other outputs are equal to the bit, and it does not read the running statistics, which the step may have
            # overwritten since the first computation.
            new = self.graph.call_function(*without_update(node.target, args))
            made = tuple(node.meta["val"][: 3 if node.target is BATCH_NORM else 4])
            new.meta = {**node.meta, "val": made}
            emitted = [new]
            getitems = tuple(g for g in getitems if g.args[1] < len(made))  # type: ignore[operator]
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
        """Set the side on which ``default_partition`` puts a node.

        AOTAutograd marks some nodes as ``must_be_in_forward`` or ``must_be_in_backward``, for example mutations of inputs. A
        computation on the other side is a recomputation, which gets the plain tag of its side.

        A random or mutating op must stay on its side: the partitioner takes it for impure and would copy it, unread, to the other
        side, with all that it reads. Attention kernels are tagged as random even without dropout.
        """
        for tag in _DROPPED_TAGS:
            emitted.meta.pop(tag, None)
        if self.capture.graph.boundary is None:
            emitted.meta.pop("partitioner_tag", None)
            return
        old = str(origin.meta.get("partitioner_tag", ""))
        must = old.startswith("must_be_in") and ("backward" in old) == self.backward
        must |= (
            emitted.target in copies.COPIES
            or tagged_random(emitted)
            or random_op(emitted) is not None
            or emitted.target is BATCH_NORM_UPDATE
        )
        side = "backward" if self.backward else "forward"
        emitted.meta["partitioner_tag"] = f"must_be_in_{side}" if must else f"is_{side}"

    def _stats_readers(self) -> set[int]:
        """Positions in the plan of the BatchNorm computations whose new running statistics are used.

        Only these update the statistics. Otherwise a recomputed BatchNorm would update them twice.
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
        self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
        return self.env[node]

    def _now(self, argument: Any) -> Any:
        return fx.map_arg(argument, self.env.__getitem__)

    def _is_module(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and isinstance(getattr(self.capture.joint, str(node.target), None), torch.nn.Module)


def remake_views(module: fx.GraphModule) -> None:
    """Let the backward of a joint module with a plan make the views that it reads, in place.

    The tensor with their memory is then saved for it, once for all of them. Code of Inductor makes most views at no cost.
    """
    for node in reversed(list(module.graph.nodes)):
        readers = [user for user in node.users if "backward" in str(user.meta.get("partitioner_tag"))]
        if not readers or node.meta.get("partitioner_tag") != "is_forward" or op_properties(node) != OpProperties():
            continue
        if makes_views(producer(node)):
            with module.graph.inserting_before(min(readers)):
                again = module.graph.node_copy(node)
            again.meta = {**node.meta, "partitioner_tag": "is_backward"}
            for reader in readers:
                reader.replace_input_with(node, again)


def eliminate_dead_rng(backward: fx.GraphModule) -> None:
    """Remove unused random ops from a backward module; ``default_partition`` keeps them, since they are impure.

    Do not use it on a forward module: there an unused random op advances the generator, as in the user's program.
    """
    for node in reversed(list(backward.graph.nodes)):
        if node.op == "call_function" and not node.users and op_properties(node).random:
            backward.graph.erase_node(node)
    backward.recompile()
