"""A captured joint graph as a part of a step that runs several graphs."""

from __future__ import annotations

from collections.abc import Set

from torch import fx

from checkmate.frontend.step_graph import Part
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch.graph.op_properties import used_inputs
from checkmate.torch.graph.storages import leaves, storage_key
from checkmate.torch.joint.capture import Capture


def part_of(capture: Capture) -> Part:
    """The captured graph with its values by argument and result, in AOTAutograd's order."""
    placeholders = [n for n in capture.joint.graph.nodes if n.op == "placeholder"]
    inputs = [n for n in placeholders if not is_tangent(n)]
    readers: dict[fx.Node, list[int]] = {n: [] for n in inputs}
    for o, member in enumerate(capture.members):
        for read in () if member.node is None else used_inputs(member.node):
            if read in readers:
                readers[read].append(o)
    input_of = {storage_key(t): k for k, n in enumerate(inputs) for t in leaves(n.meta.get("val"))}
    graph, views = capture.graph, dict[int, int]()
    for node, value in capture.value_of.items():
        if graph.values[value].base is None and not graph.values[value].size_bytes:
            views.update((value, input_of[k]) for k in map(storage_key, leaves(node.meta.get("val"))) if k in input_of)
    return Part(
        graph=graph,
        readers=tuple(tuple(readers[n]) for n in inputs),
        views=views,
        returned=tuple(_value(capture, out) for out in capture.forward_outputs),
        tangents=tuple(capture.value_of.get(n) for n in placeholders if is_tangent(n)),
        gradients=tuple(_value(capture, out) for out in capture.backward_outputs),
    )


def reads_of_overwritable(part: Part, overwritable: Set[int]) -> frozenset[int]:
    """Ops of a forward that read inputs which the backward of the plain step does not read.

    Until a step has shown that the caller leaves these inputs as they are, no such op may be computed again in the backward.
    """
    readers = {k: set(part.readers[k]) for k in overwritable}
    for o, op in enumerate(part.graph.ops):
        for k in {part.views[v] for v in op.inputs if v in part.views} & overwritable:
            readers[k].add(o)
    early = [ops for ops in readers.values() if max(ops, default=0) < part.boundary]
    return frozenset(o for ops in early for o in ops)


def _value(capture: Capture, output: object) -> int | None:
    return capture.value_of.get(output) if isinstance(output, fx.Node) else None
