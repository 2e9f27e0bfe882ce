"""Roofline estimate of an op's time from its arithmetic and its memory traffic, where it is not measured."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from checkmate.cost.device import Device, load_device
from checkmate.cost.roofline import roofline_ns
from checkmate.cost.store import OpCost
from checkmate.torch.graph.op_properties import PIECES, Pieces, makes_views
from checkmate.torch.graph.storages import concrete, leaves, storage_bytes, storage_key
from checkmate.torch.measure.estimated_workspace import estimated_workspace_bytes

_log = logging.getLogger("checkmate.torch")
_VIEW_NS = 100
"""Cost of a view: it runs no kernel, but the dispatcher is called all the same."""
_CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)


def estimated_costs(nodes: Sequence[fx.Node]) -> list[OpCost]:
    """Estimated costs of nodes on the ``"CPU"`` device profile, without running any; their workspace is an upper estimate."""
    return [OpCost(estimate_ns(n), estimated_workspace_bytes(n)) for n in nodes]


def estimate_ns(node: fx.Node, device: Device | None = None) -> int:
    """Lower bound on the nanoseconds of an op: ratios between ops are useful, absolute times are not.

    Args:
        node: The op.
        device: The device profile; that of a generic CPU by default.
    """
    device = load_device("CPU") if device is None else device
    if PIECES in node.meta:
        return _pieces_ns(node, device)
    if makes_views(node):
        return _VIEW_NS
    read = (t for n in node.all_input_nodes for t in leaves(n.meta.get("val")))
    moved = _moved_bytes(read) + _moved_bytes(leaves(node.meta.get("val")))
    return roofline_ns(device, flop=_flop(node), dtype=_dtype(node), moved_bytes=moved)


def _pieces_ns(node: fx.Node, device: Device) -> int:
    """Time of the ops of all pieces; at the end sums in a wider type are cast to that of the results."""
    pieces: Pieces = node.meta[PIECES]
    of_piece = {id(graph): sum(estimate_ns(op, device) for op in _calls(graph)) for graph in pieces.graphs}
    total = sum(of_piece[id(graph)] for graph in pieces.graphs)
    terms = [value.meta["val"] for value in pieces.graphs[0].output_node().args[0]]  # type: ignore[union-attr]
    results = [made for made, is_sum in zip(leaves(node.meta["val"]), pieces.sums, strict=True) if is_sum]
    for term, made in zip(terms, results, strict=True):
        if term.dtype is not made.dtype:
            total += roofline_ns(device, flop=0, dtype="float32", moved_bytes=_moved_bytes([term, made]))
    return total


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]


def _moved_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that are read or written: those of a slice, and of what is expanded or given twice no more than there are."""
    elements: dict[int, int] = {}
    there: dict[int, int] = {}
    for t in tensors:
        key = storage_key(t)
        there[key] = storage_bytes(t)
        elements[key] = elements.get(key, 0) + concrete(t.numel()) * t.element_size()
    return sum(min(size, elements[key]) for key, size in there.items())


def _dtype(node: fx.Node) -> str:
    """The type in which an op computes, by its name in device profiles: a torch type, or ``"tf32"``."""
    read = [t.dtype for n in node.all_input_nodes for t in leaves(n.meta.get("val")) if t.dtype.is_floating_point]
    dtype = str(read[0] if read else torch.float32).removeprefix("torch.")
    if dtype != "float32":
        return dtype
    convolves = getattr(node.target, "overloadpacket", None) in _CONVOLUTIONS
    tf32 = torch.backends.cudnn.allow_tf32 if convolves else torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 else dtype


def _flop(node: fx.Node) -> int:
    formula = flop_registry.get(_functional(getattr(node.target, "overloadpacket", None)))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _shaped(n.meta.get("val")))
    try:
        return int(formula(*args, **kwargs, out_val=_shaped(node.meta.get("val"))))
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        _log.warning("the floating-point operations of %s could not be counted and are taken as 0: %s", node.target, error)
        return 0


def _functional(packet: Any) -> Any:
    """The op that an op in place computes, such as ``addmm`` for ``addmm_``: torch has formulas for that one."""
    name = getattr(packet, "__name__", "")
    return getattr(torch.ops.aten, name[:-1], packet) if name.endswith("_") else packet


def _shaped(value: Any) -> Any:
    """Meta tensors of traced shapes with integer sizes: a formula that compares symbolic sizes would install guards."""

    def known(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty([concrete(n) for n in leaf.shape], dtype=leaf.dtype, device="meta")
        return concrete(leaf) if isinstance(leaf, torch.SymInt) else leaf

    return pytree.tree_map(known, value)
