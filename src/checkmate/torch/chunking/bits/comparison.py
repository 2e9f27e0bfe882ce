"""Whether a stage in pieces gives the bits of its whole ops, found out by running both on this device.

A kernel may take another path for a slice, such as one for products of few rows. Which path it takes depends on sizes and
strides and never on data, so that a comparison on random data at the real sizes decides: of each op by itself, because a later
op such as a clamp can hide a difference, and piece by piece, because memory is short where ops run so. Elementwise ops are looked
at besides (`kernel_paths`). That does not hold for sums over pieces, whose additions have another order: there equality is luck,
and no stage with one is tested.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import fx

from checkmate.core.units import format_bytes
from checkmate.frontend import progress
from checkmate.torch._compat.dispatch import no_dispatch, no_modes
from checkmate.torch._compat.sharding import Layout
from checkmate.torch.chunking.bits.kernel_paths import flat_storage, same_path
from checkmate.torch.chunking.bits.verdicts import keep_verdict, known_verdict, verdict_key
from checkmate.torch.chunking.graph_values import inputs, outputs, shape_only, size_bytes, tensor
from checkmate.torch.chunking.program import (
    Body,
    ChunkedProgram,
    NotChunkable,
    Part,
    Piece,
    PieceGraph,
    pieces_of,
    program_for,
    sliced,
)
from checkmate.torch.chunking.rules.pieces import cuts
from checkmate.torch.chunking.rules.placements import Placement, Split
from checkmate.torch.chunking.stages import Stage
from checkmate.torch.graph.op_properties import makes_views
from checkmate.torch.graph.rng import cpu_rng_state_bytes, generators_restored
from checkmate.torch.graph.storages import same_bytes, storage_key
from checkmate.torch.measure.estimates import estimated_workspace_bytes
from checkmate.torch.measure.profiler import workspace_bytes
from checkmate.torch.measure.resident import beyond_bytes

_log = logging.getLogger("checkmate.torch")

_EXPONENTS = 12
"""The second data set has numbers of so many powers of ten, where a sum in another order shows at once, and zeros."""

_FILLED_AT_ONCE = 1 << 14
"""So many numbers, which take three temporaries."""

_FEW = 64
"""With so many random elements a mask has both values."""

Fill: TypeAlias = Callable[[torch.Tensor], None]
"""Fills a tensor with numbers."""

_LEAST_NUMBERS, _MOST_ROUNDS = 1 << 14, 32
"""Numbers that are compared in all, and most comparisons."""

_HALF = (torch.bfloat16, torch.float16)
_LEAST_HALVES, _MOST_HALF_ROUNDS = 1 << 20, 2048
"""The same for half precision: sums in another order, which are made in float32, are mostly rounded to the same number.

