"""Memory of an optimizer: its state, and the temporaries of its own step."""

from __future__ import annotations

import logging

import torch
from torch import optim

from checkmate.torch.graph.optimizer_ops import temporary_count
from checkmate.torch.graph.storages import leaves, unique_bytes

_log = logging.getLogger("checkmate.torch")


_STEP_BYTES = 4  # a float32 counter for every parameter, in the host's memory if the parameter is not


def state_bytes(optimizer: optim.Optimizer, alignment: int = 1) -> int:
    """Bytes of an optimizer's state, that of the first step included where it is yet to be made.

    Exact for SGD, Adam and AdamW; for others only what is there already counts, which is logged.

    Args:
        optimizer: The optimizer.
        alignment: Bytes to which the allocator of the device rounds a request up.
    """
    there = unique_bytes(t for state in optimizer.state.values() for t in leaves(state))
    coming = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                coming += _uninitialised_state_bytes(optimizer, group, parameter, alignment)
    return there + coming


def state_is_known(optimizer: optim.Optimizer) -> bool:
    """Whether `state_bytes` counts all of an optimizer's state: it is there already, or of a kind that is known."""
    return bool(optimizer.state) or type(optimizer) in (optim.SGD, optim.Adam, optim.AdamW)


def step_temporary_bytes(optimizer: optim.Optimizer, kind: str) -> int:
    """Bytes that an optimizer's own step takes while it runs: for all parameters at once on CUDA, for one on a processor."""
    sizes = [
        (temporary_count(optimizer, group) or 0) * p.numel() * p.element_size()
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    ]
    return sum(sizes) if kind == "cuda" else max(sizes, default=0)


def _uninitialised_state_bytes(
    optimizer: optim.Optimizer, group: dict[str, object], parameter: torch.Tensor, alignment: int
) -> int:
    size = -(-parameter.numel() * parameter.element_size() // alignment) * alignment
    kind = type(optimizer)
    if kind is optim.SGD:
        return size if group["momentum"] else 0
    if kind in (optim.Adam, optim.AdamW):
        return size * (3 if group["amsgrad"] else 2) + (_STEP_BYTES if alignment == 1 else 0)
    _log.warning(
        "the state that %s allocates at its first step is not known and not reserved: give `reserve`, or compile after one step",
        kind.__name__,
    )
    return 0
