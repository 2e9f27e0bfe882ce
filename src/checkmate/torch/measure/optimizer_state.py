"""Memory of an optimizer: its state, and the temporary tensors of its step."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import optim

from checkmate.torch.graph.optimizer_ops import initial_state, temporary_count, updates_parameters_separately
from checkmate.torch.graph.storages import leaves, unique_bytes

_log = logging.getLogger("checkmate.torch")


def state_bytes(optimizer: optim.Optimizer, alignment: int = 1) -> int:
    """Bytes of an optimizer's state, including state that its first step has yet to allocate.

    Exact for torch's optimizers that update each parameter independently of the others. For other optimizers state that does
    not exist yet is unknown: it counts as zero, with a warning in the log. Tensors are rounded up to the allocator's alignment.
    """
    missing = missing_state_bytes(optimizer, alignment)
    if missing is None:
        _log.warning(
            "the state that %s allocates at its first step is unknown and not reserved: pass its size as `reserve`, or run one "
            "step before compiling",
            type(optimizer).__name__,
        )
    return unique_bytes(t for state in optimizer.state.values() for t in leaves(state)) + (missing or 0)


def state_is_known(optimizer: optim.Optimizer) -> bool:
    """Whether `state_bytes` is complete: the state exists already, or the optimizer is one whose state is known."""
    return bool(optimizer.state) or updates_parameters_separately(optimizer)


def step_temporary_bytes(optimizer: optim.Optimizer, kind: str) -> int:
    """Bytes of temporary tensors during ``optimizer.step()`` on a type of device.

    On ``"cuda"`` torch's default ``foreach`` implementation has temporaries of all parameters at once; on ``"cpu"`` the step
    loops over parameters and has those of one.
    """
    sizes = [
        (temporary_count(optimizer, group) or 0) * p.numel() * p.element_size()
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad
    ]
    return sum(sizes) if kind == "cuda" else max(sizes, default=0)


def missing_state_bytes(optimizer: optim.Optimizer, alignment: int = 1) -> int | None:
    """Bytes of the state that an optimizer has yet to allocate; None where that is not known before its first step."""
    missing = [
        (group, p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad and not optimizer.state.get(p)
    ]
    if not missing:
        return 0
    if not updates_parameters_separately(optimizer):
        return None
    return sum(_first_state_bytes(optimizer, group, p, alignment) for group, p in missing)


def _first_state_bytes(optimizer: optim.Optimizer, group: dict[str, Any], parameter: torch.Tensor, alignment: int) -> int:
    """State that the first step allocates for a parameter, on its device: step counters may be in host memory."""
    state = initial_state(optimizer, group, torch.empty_like(parameter, device="meta"))
    tensors = [t for t in state.values() if isinstance(t, torch.Tensor)]
    on_device = [t for t in tensors if t.is_meta or alignment == 1]
    return sum(-(-t.nbytes // alignment) * alignment for t in on_device)
