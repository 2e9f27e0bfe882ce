"""Rules that many ops share: of views, of what is computed element by element, of what works along some dimensions only.

Each function returns candidates: `checkmate.torch.chunking.rules.lookup` drops those that cut a dimension of one element or
dimensions of different lengths, and adds the cuts of two neighbouring dimensions at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

import torch

from checkmate.torch._compat.sharding import Layout
from checkmate.torch.chunking.rules.op_call import OpCall
from checkmate.torch.chunking.rules.placements import SUM, WHOLE, Placement, Rule, Split

aten = torch.ops.aten

OwnRules: TypeAlias = Callable[[OpCall], Iterator[Rule]]
"""From a call to candidates for its rules."""


def view(call: OpCall) -> Iterator[Rule]:
    """Views that keep the order of elements: dimensions with as many elements, and as many rows before them, carry over."""
    (_, source), *_ = call.inputs
    (result,) = call.outputs
    assert result is not None
    after = {axis: dims for dims, axis in _axes(result.shape)}
    for dims, axis in _axes(source.shape):
        if axis in after:
            yield call.rule(Split(after[axis]), self=Split(dims))


def _axes(shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
    """Dimensions, and pairs of neighbours, of more than one element, with (elements before them, elements along them)."""
    for low, high in ((d, d + n) for d in range(len(shape)) for n in (1, 2)):
        if high <= len(shape) and all(n > 1 for n in shape[low:high]):
            yield tuple(range(low, high)), (math.prod(shape[:low]), math.prod(shape[low:high]))


def expand(call: OpCall) -> Iterator[Rule]:
    """A dimension that is repeated needs the one element for every piece."""
    (_, source), *_ = call.inputs
    (result,) = call.outputs
    assert result is not None
    new = len(result.shape) - len(source.shape)
    for d in range(len(result.shape)):
        kept = d >= new and source.shape[d - new] == result.shape[d]
        yield call.rule(d, self=d - new if kept else WHOLE)


def permute(call: OpCall) -> Iterator[Rule]:
    """Transpositions: dimensions change places."""
    (_, source), *_ = call.inputs
    rank = len(source.shape)
    order = list(range(rank))
    if call.op is aten.permute.default:
        order = [d % rank for d in call["dims"]]
    elif rank > 1:
        a, b = (0, 1) if call.op is aten.t.default else (call["dim0"] % rank, call["dim1"] % rank)
        order[a], order[b] = order[b], order[a]
    yield from (call.rule(after, self=before) for after, before in enumerate(order))


def squeeze(call: OpCall) -> Iterator[Rule]:
    """Dimensions of one element vanish; longer ones that are named too cannot be cut, as a piece may have one element."""
    (_, source), *_ = call.inputs
    rank = len(source.shape)
    given = call["dim"]
    named = {d % rank for d in (given if isinstance(given, tuple) else (given,))} if rank else set[int]()
    kept = [d for d in range(rank) if not (d in named and source.shape[d] == 1)]
    yield from (call.rule(after, self=before) for after, before in enumerate(kept) if before not in named)


def elementwise(call: OpCall) -> Iterator[Rule]:
    """Every element of the results needs the elements at its place; operands of one element along a dimension are broadcast."""
    rank = max((len(tensor.shape) for _, tensor in call.inputs), default=0)
    for d in range(rank):
        outputs: tuple[Placement | None, ...] = tuple(
            None if out is None else _from_the_end(out, rank - d) for out in call.outputs
        )
        yield Rule(outputs, tuple(_from_the_end(tensor, rank - d) for _, tensor in call.inputs))


def _from_the_end(tensor: Layout, back: int) -> Placement:
    d = len(tensor.shape) - back
    return Split((d,)) if d >= 0 and tensor.shape[d] > 1 else WHOLE


def reduced(call: OpCall) -> Iterator[Rule]:
    """Losses that are computed element by element, and then added up or not.

    There is no rule for a mean, nor for its gradient, which the op divides by the number of elements that it is given.
    """
    if call["reduction"] == 1:
        return
    for rule in elementwise(call):
        (result,) = call.outputs
        assert result is not None
        yield Rule((SUM,), rule.inputs) if result.shape == () else rule


def filled(call: OpCall) -> Iterator[Rule]:
    """Tensors of a constant: each piece is made with its own sizes."""
    (result,) = call.outputs
    assert result is not None
    yield from (call.rule(d) for d in range(len(result.shape)))


def along(call: OpCall) -> Iterator[Rule]:
    """Ops along one dimension, which leave the others as they are."""
    rank = len(call.inputs[0][1].shape)
    yield from _alike(call, (d for d in range(rank) if d != call["dim"] % rank))


def all_but_last(count: int) -> OwnRules:
    """Ops on the last dimensions, such as the pixels of images: those before can be cut."""
    return lambda call: _alike(call, range(len(call.inputs[0][1].shape) - count))


def _alike(call: OpCall, dims: Iterable[int]) -> Iterator[Rule]:
    """Every tensor is cut along the same dimension."""
    for d in dims:
        split = Split((d,))
        yield Rule(tuple(None if out is None else split for out in call.outputs), (split,) * len(call.inputs))


def removed(call: OpCall) -> Iterator[Rule]:
    """Ops whose results lack one dimension of the input."""
    rank = len(call["self"].shape)
    kept = [d for d in range(rank) if d != call["dim"] % rank]
    yield from (call.rule(*([after] * len(call.outputs)), self=before) for after, before in enumerate(kept))


def added(call: OpCall) -> Iterator[Rule]:
    """Ops whose result has one dimension more than the inputs; torch's rules know no cut of a stack (2.13.0)."""
    (result,) = call.outputs
    assert result is not None
    kept = [d for d in range(len(result.shape)) if d != call["dim"] % len(result.shape)]
    for before, after in enumerate(kept):
        yield Rule((Split((after,)),), (Split((before,)),) * len(call.inputs))


def reduced_over(call: OpCall) -> Iterator[Rule]:
    """Reductions whose terms cannot be added up: what is not reduced can be cut.

    Torch's rule for `logsumexp` forgets that the reduced dimensions may be kept, and so takes one dimension for the next.
    """
    rank = len(call["self"].shape)
    gone = {d % max(rank, 1) for d in call["dim"]} if call["dim"] else set(range(rank))
    kept = [d for d in range(rank) if d not in gone]
    yield from (call.rule(before if call["keepdim"] else after, self=before) for after, before in enumerate(kept))
