"""Channels last as Inductor would choose it, made explicit in the joint graph before planning.

Inductor's own layout optimisation runs after the plan, on forward and backward separately. The layout of a stored tensor would
then depend on the plan: sums would run in another order, and results of two plans would differ in their last bits. Converted
copies of all weights would also be saved from forward to backward (ResNet-50, 16 images of 64 x 64: 159 MiB measured where 115
were planned). With explicit copies in the joint graph, as from a user's ``memory_format=torch.channels_last``, layouts are
properties of the graph and copies are planned like all other ops. Inductor's pass is then switched off
(docs/decisions/0010).
"""

from __future__ import annotations

import logging
import operator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import fx

from checkmate.torch._compat.dispatch import OpOverload, detect_fake_mode
from checkmate.torch.graph.storages import leaves, storage_bytes
from checkmate.torch.graph.traced import copy_graph, retraced

_log = logging.getLogger("checkmate.torch")

_CONVOLUTIONS: dict[Any, tuple[int, ...]] = {
    torch.ops.aten.convolution.default: (0,),
    torch.ops.aten.convolution_backward.default: (0, 1),
}
"""Convolution ops, with the positions of activations among their arguments."""

_CLONE = torch.ops.aten.clone.default
# Ops whose result depends on the strides of their input, not only on its elements.
_STRIDE_DEPENDENT = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten.view.dtype,
    torch.ops.aten.view_as_complex.default,
    torch.ops.aten.view_as_real.default,
)


def with_channels_last(graph: fx.Graph) -> fx.Graph:
    """Make convolutions read their activations in channels-last layout, and propagate the resulting strides.

    Weights keep their layout, as do all tensors whose strides are observable: outputs, gradients, and inputs of ops that
    depend on strides or are not PyTorch's own.
    """
    mode = detect_fake_mode(leaves([n.meta.get("val") for n in graph.nodes]))
    if mode is None or not _activations_outweigh_weights(graph):
        return graph
    copy = copy_graph(graph)
    writer = _LayoutPropagation(copy, mode)
    try:
        for node in list(copy.nodes):
            writer.visit(node)
    except (RuntimeError, ValueError) as failed:
        _log.debug("convolutions keep the layout that was traced: %s", failed)
        return graph
    return copy


class _LayoutPropagation:
    """Walks a graph in order and traces again each op whose inputs changed their strides.

    Strides are not computed by rules of ours: the op itself runs on fake tensors, with the same result as in the real run.
    Layouts therefore spread as for a user who converted the input (pointwise ops keep channels last, a matrix product does not).
    Tracing again also keeps aliasing right: the view of a converted tensor is a view of the copy's storage. If metadata were
    edited instead, views would point to storages that are never allocated, and the planner would count them wrongly.
    """

    def __init__(self, graph: fx.Graph, mode: AbstractContextManager[Any]) -> None:
        self.graph, self.mode = graph, mode
        self.traced: dict[fx.Node, Any] = {}  # node whose value changed -> its value in the original trace
        self.copies: dict[tuple[fx.Node, torch.memory_format], fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        """Convert the inputs of a node if needed, and trace it again if they changed."""
        if node.op not in ("call_function", "output"):
            return
        before = list(node.all_input_nodes)
        for position in _CONVOLUTIONS.get(node.target, ()):
            self._read(node, cast("fx.Node", node.args[position]), torch.channels_last)
        if _observes_strides(node):
            self._read_as_traced(node)
        elif before != node.all_input_nodes or any(n in self.traced for n in before):
            self._make(node)

    def _make(self, node: fx.Node) -> None:
        try:
            value = retraced(node, self.mode)
        except (RuntimeError, ValueError):  # a view that is impossible with the new strides
            for source in [n for n in node.all_input_nodes if n in self.traced]:
                self._read(node, source, torch.contiguous_format)
            value = retraced(node, self.mode)
        if _is_view(node) or _strides(value) != _strides(node.meta.get("val")):
            self.traced[node] = node.meta.get("val")
            node.meta["val"] = value

    def _read_as_traced(self, reader: fx.Node) -> None:
        """Give a node that observes strides its inputs in the layout of the original trace."""
        for source in [n for n in reader.all_input_nodes if n in self.traced]:
            before = self.traced[source]
            if not isinstance(before, torch.Tensor) or before.stride() == source.meta["val"].stride():
                continue
            if not before.is_contiguous():
                raise ValueError(f"{source.name} was traced with strides that cannot be restored: {before.stride()}")
            self._read(reader, source, torch.contiguous_format)

    def _read(self, reader: fx.Node, source: fx.Node, layout: torch.memory_format) -> None:
        """Let a node read a converted copy of an input, one copy per input and layout.

        For an output the copy stands directly after its source, which has the right provenance; otherwise directly before its
        first reader: the trace order then holds it as short as possible.
        """
        value = source.meta["val"]
        if (layout is torch.channels_last and value.ndim != 4) or value.is_contiguous(memory_format=layout):
            return
        if (source, layout) not in self.copies:
            seen = reader.op == "output"
            with self.graph.inserting_after(source) if seen else self.graph.inserting_before(reader):
                copy = self.graph.call_function(_CLONE, (source,), {"memory_format": layout})
            copy.meta = {**(source if seen else reader).meta, "val": retraced(copy, self.mode)}
            self.copies[source, layout] = copy
        reader.replace_input_with(source, self.copies[source, layout])


def _activations_outweigh_weights(graph: fx.Graph) -> bool:
    """Whether converting pays: oneDNN then copies no activations, but each weight at every use (docs/decisions/0010).

    Weights of 1 x 1 lie in both layouts at once, and less than 16 KiB are copied in the time of a call. The rule reads only the
    graph, therefore every rank and every process decides alike.
    """
    balance = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution.default):
        given, weight, made = (max(1 << 14, storage_bytes(n.meta["val"])) for n in (*node.args[:2], node))
        balance += (given + made - weight) * (node.args[1].meta["val"].shape[2:].numel() > 1)
    return balance > 0


def _strides(value: Any) -> list[tuple[int, ...]]:
    return [t.stride() for t in leaves(value)]


def _observes_strides(node: fx.Node) -> bool:
    """Whether a node makes the strides of its inputs observable: an output, or an op whose result may depend on strides."""
    target = node.target
    if target is operator.getitem:
        return False
    if not isinstance(target, OpOverload) or target.namespace not in ("aten", "prims", "inductor_prims"):
        return True
    return target in _STRIDE_DEPENDENT or target._schema.is_mutable


def _is_view(node: fx.Node) -> bool:
    return not isinstance(node.target, OpOverload) or any(r.alias_info is not None for r in node.target._schema.returns)