So there is a third data set for it, with sums whose terms cancel: what is left of those is the rounding of float32 alone.
"""


def keeps_bits(part: Part) -> bool:
    """Whether a part returns what its whole ops return, byte for byte.

    Args:
        part: A part of a region.
    """
    program = part.program
    if any(program.sums):
        return False
    key = verdict_key(program.key, tensor(part.stage.region.seed).device)
    if key not in _KNOWN:
        verdict = known_verdict(key)
        if verdict is None:
            with progress.shown(f"comparing the bits of {len(part.stage.own)} ops in pieces"):
                verdict = _compared(part.stage)
            if verdict is None:
                return False  # for now: a later budget may leave the memory
            keep_verdict(key, verdict)
        _KNOWN[key] = verdict
    return _KNOWN[key]


_KNOWN: dict[str, bool] = {}
"""Verdicts of this process; layers share one."""


@dataclass(frozen=True, slots=True)
class _OpInPieces:
    """One op of a stage as a separate stage, with its program."""

    stage: Stage
    program: ChunkedProgram


def _compared(stage: Stage) -> bool | None:
    """The verdict on a stage; None if there is not enough memory to reach one."""
    excess = beyond_bytes(_needed_bytes(stage), tensor(stage.region.seed).device)
    if excess:
        _log.warning(
            "no plan of whole ops keeps the budget: it may be exceeded by %s now, once, while the bits of ops in pieces are "
            "compared with theirs",
            format_bytes(excess),
        )
    if excess is None:
        _log.info("not enough memory to compare the bits of %s in pieces", ", ".join(op.name for op in stage.own[:4]))
        return None
    try:
        pieces, graphs = pieces_of(stage)
        alone = _alone(stage)
        with generators_restored(), no_dispatch(), no_modes(), torch.no_grad():
            return _same_paths(stage, pieces, graphs) and all(_equal(stage, alone, *data) for data in _data_sets(stage))
    except torch.OutOfMemoryError:
        return None
    except (RuntimeError, IndexError, NotChunkable):
        return False  # random numbers are no input for every op: an index may be computed from them


def _cut(op: fx.Node, stage: Stage) -> dict[fx.Node, Placement]:
    """The results of an op that are cut, views aside, with how they are."""
    if makes_views(op):
        return {}
    found = zip(outputs(op), stage.region.rules[op].outputs, strict=True)
    return {value: placement for value, placement in found if value is not None and isinstance(placement, Split)}


def _alone(stage: Stage) -> dict[fx.Node, _OpInPieces]:
    """Each op that makes something that is cut, as a separate stage."""
    found = {}
    for op in stage.ops:
        results = _cut(op, stage)
        if results:
            read = zip(inputs(op), stage.region.rules[op].inputs, strict=True)
            operands = {given: None for k, given in enumerate(read) if k not in shape_only(op)}
            only = replace(stage, own=(op,), ops=(op,), operands=operands, results=results, copies=set())
            found[op] = _OpInPieces(only, program_for(only))
    return found


def _needed_bytes(stage: Stage) -> int:
    """Bytes of the whole tensors that exist at once, of one piece of what an op makes, and of its workspace or that of a piece.

    Temporaries of filling a tensor are among them, and the state of the generator, which is restored.
    """
    ends = {storage_key(tensor(value)): op for op in stage.ops for value in (*inputs(op), *filter(None, outputs(op)))}
    live, most = dict[int, int](), 0
    filling = 3 * _FILLED_AT_ONCE * max(tensor(value).element_size() for op in stage.ops for value in inputs(op))
    for op, workspace in zip(stage.ops, workspace_bytes(stage.ops), strict=True):
        live.update({storage_key(tensor(value)): size_bytes(value) for value in (*inputs(op), *filter(None, outputs(op)))})
        read = zip(inputs(op), stage.region.rules[op].inputs, strict=True)
        workspace = max(workspace, estimated_workspace_bytes(op) // stage.region.count)
        piece = sum(_dense_bytes(value, placement, stage.region.count) for value, placement in read)
        piece += sum(_piece_bytes(value, placement, stage.region.count) for value, placement in _cut(op, stage).items())
        made = sum(size_bytes(value) for value in outputs(op) if value is not None)
        most = max(most, sum(live.values()) + max(piece + workspace, filling - made))
        live = {key: size for key, size in live.items() if ends[key] is not op}
    return most + cpu_rng_state_bytes()


def _piece_bytes(value: fx.Node, placement: Placement, count: int) -> int:
    """Bytes of a piece as it is returned, with the strides of a slice; and as it is made, or as two such are compared: dense."""
    piece = _first_piece(value, placement, count)
    numbers = 1 + sum((n - 1) * s for n, s in zip(piece.shape, piece.stride(), strict=True))
    return piece.element_size() * numbers + max(piece.element_size() * piece.numel(), 2 * _dense_bytes(value, placement, count))


def _dense_bytes(value: fx.Node, placement: Placement, count: int) -> int:
    """Bytes of a dense copy of a piece; 0 where it is dense or the tensor is read whole."""
    piece = _first_piece(value, placement, count)
    return 0 if piece.is_contiguous() or piece is tensor(value) else piece.element_size() * piece.numel()


def _first_piece(value: fx.Node, placement: Placement, count: int) -> torch.Tensor:
    if not isinstance(placement, Split):
        return tensor(value)
    with torch.no_grad():
        return sliced(tensor(value), tuple(cuts(tensor(value).shape, placement, count)[0]))


def _data_sets(stage: Stage) -> list[tuple[Fill, int | None]]:
    """How the operands are filled for each comparison: the numbers, and what all integers are if they are not random.

    Few numbers differ by luck only sometimes, so that they are compared more often. A mask of few elements may by luck hide all.
    """
    made = [value for op in stage.ops for value in _cut(op, stage)]
    halves = [value for value in made if tensor(value).dtype in _HALF]
    least, most = (_LEAST_HALVES, _MOST_HALF_ROUNDS) if halves else (_LEAST_NUMBERS, _MOST_ROUNDS)
    compared = sum(tensor(value).numel() for value in halves or made)
    rounds = max(1, min(most, least // max(1, compared)))
    integers = [tensor(value).numel() for value, _ in stage.operands if not tensor(value).is_floating_point()]
    constant: list[tuple[Fill, int | None]] = [(_normal, 0), (_normal, 1)] if min(integers, default=_FEW) < _FEW else []
    fills = [_normal, _mixed, _cancelling] if halves else [_normal, _mixed]
    return [(fill, None) for fill in fills] * rounds + constant


def _same_paths(stage: Stage, pieces: Sequence[Piece], graphs: Sequence[PieceGraph]) -> bool:
    count = stage.region.count
    for index, graph in enumerate(graphs):
        numbers = [t for t, piece in enumerate(pieces) if piece.body == index]
        for op, call in graph.calls.items():
            placement = stage.region.rules[op].outputs[0]
            if not isinstance(placement, Split) or not isinstance(op.meta["val"], torch.Tensor):
                continue
            places = cuts(tensor(op).shape, placement, count)
            whole, piece = (fx.map_arg(each, lambda n: n.meta["val"]) for each in ((op.args, op.kwargs), call))
            if not same_path(op.target, whole, piece, [places[t] for t in numbers]):  # type: ignore[arg-type]
                return False
    return True


def _equal(stage: Stage, alone: Mapping[fx.Node, _OpInPieces], fill: Fill, constant: int | None) -> bool:
    """Whether each op gives the same in pieces as whole: the ops after it are then given the same."""
    given = {value for value, _ in stage.operands}
    last = {value: op for op in stage.ops for value in inputs(op)}
    made = dict[fx.Node, torch.Tensor]()
    for op in stage.ops:
        for value in inputs(op):
            if value in given and value not in made:
                made[value] = _random(Layout.of(tensor(value)), fill, _integers(value, stage), constant)
        # What is not given is used for its shape alone.
        args, kwargs = fx.map_arg((op.args, op.kwargs), lambda n: made[n] if n in made else Layout.of(tensor(n)).empty())
        result = op.target(*args, **kwargs)  # type: ignore[operator]
        made.update({v: result if v is op else result[i] for i, v in enumerate(outputs(op)) if v is not None})
        del args, kwargs, result
        if op in alone and not _same(alone[op], made, given):
            return False
        for value in [value for value in made if last.get(value, op) is op]:
            del made[value]  # arrays are as large as memory allows
    return True


def _same(op: _OpInPieces, made: Mapping[fx.Node, torch.Tensor], given: Set[fx.Node]) -> bool:
    """Whether the pieces of an op are those of what it made whole; also if what ops of the same piece made is dense."""
    own = [value not in given for value, _ in op.stage.operands]
    operands, wholes = [made[value] for value, _ in op.stage.operands], [made[value] for value in op.stage.results]
    if any(_strides(whole) != _strides(tensor(value)) for value, whole in zip(op.stage.results, wholes, strict=True)):
        return False
    for piece in op.program.pieces:
        body = op.program.bodies[piece.body]
        slices_read = [sliced(whole, slices) for whole, slices in zip(operands, piece.operands, strict=True)]
        parts = [sliced(whole, slices) for whole, slices in zip(wholes, piece.results, strict=True)]
        apart = any(made_here and not _is_dense(read) for made_here, read in zip(own, slices_read, strict=True))
        for dense in (False, True) if apart else (False,):
            read = [each.clone() if dense and made_here else each for made_here, each in zip(own, slices_read, strict=True)]
            if not _returns(body, read, parts):
                return False
            del read  # before the next are cloned
    return True


def _returns(body: Body, read: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> bool:
    """Whether a piece that is given some tensors makes what is expected."""
    targets = [Layout.of(part).empty() for part in parts]
    body.run([*read, *targets, *(buffer.empty() for buffer in body.buffers)])
    return all(map(same_bytes, parts, targets))


def _is_dense(piece: torch.Tensor) -> bool:
    return torch.empty_like(piece, device="meta").stride() == piece.stride()


def _strides(value: torch.Tensor) -> list[int]:
    """Strides that say where an element is: ops that read a result of other strides sum in another order."""
    return [stride for stride, n in zip(value.stride(), value.shape, strict=True) if n > 1]


def _random(layout: Layout, fill: Fill, integers: int, constant: int | None) -> torch.Tensor:
    made = layout.empty()
    if layout.dtype.is_floating_point:
        fill(made)
    else:
        most = 2 if layout.dtype is torch.bool else integers
        stored = flat_storage(made)
        _ = stored.random_(0, most) if constant is None else stored.fill_(min(constant, most - 1))
    return made


def _integers(value: fx.Node, stage: Stage) -> int:
    """How many integers can be given for an operand: 0 is a valid index of anything, and 1 where no dimension has one element.

    With one index for all, every number of a row is the same, and sums of them are the same in any order.
    """
    todo, seen = [value], {value}
    while todo:
        for op in todo.pop().users:
            if op not in stage.ops:
                continue
            if makes_views(op):
                todo += [v for v in outputs(op) if v is not None and v not in seen]
                seen.update(todo)
            elif any(min(tensor(v).shape, default=1) < 2 for v in inputs(op) if v not in seen):
                return 1
    return 2


def _normal(made: torch.Tensor) -> None:
    flat_storage(made).normal_()


def _mixed(made: torch.Tensor) -> None:
    for stored in flat_storage(made).split(_FILLED_AT_ONCE):
        exponents = torch.randint_like(stored, -_EXPONENTS // 2, _EXPONENTS // 2)
        # Some zeros of both signs: a kernel that adds to zero returns another zero than one that does not.
        stored.normal_().mul_(torch.pow(10.0, exponents)).mul_(torch.randint_like(stored, 0, 4).clamp_(max=1))


def _cancelling(made: torch.Tensor) -> None:
    """The second half of a random dimension is the first one again, or its negative.

    In a product both terms of a pair are there with opposite signs where the operands have unequal signs and are mirrored along
    the dimension that is summed over, as happens in one of eight rounds for two matrices.
    """
    _normal(made)
    # Elements of an expanded tensor share memory, and PyTorch refuses to write to them.
    written = made[tuple(slice(None) if stride else 0 for stride in made.stride())]
    if written.dim() and made.untyped_storage().nbytes() >= made.element_size() * written.numel():
        dim, sign = (int(torch.randint(n, ())) for n in (written.dim(), 2))
        first, middle, last = written.tensor_split([(n := written.shape[dim]) // 2, n - n // 2], dim)
        last.copy_(first).mul_(1 - 2 * sign)
        middle.zero_()
