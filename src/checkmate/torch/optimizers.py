"""Memory that an optimizer will allocate at its first step."""

from __future__ import annotations

import logging

import torch

from checkmate.torch.sizes import leaves, unique_bytes

_log = logging.getLogger("checkmate.torch")
_STEP_BYTES = 4  # a float32 counter for every parameter


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimizer's state, that of the first step included where it is yet to be made.

    Exact for SGD, Adam and AdamW; for others only what is there already counts, which is logged.
    """
    there = unique_bytes(t for state in optimizer.state.values() for t in leaves(state))
    coming = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and not optimizer.state.get(parameter):
                coming += _coming_bytes(optimizer, group, parameter)
    return there + coming


def _coming_bytes(optimizer: torch.optim.Optimizer, group: dict[str, object], parameter: torch.Tensor) -> int:
    size = parameter.numel() * parameter.element_size()
    kind = type(optimizer)
    if kind is torch.optim.SGD:
        return size if group["momentum"] else 0
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return size * (3 if group["amsgrad"] else 2) + _STEP_BYTES
    _log.warning(
        "the state that %s allocates at its first step is not known and not reserved: give `reserve`, or compile after one step",
        kind.__name__,
    )
    return 0
