"""Estimated cost of an op from its arithmetic and its bytes, where it is not measured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from checkmate.torch.capture import OpCost
from checkmate.torch.compat import OpOverload
from checkmate.torch.sizes import concrete, leaves, storage_bytes, storage_key

_log = logging.getLogger("checkmate.torch")
_LAUNCH_NS = 2000
_FLOP_PER_NS = 80.0
_BYTES_PER_NS = 10.0


def estimated(nodes: Sequence[fx.Node]) -> list[OpCost]:
    """Costs of nodes without running any; their workspace counts as zero."""
    return [OpCost(estimate_ns(n), 0) for n in nodes]


def estimate_ns(node: fx.Node) -> int:
    """Nanoseconds of an op on an ordinary processor: right in proportion, not in size."""
    given = {storage_key(t): storage_bytes(t) for n in node.all_input_nodes for t in leaves(n.meta.get("val"))}
    made = {storage_key(t): storage_bytes(t) for t in leaves(node.meta.get("val"))}
    if made and made.keys() <= given.keys() and not _mutable(node):
        return 100  # a view
    moved = sum(given.values()) + sum(made.values())
    return int(_LAUNCH_NS + _flop(node) / _FLOP_PER_NS + moved / _BYTES_PER_NS)


def _mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _flop(node: fx.Node) -> int:
    formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _shaped(n.meta.get("val")))
    try:
        return int(formula(*args, **kwargs, out_val=_shaped(node.meta.get("val"))))
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        _log.warning("no arithmetic known for %s: %s", node.target, error)
        return 0


def _shaped(value: Any) -> Any:
    """Traced tensors with their sizes as integers: a formula that compared symbols would leave guards behind."""

    def known(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty([concrete(n) for n in leaf.shape], dtype=leaf.dtype, device="meta")
        return concrete(leaf) if isinstance(leaf, torch.SymInt) else leaf

    return pytree.tree_map(known, value)
