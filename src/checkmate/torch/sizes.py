"""Tensors of traced graphs: their storages and exact bytes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import GraphError

CUDA_GRANULE = 512
"""Bytes to which the CUDA allocator rounds a request."""


def leaves(value: object) -> list[torch.Tensor]:
    """Tensors in what an op returns, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage for as long as the tensor lives."""
    return tensor.untyped_storage()._cdata


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the allocator hands out for a tensor's storage."""
    size = concrete(tensor.untyped_storage().nbytes())
    return -(-size // CUDA_GRANULE) * CUDA_GRANULE if tensor.device.type == "cuda" else size


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors, each storage once."""
    return sum({storage_key(t): storage_bytes(t) for t in tensors}.values())


def concrete(number: int | torch.SymInt) -> int:
    """A traced size as an integer, without a guard.

    Raises:
        GraphError: The size depends on data.
    """
    if isinstance(number, int):
        return number
    hint = number.node.hint
    if hint is None:
        raise GraphError(
            f"the size {number} depends on the data: how much memory the step takes cannot be known before it runs",
            hint="keep data-dependent shapes out of the compiled function",
        )
    return int(hint)
