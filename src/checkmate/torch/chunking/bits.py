"""Whether a stage in pieces gives the same bits as its whole ops, found out by running both on this device.

A kernel may take another path for a slice, for example one for products of few rows. The path depends on sizes and strides and
never on data. Therefore a comparison on random data at the real sizes decides. It runs op by op, because a later clamp, for
example, can hide a difference, and piece by piece, because memory is short if ops run in pieces. Elementwise ops are also tested
in another way, below. Sums over pieces are different: their additions have another order. Equal bits are luck there, and no
stage with a sum is tested.

Kernels of the CPU compute most elements in vectors, and the rest at the end of a contiguous run one by one. If the op is
transcendental, the rest is computed by another function. Which elements are the rest depends on sizes and strides. The two
functions differ in the last bit, and for few numbers (``sigmoid``: one in thousands): equal results on random data prove nothing.
A *witness* is a number for which they differ: if all operands of an op have that value, the result shows which function computed
each element.

Verdicts are stored for all processes of a user. They hold if the same kernels run: the key of a verdict has the
settings that choose the kernels (`kernel_settings`), and a hash of the program's content.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from checkmate.core.units import format_bytes
from checkmate.cost.store import Store
from checkmate.frontend import progress
from checkmate.solvers.walks import reached
from checkmate.torch._compat.dispatch import OpOverload, no_dispatch, no_modes
from checkmate.torch.chunking.program import ChunkOp, NotChunkable, Piece, PieceGraph, pieces_of, program_for
from checkmate.torch.chunking.rules.placements import CARRY, SUM, Layout, Placement, Split, sliced
from checkmate.torch.chunking.stages import Stage
from checkmate.torch.graph.kernel_settings import kernel_settings
from checkmate.torch.graph.op_properties import is_pointwise, makes_views
from checkmate.torch.graph.rng import cpu_rng_state_bytes, generators_restored
from checkmate.torch.graph.storages import extent, leaves, same_bytes, storage_key
from checkmate.torch.graph.traced import inputs, outputs, size_bytes, tensor
from checkmate.torch.measure.estimates import estimated_workspace_bytes
from checkmate.torch.measure.profiler import workspace_bytes
from checkmate.torch.measure.resident import beyond_bytes

_log = logging.getLogger("checkmate.torch")

_FILLED_AT_ONCE = 1 << 14
"""How many numbers are filled at once; they take three temporaries."""

Fill: TypeAlias = Callable[[torch.Tensor], None]
"""Fills a tensor with numbers."""

_VERDICTS = Store("bits of pieces", bool, "bits of ops in pieces are compared again in every process")


def keeps_bits(op: ChunkOp) -> bool:
    """Whether a stage in pieces returns the same bytes as its whole ops."""
    device, placements = tensor(op.stage.region.seed).device, op.stage.results.values()
    if SUM in placements or (CARRY in placements and device.type != "cpu"):  # atomic additions on a GPU have no order
        return False
    key = verdict_key(op.program.key, device)
    verdict = known_verdict(key)
    if verdict is None:
        with progress.shown(f"comparing the bits of {len(op.stage.new_ops)} ops in pieces"):
            verdict = compared(op.stage)
        if verdict is None:
            return False  # for now: a later budget may leave the memory
        _KNOWN[key] = verdict
        _VERDICTS.add({key: verdict}, replace=True)
    return verdict


_KNOWN: dict[str, bool] = {}
"""Verdicts of this process; layers share one."""


def verdict_key(program: str, device: torch.device) -> str:
    """All that a verdict on the program of a key depends on, as a text."""
    return f"2 {program} {kernel_settings(device)}"  # raise the number when a comparison becomes stricter


def known_verdict(key: str) -> bool | None:
    """The verdict on a program that was reached before, in this process or another one."""
    if key not in _KNOWN:
        _KNOWN.update(_VERDICTS.get([key]))
    return _KNOWN.get(key)


def compared(stage: Stage) -> bool | None:
    """The verdict on a stage; None if there is not enough memory to reach one."""
    excess = beyond_bytes(needed_bytes(stage), tensor(stage.region.seed).device)
    if excess:
        _log.warning(
            "no plan of whole ops keeps the budget: it may be exceeded by %s now, once, while the bits of ops in pieces are "
            "compared with theirs",
            format_bytes(excess),
        )
    if excess is None:
        _log.info("not enough memory to compare the bits of %s in pieces", ", ".join(op.name for op in stage.new_ops[:4]))
        return None
    try:
        pieces, graphs = pieces_of(stage)
        single = _single_ops(stage)
        with generators_restored(), no_dispatch(), no_modes(), torch.no_grad():
            return _same_paths(stage, pieces, graphs) and all(_equal(stage, single, *data) for data in _data_sets(stage))
    except torch.OutOfMemoryError:
        return None
    except (RuntimeError, IndexError, NotChunkable):
        return False  # not every op takes random numbers: an index may be computed from them


def _cut(op: fx.Node, stage: Stage) -> dict[fx.Node, Placement]:
    """The results of an op that are cut or added to, without views, and their placements."""
    if makes_views(op):
        return {}
    found = zip(outputs(op), stage.region.rules[op].outputs, strict=True)
    return {
        value: placement
        for value, placement in found
        if value is not None and (isinstance(placement, Split) or placement == CARRY)
    }


def _single_ops(stage: Stage) -> dict[fx.Node, ChunkOp]:
    """Each op with a result that is cut, as a separate stage."""
    found = {}
    for op in stage.all_ops:
        made = _cut(op, stage)
        if made:
            operands = dict.fromkeys(stage.region.read_by(op))
            only = replace(stage, new_ops=(op,), all_ops=(op,), operands=operands, results=made, copies=set())
            found[op] = ChunkOp(only, program_for(only))
    return found


def needed_bytes(stage: Stage) -> int:
    """Bytes of the whole tensors that exist at once, of one piece of an op's results, and of workspace, whole or of a piece.

    Temporaries of filling a tensor are among them, and the state of the generator, which is restored.
    """
    ops = stage.all_ops
    given = {value for value, _ in stage.operands}  # each is filled as a separate tensor, also views of one storage

    def held(op: fx.Node) -> dict[object, int]:
        values = (*inputs(op), *filter(None, outputs(op)))
        return {value if value in given else storage_key(tensor(value)): size_bytes(value) for value in values}

    ends = {key: op for op in ops for key in held(op)}
    live, most = dict[object, int](), 0
    filling = 3 * _FILLED_AT_ONCE * max(tensor(value).element_size() for op in ops for value in inputs(op))
    for op, workspace in zip(ops, workspace_bytes(ops), strict=True):
        live |= held(op)
        read = zip(inputs(op), stage.region.rules[op].inputs, strict=True)
        workspace = max(workspace, estimated_workspace_bytes(op) // stage.region.count)
        piece = sum(_dense_bytes(_first_piece(value, placement, stage)) for value, placement in read)
        piece += sum(_piece_bytes(_first_piece(value, placement, stage)) for value, placement in _cut(op, stage).items())
        made = sum(size_bytes(value) for value in outputs(op) if value is not None)
        most = max(most, sum(live.values()) + max(piece + workspace, filling - made))
        live = {key: size for key, size in live.items() if ends[key] is not op}
    return most + cpu_rng_state_bytes()


def _first_piece(value: fx.Node, placement: Placement, stage: Stage) -> torch.Tensor:
    with torch.no_grad():
        return sliced(tensor(value), stage.region.slices(value, placement)[0])


def _piece_bytes(piece: torch.Tensor) -> int:
    """Bytes of a piece: as returned, with the strides of a slice; and dense, as the op makes it or as two are compared."""
    returned = piece.element_size() * extent(piece.shape, piece.stride())
    return returned + max(piece.element_size() * piece.numel(), 2 * _dense_bytes(piece))


def _dense_bytes(piece: torch.Tensor) -> int:
    """Bytes of a dense copy of a piece; 0 if the piece is dense."""
    return 0 if piece.is_contiguous() else piece.element_size() * piece.numel()


def _data_sets(stage: Stage) -> list[tuple[Fill, int | None]]:
    """How the operands are filled for each comparison: the numbers, and the value of all integers if they are not random.

    A few numbers often agree by luck: 16,384 are compared in all, in at most 32 comparisons. Sums of half precision are made in
    float32 and mostly rounded to the same number. A million of them are compared, and a third data set has sums whose terms
    cancel and leave the rounding of float32.
    """
    made = [value for op in stage.all_ops for value in _cut(op, stage)]
    halves = [value for value in made if tensor(value).dtype in (torch.bfloat16, torch.float16)]
    least, most = (1 << 20, 2048) if halves else (1 << 14, 32)
    compared_at_once = sum(tensor(value).numel() for value in halves or made)
    rounds = max(1, min(most, least // max(1, compared_at_once)))
    fills = [_normal, _mixed, _cancelling] if halves else [_normal, _mixed]
    integers = [tensor(value).numel() for value, _ in stage.operands if not tensor(value).is_floating_point()]
    # A random mask of fewer than 64 elements may have a single value by luck, which hides all differences.
    constant: list[tuple[Fill, int | None]] = [(_normal, 0), (_normal, 1)] if min(integers, default=64) < 64 else []
    return [(fill, None) for fill in fills] * rounds + constant


def _same_paths(stage: Stage, pieces: Sequence[Piece], graphs: Sequence[PieceGraph]) -> bool:
    """Whether each elementwise op computes each element of the pieces by the same function as in the whole."""
    for index, graph in enumerate(graphs):
        numbers = [t for t, piece in enumerate(pieces) if piece.body == index]
        for op, call in graph.calls.items():
            placement = stage.region.rules[op].outputs[0]
            if not is_pointwise(op) or not isinstance(placement, Split) or not isinstance(op.meta["val"], torch.Tensor):
                continue
            whole, piece = (fx.map_arg(each, lambda n: n.meta["val"]) for each in ((op.args, op.kwargs), call))
            flat, structure = pytree.tree_flatten(whole)
            given = tuple(value.dtype if isinstance(value, torch.Tensor) else value for value in flat)
            if (found := witness(op.target, given, structure)) is None:  # type: ignore[arg-type]
                continue
            expected, got = (_called(op.target, each, found) for each in (whole, piece))  # type: ignore[arg-type]
            places = stage.region.slices(op, placement)
            if not all(torch.equal(sliced(expected, places[t]), got) for t in numbers):
                return False
            del expected, got  # before those of the next op are made
    return True


def _equal(stage: Stage, single: Mapping[fx.Node, ChunkOp], fill: Fill, constant: int | None) -> bool:
    """Whether each op gives the same in pieces as whole; the ops after it then read the same values."""
    given = {value for value, _ in stage.operands}
    last = {value: op for op in stage.all_ops for value in inputs(op)}
    made = dict[fx.Node, torch.Tensor]()
    for op in stage.all_ops:
        for value in inputs(op):
            if value in given and value not in made:
                made[value] = _random(Layout.of(tensor(value)), fill, _integers(value, stage), constant)
        # Only the shape counts of an operand that is not given.
        args, kwargs = fx.map_arg((op.args, op.kwargs), lambda n: made[n] if n in made else Layout.of(tensor(n)).empty())
        result = op.target(*args, **kwargs)  # type: ignore[operator]
        made.update({v: result if v is op else result[i] for i, v in enumerate(outputs(op)) if v is not None})
        del args, kwargs, result
        if op in single and not _same(single[op], made, given):
            return False
        for value in [value for value in made if last.get(value, op) is op]:
            del made[value]  # arrays are as large as memory allows
    return True


def _same(op: ChunkOp, made: Mapping[fx.Node, torch.Tensor], given: Set[fx.Node]) -> bool:
    """Whether the pieces of an op give the bits of its whole results; also if operands from ops of the same piece are dense."""
    made_here = [value not in given for value, _ in op.stage.operands]
    operands, wholes = [made[value] for value, _ in op.stage.operands], [made[value] for value in op.stage.results]
    if any(_strides(whole) != _strides(tensor(value)) for value, whole in zip(op.stage.results, wholes, strict=True)):
        return False
    adds = any(op.program.sums)
    for dense in (False, True):
        results = list[torch.Tensor]()
        for piece in op.program.pieces:
            body = op.program.bodies[piece.body]
            read = [sliced(whole, slices) for whole, slices in zip(operands, piece.operands, strict=True)]
            strides = [torch.empty_like(each, device="meta").stride() for each in read]  # of a dense copy
            differs = any(here and each.stride() != s for here, each, s in zip(made_here, read, strides, strict=True))
            if dense and not (adds or differs):
                continue
            parts = [sliced(whole, slices) for whole, slices in zip(wholes, piece.results, strict=True)]
            read = [each.clone() if dense and here else each for here, each in zip(made_here, read, strict=True)]
            results += () if adds else [Layout.of(part).empty() for part in parts]
            results += body.run([*read, *results, *(buffer.empty() for buffer in body.buffers)])
            if not (adds or all(map(same_bytes, parts, results))):
                return False
            del read  # before the next pieces are made
            results = results if adds else []
        if adds and not all(map(same_bytes, wholes, results)):
            return False
    return True


def _strides(value: torch.Tensor) -> list[int]:
    """Strides of the dimensions that order the elements: ops that read a result of other strides sum in another order."""
    return [stride for stride, n in zip(value.stride(), value.shape, strict=True) if n > 1]


def _random(layout: Layout, fill: Fill, integers: int, constant: int | None) -> torch.Tensor:
    made = layout.empty()
    if layout.dtype.is_floating_point:
        fill(made)
    else:
        most = 2 if layout.dtype is torch.bool else integers
        stored = _flat_storage(made)
        _ = stored.random_(0, most) if constant is None else stored.fill_(min(constant, most - 1))
    return made


def _integers(value: fx.Node, stage: Stage) -> int:
    """How many integers an operand can have: 0 is always a valid index, and 1 is valid if no dimension has just one element.

    With a single index, every number of a row is the same, and sums of them are the same in any order.
    """
    makers = [op for op in stage.all_ops if makes_views(op)]
    views = reached([value], lambda v: (made for op in v.users if op in makers for made in outputs(op) if made is not None))
    readers = {op for v in views for op in v.users if op in stage.all_ops and op not in makers}
    beside = (tensor(v).shape for op in readers for v in inputs(op) if v not in views)
    return 1 if any(min(shape, default=1) < 2 for shape in beside) else 2


def _normal(made: torch.Tensor) -> None:
    _flat_storage(made).normal_()


def _mixed(made: torch.Tensor) -> None:
    """Numbers of twelve powers of ten, which show a sum in another order at once, and zeros."""
    for stored in _flat_storage(made).split(_FILLED_AT_ONCE):
        exponents = torch.randint_like(stored, -6, 6)
        # Some zeros of both signs: a kernel that adds to zero returns another zero than a kernel that does not.
        stored.normal_().mul_(torch.pow(10.0, exponents)).mul_(torch.randint_like(stored, 0, 4).clamp_(max=1))


def _cancelling(made: torch.Tensor) -> None:
    """The second half of a random dimension is the first one again, or its negative.

    A product has both terms of a pair with opposite signs if the signs of the operands are unequal and both operands are mirrored
    along the dimension that is summed over. For two matrices this happens in one of eight rounds.
    """
    _normal(made)
    # Elements of an expanded tensor share memory, and PyTorch refuses to write to them.
    written = made[tuple(slice(None) if stride else 0 for stride in made.stride())]
    if written.dim() and made.untyped_storage().nbytes() >= made.element_size() * written.numel():
        dim, sign = (int(torch.randint(n, ())) for n in (written.dim(), 2))
        first, middle, last = written.tensor_split([(n := written.shape[dim]) // 2, n - n // 2], dim)
        last.copy_(first).mul_(1 - 2 * sign)
        middle.zero_()


def _flat_storage(value: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as one dimension; elements of an expanded tensor, which share memory, cannot be written."""
    return value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)


