"""Channels last where Inductor would choose it, written into the graph that is planned.

Inductor lays out what convolutions read and make with channels last. It decides so for forward and backward by themselves,
after the plan: what is stored has then another layout in every plan, sums run in another order, and the weights of
all convolutions are held as copies from forward to backward. Written into the joint graph, as a user's
``memory_format=torch.channels_last`` would have been, the copies are ops like all others, and layouts are those of the graph.
"""

from __future__ import annotations

import logging
import operator
from typing import Any, cast

import torch
from torch import fx

from checkmate.torch._compat.dispatch import OpOverload, detect_fake_mode
from checkmate.torch.graph.copy import copy_graph
from checkmate.torch.graph.storages import leaves, storage_bytes, storage_key, unique_bytes

_log = logging.getLogger("checkmate.torch")

_CONVOLUTIONS: dict[Any, tuple[int, ...]] = {
    torch.ops.aten.convolution.default: (0,),
    torch.ops.aten.convolution_backward.default: (0, 1),
}
"""Positions of the activations among their arguments."""
_CLONE = torch.ops.aten.clone.default
_STRIDE_DEPENDENT = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten.view.dtype,
    torch.ops.aten.view_as_complex.default,
    torch.ops.aten.view_as_real.default,
)


class _StridesError(ValueError):
    """What somebody sees has strides that no copy of ours has."""


def with_channels_last(graph: fx.Graph) -> fx.Graph:
    """A joint graph whose convolutions read their activations with channels last; what follows has the layout that comes of it.

    Weights stay as they are. What a caller sees, outputs and gradients, keeps the layout that was traced; so does what
    is read by an op that depends on strides, or that is not one of PyTorch's own.

    Args:
        graph: The graph, of fixed sizes; it is not changed.

    Returns:
        Another graph; or the same if convolutions have more bytes of weights, which are copied at every use, than they make,
        or if some output cannot keep its strides.
    """
    mode = detect_fake_mode(leaves([n.meta.get("val") for n in graph.nodes]))
    if mode is None or not _activations_outweigh_weights(graph):
        return graph
    copy = copy_graph(graph)
    writer = _LayoutPropagation(copy)
    try:
        with mode, torch.no_grad():
            for node in list(copy.nodes):
                writer.visit(node)
    except (RuntimeError, ValueError) as failed:
        _log.debug("convolutions keep the layout that was traced: %s", failed)
        return graph
    return copy


class _LayoutPropagation:
    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.traced: dict[fx.Node, Any] = {}  # what has another value now -> the one before
        self.copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Lay out what a node reads, and take note of what it then makes."""
        if node.op not in ("call_function", "output"):
            return
        before = list(node.all_input_nodes)
        activations = _CONVOLUTIONS.get(node.target, ())
        for position in activations:
            self._read(node, cast("fx.Node", node.args[position]), torch.channels_last)
        if _observes_strides(node):
            self._read_as_traced(node)
        elif before != node.all_input_nodes or any(n in self.traced for n in before):
            self._make(node)

    def _make(self, node: fx.Node) -> None:
        try:
            value = _run(node)
        except (RuntimeError, ValueError):  # a view of what lies otherwise
            for source in [n for n in node.all_input_nodes if n in self.traced]:
                self._read(node, source, torch.contiguous_format)
            value = _run(node)
        if _is_view(node) or _strides(value) != _strides(node.meta.get("val")):
            self.traced[node] = node.meta.get("val")
            node.meta["val"] = value

    def _read_as_traced(self, reader: fx.Node) -> None:
        for source in [n for n in reader.all_input_nodes if n in self.traced]:
            before = self.traced[source]
            if not isinstance(before, torch.Tensor) or before.stride() == source.meta["val"].stride():
                continue
            if not before.is_contiguous():
                raise _StridesError(f"{source.name} was traced with strides {before.stride()}")
            self._read(reader, source, torch.contiguous_format)

    def _read(self, reader: fx.Node, source: fx.Node, layout: torch.memory_format) -> None:
        value = source.meta["val"]
        if (layout is torch.channels_last and value.ndim != 4) or value.is_contiguous(memory_format=layout):
            return
        if (source, layout) not in self.copies:
            seen = reader.op == "output"
            with self.graph.inserting_after(source) if seen else self.graph.inserting_before(reader):
                copy = self.graph.call_function(_CLONE, (source,), {"memory_format": layout})
            copy.meta = {**(source if seen else reader).meta, "val": _run(copy)}
            self.copies[source, layout] = copy
        reader.replace_input_with(source, self.copies[source, layout])


def _activations_outweigh_weights(graph: fx.Graph) -> bool:
    made, weights = 0, dict[Any, int]()
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        made += unique_bytes(leaves(node.meta["val"]))
        weights |= {storage_key(t): storage_bytes(t) for t in leaves(node.args[1].meta["val"])}
    return made > sum(weights.values())


def _run(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [t.stride() for t in leaves(value)]


def _observes_strides(node: fx.Node) -> bool:
    """Whether somebody sees the strides of what a node reads: a caller, or code that is not PyTorch's."""
    target = node.target
    if target is operator.getitem:
        return False
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims", "inductor_prims"):
        return True
    return target in _STRIDE_DEPENDENT or target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    return not isinstance(node.target, OpOverload) or any(r.alias_info is not None for r in node.target._schema.returns)
