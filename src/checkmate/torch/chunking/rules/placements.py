"""How the tensors of an op are cut when the op runs piece by piece: along an axis, not at all, or into terms of a sum.

An op that adds to a tensor in an order is no such sum: each piece goes on with the tensor of the previous one.

Chunking is sharding in time. The terms are those of `torch.distributed.tensor`: its ``Shard``, ``Replicate`` and ``Partial``
have the same meaning for tensors on several devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

from checkmate.torch._compat.dispatch import OpOverload


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides, type and device of a tensor, on which alone a rule may depend."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a traced tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """A new tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Split:
    """A tensor is cut along dimensions: each piece of an op has one slice of it."""

    dims: tuple[int, ...]  # one, or two neighbouring ones that are cut as if they were flattened, such as (batch, tokens)

    def length(self, shape: Sequence[int]) -> int:
        """Elements along the axis that is cut."""
        return math.prod(shape[d] for d in self.dims)


WHOLE: Final = "whole"
"""Every piece reads all of the tensor, or returns all of it."""

SUM: Final = "sum"
"""Every piece returns a term; the tensor is the sum of the terms."""

CARRY: Final = "carry"
"""Every piece adds to the tensor that the previous piece returned, the first piece to the op's first argument.

The additions may keep the order of the whole op, as those of ``index_add`` do on a CPU: then the bits are the same.
"""

TOTALS: Final = (SUM, CARRY)
"""Placements of tensors to which every piece adds."""

Placement: TypeAlias = Split | Literal["whole", "sum", "carry"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One way to run an op piece by piece."""

    outputs: tuple[Placement | None, ...]  # None for an output that is not a tensor
    inputs: tuple[Placement, ...]  # of the tensors among the arguments, in the order of `torch.utils._pytree`; not `TOTALS`

    @property
    def sums(self) -> bool:
        """Whether an output is a sum over pieces: its order of additions differs from the order of the whole op."""
        return SUM in self.outputs


Slices: TypeAlias = tuple[tuple[int, int, int], ...]
"""One piece of a tensor: (dimension, first index, number of indices) of each dimension that is cut; none for a whole tensor."""


@functools.lru_cache(maxsize=4096)  # layers repeat
def cuts(shape: tuple[int, ...], split: Split, count: int) -> list[Slices] | None:
    """The pieces of a tensor along an axis, each of ``ceil(length / count)`` elements; there may be fewer than ``count``.

    The elements of the axis in each piece depend only on its length and on ``count``. Tensors with axes of one length are thus
    cut alike, whatever their dimensions: the piece with rows 2 and 3 of (batch, tokens) has the same tokens as the piece of the
    flattened dimension. None if a piece of two dimensions would be neither whole rows of the first nor within one row.

    Examples:
        >>> cuts((7, 3), Split((0,)), 3)
        [((0, 0, 3),), ((0, 3, 3),), ((0, 6, 1),)]
        >>> cuts((2, 6), Split((0, 1)), 4)
        [((0, 0, 1), (1, 0, 3)), ((0, 0, 1), (1, 3, 3)), ((0, 1, 1), (1, 0, 3)), ((0, 1, 1), (1, 3, 3))]
    """
    length = split.length(shape)
    size = -(-length // count)
    first, second = split.dims[0], split.dims[-1]
    row = shape[second]
    found: list[Slices] = []
    for start in range(0, length, size or 1):
        n = min(size, length - start)
        if first == second:
            piece: Slices = ((first, start, n),)
        elif size % row == 0:
            piece = ((first, start // row, n // row),)
        elif row % size == 0:
            piece = ((first, start // row, 1), (second, start % row, n))
        else:
            return None
        found.append(tuple(each for each in piece if each[2] < shape[each[0]]))
    return found


def sliced(tensor: torch.Tensor, slices: Slices) -> torch.Tensor:
    """A slice of a tensor."""
    for dim, start, length in slices:
        tensor = tensor.narrow(dim, start, length)
    return tensor


def arguments_of_piece(
    op: OpOverload, rule: Rule, args: tuple[Any, ...], shapes: Sequence[Sequence[int] | None]
) -> tuple[Any, ...]:
    """Arguments of an op for one piece, given tensors that are cut: arguments that are sizes become the sizes of the piece.

    ``shapes`` has the shape of each output of the piece, None for other objects. A view may fail for the arguments, because a
    slice of a contiguous tensor need not be contiguous: call it with traced tensors first, and leave the op whole if it raises.
    """
    if not any(isinstance(placement, Split) for placement in rule.outputs):
        return args
    changed = list(args)
    for i, argument in enumerate(op._schema.arguments[: len(args)]):
        first = shapes[0]
        if argument.name in _SIZES_OF_RESULT and isinstance(args[i], (list, tuple)) and first is not None:
            changed[i] = list(first)
        elif argument.name == "N" and first is not None:  # the examples of a group norm
            changed[i] = first[0]
        elif argument.name == "bias_sizes" and args[i] is not None and shapes[2] is not None:
            changed[i] = list(shapes[2])
        elif argument.name == "groups" and args[i] > 1 and rule.inputs[0] == Split((1,)):
            # Channels of several groups are cut only if each channel is a group.
            changed[i] = next(shape[d] for shape, d in zip(shapes, (1, 0, 0), strict=False) if shape is not None)
    return tuple(changed)


_SIZES_OF_RESULT = ("size", "shape", "input_size", "input_sizes")
"""Arguments with the shape of the first output, such as in views and in the backward of a slice."""
