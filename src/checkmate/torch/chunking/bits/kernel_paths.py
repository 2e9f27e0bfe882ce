"""Whether an elementwise op computes each element of a piece by the function that it uses when whole.

Kernels of the CPU compute most elements in vectors, and the rest at the end of a contiguous run one by one: by another
function where the op is transcendental. Which elements are the rest depends on sizes and strides. The two functions differ in
the last bit, and for few numbers (``sigmoid``: one in thousands), so that equal results on random data prove nothing. A
*witness* is a number for which they differ: an op whose operands all have that value shows by which function each element was
computed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch._compat.sharding import Layout
from checkmate.torch.chunking.rules.pieces import Cut

_TRIED_AT_ONCE, _TRIALS = 1 << 12, 32
"""Numbers among which a witness is looked for, which take memory beside a step, and how often at each scale."""

_SCALES = (1.0, 0.1, 8.0)


def same_path(op: OpOverload, whole: Sequence[Any], piece: Sequence[Any], places: Sequence[Cut]) -> bool:
    """Whether an op computes each element of some pieces by the function that it uses when whole; True if it is not elementwise.

    Args:
        op: The op.
        whole: Its arguments and keyword arguments, with traced tensors.
        piece: The same for a piece.
        places: Where the pieces that have such arguments are in the result.
    """
    if torch.Tag.pointwise not in op.tags:
        return True
    flat, structure = pytree.tree_flatten(whole)
    witness = _witness(op, tuple(value.dtype if isinstance(value, torch.Tensor) else value for value in flat), structure)
    if witness is None:
        return True
    expected, got = _called(op, whole, witness), _called(op, piece, witness)
    return all(torch.equal(_slice(expected, place), got) for place in places)


def flat_storage(value: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as one dimension; elements of an expanded tensor, which share memory, cannot be written."""
    return value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)


@functools.lru_cache(maxsize=1 << 10)
def _witness(op: OpOverload, given: tuple[Any, ...], structure: pytree.TreeSpec) -> tuple[Any, ...] | None:
    """A number for each tensor among the arguments for which the two functions of an op differ; None if none is found.

    Args:
        op: The op.
        given: The flat arguments, with a type for each tensor.
        structure: Their structure.
    """
    types = [value for value in given if isinstance(value, torch.dtype)]
    for scale in [scale for scale in _SCALES for _ in range(_TRIALS)]:
        numbers = [_numbers(dtype, scale) for dtype in types]
        in_vectors = _with(op, given, structure, numbers)
        one_by_one = _with(op, given, structure, [torch.stack([n, n], 1)[:, 0] for n in numbers])
        if not isinstance(in_vectors, torch.Tensor) or not in_vectors.is_floating_point():
            return None
        differ = (in_vectors != one_by_one) & in_vectors.isfinite() & one_by_one.isfinite()
        if differ.any():
            place = int(differ.nonzero()[0])
            return tuple(n[place].item() for n in numbers)
    return None


def _numbers(dtype: torch.dtype, scale: float) -> torch.Tensor:
    made = torch.randn(_TRIED_AT_ONCE, dtype=torch.float64) * scale
    return made.to(dtype) if dtype.is_floating_point else (made > 0).to(dtype)


def _called(op: OpOverload, arguments: Sequence[Any], witness: Sequence[Any]) -> torch.Tensor:
    values = iter(witness)
    return _call(op, pytree.tree_map(lambda a: _filled(a, next(values)) if isinstance(a, torch.Tensor) else a, arguments))


def _filled(traced: torch.Tensor, value: Any) -> torch.Tensor:
    made = Layout.of(traced).empty()
    flat_storage(made).fill_(value)
    return made


def _with(op: OpOverload, given: Sequence[Any], structure: pytree.TreeSpec, numbers: Sequence[torch.Tensor]) -> Any:
    left = iter(numbers)
    flat = [next(left) if isinstance(value, torch.dtype) else value for value in given]
    return _call(op, pytree.tree_unflatten(flat, structure))


def _call(op: OpOverload, arguments: Any) -> Any:
    args, kwargs = arguments
    return op(*args, **kwargs)


def _slice(value: torch.Tensor, place: Cut) -> torch.Tensor:
    for dim, start, length in place:
        value = value.narrow(dim, start, length)
    return value
