"""Tensors of traced graphs: their storages and exact bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import GraphError
from checkmate.torch._compat.symbolic import bound_by_hint, upper_bound, value_at_upper_bounds

CUDA_ALIGNMENT_BYTES = 512
"""Bytes to which the CUDA allocator rounds a request."""


def leaves(value: object) -> list[torch.Tensor]:
    """Tensors in what an op returns, in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage for as long as the tensor lives."""
    return tensor.untyped_storage()._cdata


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the allocator hands out for a tensor's storage, at most: sizes that are symbols count as their largest."""
    return _aligned(tensor, _most(tensor.untyped_storage().nbytes()))


def current_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage as it is while its graph is traced."""
    size = tensor.untyped_storage().nbytes()
    return _aligned(tensor, size if isinstance(size, int) else int(size.node.hint))


def unique_bytes(tensors: Iterable[torch.Tensor], size_of: Callable[[torch.Tensor], int] = storage_bytes) -> int:
    """Bytes of the storages of tensors, each storage once."""
    return sum({storage_key(t): size_of(t) for t in tensors}.values())


def concrete(number: int | torch.SymInt) -> int:
    """A traced size as an integer, without a guard: what it is when every symbol is at its largest.

    Raises:
        GraphError: The size depends on data.
    """
    return number if isinstance(number, int) else _known(number, value_at_upper_bounds)


def _most(number: int | torch.SymInt) -> int:
    # 1024 - n is not at its most where n is.
    return number if isinstance(number, int) else _known(number, upper_bound)


def _known(number: torch.SymInt, value_of: Callable[[torch.SymInt], float | None]) -> int:
    if number.node.hint is None:
        raise GraphError(
            f"the size {number} depends on the data: how much memory the step takes cannot be known before it runs",
            hint="keep data-dependent shapes out of the compiled function",
        )
    value = value_of(number)
    if value is None:  # a number that the user gave has become a size: x[:n]
        bound_by_hint(number)
        value = value_of(number)
    assert value is not None
    return int(value)


def _aligned(tensor: torch.Tensor, size: int) -> int:
    return -(-size // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES if tensor.device.type == "cuda" else size
