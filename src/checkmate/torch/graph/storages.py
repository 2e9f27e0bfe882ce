"""Storages of traced tensors, and their exact bytes.

A tensor is a view of a storage, and memory belongs to storages: two tensors with one storage are allocated once. A fake tensor
has a storage without data, as large as the real one: traced graphs can therefore be counted exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.utils import _pytree as pytree

from checkmate.core.errors import GraphError
from checkmate.core.graph import Value
from checkmate.torch._compat.symbolic import bound_by_hint, upper_bound, value_at_upper_bounds

CUDA_ALIGNMENT_BYTES = 512
"""Granularity of the CUDA caching allocator: ``kMinBlockSize`` in PyTorch's ``c10/core/AllocatorConfig.h``."""

SCALAR_TANGENT_BYTES = 16
"""A tangent of at most this many bytes counts as the tangent of a scalar: one element of complex128, the widest type.

The holder of this tangent differs: ``loss.backward()`` creates the gradient of the loss and holds it until the
backward returns, while the gradient of any other output is freed after its last use in the backward.
"""


def is_scalar(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a scalar by its bytes, before an allocator rounds them."""
    return _most(tensor.untyped_storage().nbytes()) <= SCALAR_TANGENT_BYTES


def is_scalar_tangent(tangent: Value) -> bool:
    """Whether a tangent in a graph belongs to a scalar: it lives to the end, and is no larger than a block of the allocator."""
    return tangent.kept and tangent.size_bytes <= CUDA_ALIGNMENT_BYTES


def leaves(value: object) -> list[torch.Tensor]:
    """Tensors in a nested value for example the result of an op, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage; valid while the tensor is alive, since addresses are reused."""
    return tensor.untyped_storage()._cdata


def storage_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the allocator hands out for a tensor's storage; symbolic sizes count with their largest values."""
    return _aligned(tensor, _most(tensor.untyped_storage().nbytes()))


def current_bytes(tensor: torch.Tensor) -> int:
    """Bytes that the allocator hands out for a tensor's storage at its current size, for symbolic sizes."""
    size = tensor.untyped_storage().nbytes()
    return _aligned(tensor, size if isinstance(size, int) else int(size.node.hint))


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors have the same shape and the same bytes: unlike in `torch.equal`, NaN equals NaN."""
    return first.shape == second.shape and torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (first, second)))


def strided_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors that have a tensor's storages: itself, or the indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in _BY_ROWS:
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return (tensor.ccol_indices(), tensor.row_indices(), tensor.values()) if tensor.layout in _BY_COLUMNS else ()


_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def unique_bytes(tensors: Iterable[torch.Tensor], size_of: Callable[[torch.Tensor], int] = storage_bytes) -> int:
    """Total bytes of the storages of tensors; a shared storage is counted once."""
    return sum(storage_sizes(tensors, size_of))


def storage_sizes(tensors: Iterable[torch.Tensor], size_of: Callable[[torch.Tensor], int] = storage_bytes) -> tuple[int, ...]:
    """Bytes of each storage of tensors, in the order of the tensors."""
    return tuple({storage_key(part): size_of(part) for t in tensors for part in strided_parts(t)}.values())


def concrete(number: int | torch.SymInt) -> int:
    """A traced size as an integer, with every symbol at its upper bound, without a guard on its value."""
    return number if isinstance(number, int) else _known(number, value_at_upper_bounds)


def _most(number: int | torch.SymInt) -> int:
    # The largest value need not be at the upper bounds: the largest 1024 - n is at the lower bound of n.
    return number if isinstance(number, int) else _known(number, upper_bound)


def _known(number: torch.SymInt, value_of: Callable[[torch.SymInt], float | None]) -> int:
    if number.node.hint is None:
        raise GraphError(
            f"the size {number} depends on the data: how much memory the step takes cannot be known before it runs",
            hint="move the op whose output shape depends on the data (nonzero, unique, boolean indexing) out of the compiled "
            "function, or replace it by one of fixed shape, such as torch.where",
        )
    value = value_of(number)
    if value is None:  # an integer argument became a size, like n in x[:n]
        bound_by_hint(number)
        value = value_of(number)
    assert value is not None
    return int(value)


def _aligned(tensor: torch.Tensor, size: int) -> int:
    return -(-size // CUDA_ALIGNMENT_BYTES) * CUDA_ALIGNMENT_BYTES if tensor.device.type == "cuda" else size