@functools.lru_cache(maxsize=1 << 10)
def witness(op: OpOverload, given: tuple[Any, ...], structure: pytree.TreeSpec) -> tuple[Any, ...] | None:
    """A number for each tensor among the arguments for which the two functions of an op differ; None if none is found.

    ``given`` has the flat arguments, with a type for each tensor.
    """
    types = [value for value in given if isinstance(value, torch.dtype)]
    arguments = pytree.tree_unflatten(given, structure)
    for scale in [scale for scale in (1.0, 0.1, 8.0) for _ in range(32)]:
        numbers = [_numbers(dtype, scale) for dtype in types]
        in_vectors = _with(op, arguments, torch.dtype, numbers)
        one_by_one = _with(op, arguments, torch.dtype, [torch.stack([n, n], 1)[:, 0] for n in numbers])
        if not isinstance(in_vectors, torch.Tensor) or not in_vectors.is_floating_point():
            return None
        differ = (in_vectors != one_by_one) & in_vectors.isfinite() & one_by_one.isfinite()
        if differ.any():
            place = int(differ.nonzero()[0])
            return tuple(n[place].item() for n in numbers)
    return None


def _numbers(dtype: torch.dtype, scale: float) -> torch.Tensor:
    made = torch.randn(4096, dtype=torch.float64) * scale  # not more: they take memory in addition to a step
    return made.to(dtype) if dtype.is_floating_point else (made > 0).to(dtype)


def _called(op: OpOverload, arguments: Sequence[Any], numbers: Sequence[Any]) -> torch.Tensor:
    """The op on tensors that are each filled with one value."""
    made = [Layout.of(traced).empty() for traced in leaves(arguments)]
    for value, number in zip(made, numbers, strict=False):  # a type among the arguments has a number too
        _flat_storage(value).fill_(number)
    return _with(op, arguments, torch.Tensor, made)


def _with(op: OpOverload, arguments: Any, kind: type, tensors: Iterable[torch.Tensor]) -> Any:
    """The op with tensors in place of the arguments of a kind."""
    left = iter(tensors)
    args, kwargs = pytree.tree_map_only(kind, lambda _: next(left), arguments)
    return op(*args, **kwargs)
