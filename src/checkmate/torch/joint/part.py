"""A captured joint graph as one of a step that runs several graphs."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from torch import fx

from checkmate.core.graph import Graph
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch.graph.op_properties import used_inputs
from checkmate.torch.graph.storages import leaves, storage_key
from checkmate.torch.joint.capture import Capture


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedGraph:
    """A captured graph with a boundary, and how its values relate to its arguments and results."""

    graph: Graph
    readers: tuple[tuple[int, ...], ...]  # ops that read each input
    views: Mapping[int, int]  # values that are views of an input, with the input
    returned: tuple[int | None, ...]  # value of each result of the forward; None for a number, and for an input that is handed on
    tangents: tuple[int | None, ...]  # value of each gradient that the backward is given; None where the graph does not read it
    gradients: tuple[int | None, ...]  # value of each result of the backward, the gradient of an input; None where there is none

    @property
    def boundary(self) -> int:
        """The op between forward and backward."""
        assert self.graph.boundary is not None
        return self.graph.boundary


def captured_graph(capture: Capture) -> CapturedGraph:
    """The captured graph with its values by argument and result, in AOTAutograd's order.

    Args:
        capture: A captured joint graph with a boundary.
    """
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
    return CapturedGraph(
        graph=graph,
        readers=tuple(tuple(readers[n]) for n in inputs),
        views=views,
        returned=tuple(_value(capture, out) for out in capture.forward_outputs),
        tangents=tuple(capture.value_of.get(n) for n in placeholders if is_tangent(n)),
        gradients=tuple(_value(capture, out) for out in capture.backward_outputs),
    )


def reads_of_overwritable(captured: CapturedGraph, overwritable: Set[int]) -> frozenset[int]:
    """Ops of a forward that read inputs which the backward of the plain step does not read.

    Until a step has shown that the caller leaves these inputs as they are, no such op may be computed again in the backward.

    Args:
        captured: The graph.
        overwritable: Inputs that the caller may overwrite between forward and backward.
    """
    readers = {k: set(captured.readers[k]) for k in overwritable}
    for o, op in enumerate(captured.graph.ops):
        for k in {captured.views[v] for v in op.inputs if v in captured.views} & overwritable:
            readers[k].add(o)
    early = [ops for ops in readers.values() if max(ops, default=0) < captured.boundary]
    return frozenset(o for ops in early for o in ops)


def _value(capture: Capture, output: object) -> int | None:
    return capture.value_of.get(output) if isinstance(output, fx.Node) else None
