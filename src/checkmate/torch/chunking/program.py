"""``checkmate::chunked``: an op that runs other ops piece by piece.

A stage of a region is one node of a joint graph: planners choose when and how often it runs without seeing its pieces. With a
copy of every op for each piece, graphs of transformers doubled, and searches found worse plans in the same time. A
`ChunkedProgram` has the ops of the pieces, and the node names it by a hash of its content. Layers with the same program share the
program and its measured costs.

Results that are cut are assembled in one buffer each. A sum begins with the term of the first piece, and later terms are added
to it in place; a matrix product adds its own term (``addmm_``), without a temporary. So does an op that adds to a tensor
(``index_add``), each of whose pieces goes on with the tensor of the previous one.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from checkmate.core.errors import CheckmateError
from checkmate.torch._compat.aot import BoxedRun, boxed
from checkmate.torch.chunking.buffers import out_variant, share_buffers, write_to
from checkmate.torch.chunking.regions import Region
from checkmate.torch.chunking.rules.placements import (
    CARRY,
    TOTALS,
    WHOLE,
    Layout,
    Placement,
    Rule,
    Slices,
    Split,
    arguments_of_piece,
    cuts,
    sliced,
)
from checkmate.torch.chunking.stages import Stage, stages_of
from checkmate.torch.chunking.unit_tangent import UnitTangent
from checkmate.torch.graph.op_properties import Pieces, makes_views
from checkmate.torch.graph.storages import leaves
from checkmate.torch.graph.traced import outputs, producer, retraced, shape_only, tensor

aten = torch.ops.aten

# A fragment: the library itself is defined in checkmate.torch.graph.optimizer_ops.
_library = torch.library.Library("checkmate", "FRAGMENT")
_library.define("chunked(Tensor[] operands, str program) -> Tensor[]")

CHUNKED = torch.ops.checkmate.chunked.default

_ADDING = {aten.mm.default: aten.addmm_.default, aten.bmm.default: aten.baddbmm_.default}
"""Ops that add a product to a tensor in place, by the op that makes the product alone."""

CARRYING = {
    aten.index_add.default: aten.index_add_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.scatter_reduce.two: aten.scatter_reduce_.two,
    aten.index_put.default: aten.index_put_.default,
    aten._unsafe_index_put.default: aten.index_put_.default,
}
"""Ops that add to their first argument in place, by the op that returns a new tensor."""

_COPIES_IF_NEEDED = dict.fromkeys((aten.view.default, aten._unsafe_view.default), aten.reshape.default)
"""Views of tensors that are contiguous when whole: a slice need not be. The kernel decides its strides, which can differ from the
strides that PyTorch traces (``native_dropout_backward`` of a transposed tensor in 2.13.0): tracing a piece does not tell."""

_SUMMED_AS = dict.fromkeys((torch.bfloat16, torch.float16), torch.float32)
"""Types in which sums are too coarse to add to many times: an op that sums in one kernel rounds once."""


class NotChunkable(CheckmateError):
    """A stage cannot run piece by piece after all: an op does not take slices, for example a view of a non-contiguous tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One run of a program's ops, with the slices of each operand, and of each result that is assembled from slices."""

    operands: tuple[Slices, ...]
    results: tuple[Slices, ...]
    body: int  # index of the ops that run


@dataclass(frozen=True, eq=False, slots=True)
class Body:
    """The code of one piece.

    It is a function of the operands' slices, of the tensors to write each result to (its slice, or the sum so far), and of the
    buffers for temporary tensors. For the first piece there are no sums yet: it returns them.
    """

    run: BoxedRun
    graph: fx.Graph
    buffers: tuple[Layout, ...]


@dataclass(frozen=True, eq=False, slots=True)
class ChunkedProgram:
    """The pieces of one ``checkmate::chunked`` op in the order in which they run, and the ops that run for each."""

    key: str  # hash of the stage's ops, layouts and cuts, on which all other fields depend
    results: tuple[Layout, ...]
    sums: tuple[bool, ...]  # to which results every piece adds
    pieces: tuple[Piece, ...]
    bodies: tuple[Body, ...]

    @property
    def runs(self) -> Pieces:
        """The graphs that it runs, for measurement or estimation."""
        bodies = [self.bodies[piece.body] for piece in self.pieces]
        buffers = [sum(math.prod(buffer.shape) * buffer.dtype.itemsize for buffer in body.buffers) for body in bodies]
        return Pieces(tuple(body.graph for body in bodies), tuple(buffers), self.sums, self)

    def __call__(self, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run all pieces."""
        made = [None if is_sum else layout.empty() for layout, is_sum in zip(self.results, self.sums, strict=True)]
        shared: dict[tuple[Layout, ...], list[torch.Tensor]] = {}
        for piece in self.pieces:
            body = self.bodies[piece.body]
            if body.buffers not in shared:
                shared.clear()  # before the new ones are allocated
                shared[body.buffers] = [buffer.empty() for buffer in body.buffers]
            given = [sliced(t, slices) for t, slices in zip(operands, piece.operands, strict=True)]
            # Sums are passed once they exist; the body of the first piece makes them.
            targets = [sliced(t, slices) for t, slices in zip(made, piece.results, strict=True) if t is not None]
            terms = iter(body.run(given + targets + shared[body.buffers]))
            made = [next(terms) if t is None else t for t in made]
        return [t.to(layout.dtype) for t, layout in zip(made, self.results, strict=True)]  # type: ignore[union-attr]


_PROGRAMS: dict[str, ChunkedProgram] = {}
"""Programs by key. They have no data, and a program that is compiled again has the same key."""


def program_of(node: fx.Node) -> ChunkedProgram:
    """The program that a ``checkmate::chunked`` node runs."""
    return _PROGRAMS[node.args[1]]  # type: ignore[index]


@torch.library.impl(_library, "chunked", "CompositeExplicitAutograd")
def _run(operands: list[torch.Tensor], program: str) -> list[torch.Tensor]:
    return _PROGRAMS[program](operands)


@torch.library.register_fake("checkmate::chunked", lib=_library)
def _traced(operands: list[torch.Tensor], program: str) -> list[torch.Tensor]:
    return [layout.empty() for layout in _PROGRAMS[program].results]


@dataclass(frozen=True, eq=False, slots=True)
class ChunkOp:
    """A stage of a region with the program that runs it."""

    stage: Stage
    program: ChunkedProgram


def chunk_ops_of(region: Region, graph: fx.Graph, unit_tangent: UnitTangent | None = None) -> list[ChunkOp]:
    """The stages of a region, in the order in which they can run, with their programs.

    Raises `NotChunkable` if an op does not take slices.
    """
    stages = stages_of(region, graph, unit_tangent)
    if unit_tangent is not None and any(value in unit_tangent.scaled for stage in stages for value, _ in stage.operands):
        raise NotChunkable("a later stage would scale again what an earlier one has scaled")
    return [ChunkOp(stage, program_for(stage)) for stage in stages]


def program_for(stage: Stage) -> ChunkedProgram:
    """The program of a stage. Layers repeat, and a look-up is much faster than tracing their pieces."""
    key = hashlib.sha256(_content(stage).encode()).hexdigest()[:16]
    if key not in _PROGRAMS:
        views = [value.name for value in stage.results if makes_views(producer(value)) and value not in stage.copies]
        if views:  # a copy would be counted as its base, and elements of an expanded tensor are one
            raise NotChunkable(f"{views[0]} is a view that an op reads whole")
        pieces, graphs = pieces_of(stage)
        buffers = [share_buffers(piece.graph) for piece in graphs]
        bodies = tuple(Body(boxed(piece.module), piece.graph, shared) for piece, shared in zip(graphs, buffers, strict=True))
        layouts = tuple(Layout.of(stage.returned(value)) for value in stage.results)
        sums = tuple(placement in TOTALS for placement in stage.results.values())
        _PROGRAMS[key] = ChunkedProgram(key, layouts, sums, tuple(pieces), bodies)
    return _PROGRAMS[key]


def _content(stage: Stage) -> str:
    """All that the program of a stage depends on, without the names of nodes."""
    numbers: dict[fx.Node, str] = {}

    def named(read: fx.Node) -> str:
        """A value of the stage by its number; a value of which only the shape counts, by its layout."""
        return numbers[read] if read in numbers else str([Layout.of(t) for t in leaves(read.meta.get("val"))] or read.name)

    lines = [f"2 {stage.region.count}"]  # raise the first number when other code is written for the same stage
    for value, placement in stage.operands:
        lines.append(f"{numbers.setdefault(value, f'%{len(numbers)}')} {placement} {Layout.of(tensor(value))}")
    for op in stage.all_ops:
        args = fx.map_arg((op.args, op.kwargs), named)
        made = [None if value is None else numbers.setdefault(value, f"%{len(numbers)}") for value in outputs(op)]
        layouts = [Layout.of(t) for t in leaves(op.meta.get("val"))]
        lines.append(f"{made} {op.target} {args} {stage.region.rules[op]} {layouts}")
    lines += [f"{numbers[value]} {placement} {value in stage.copies}" for value, placement in stage.results.items()]
    return "\n".join(lines)


def pieces_of(stage: Stage) -> tuple[list[Piece], list[PieceGraph]]:
    """The pieces of a stage, and the graphs that they run."""
    operand_slices = [stage.region.slices(value, placement) for value, placement in stage.operands]
    result_slices = [stage.region.slices(value, placement) for value, placement in stage.results.items()]
    bodies: dict[tuple[object, bool], PieceGraph] = {}
    pieces: list[Piece] = []
    for t in range(stage.region.count):
        operands = tuple(slices[t] for slices in operand_slices)
        results = tuple(slices[t] for slices in result_slices)
        lengths = tuple(tuple(n for _, _, n in slices) for slices in (*operands, *results))
        kind = (lengths, not pieces and any(placement in TOTALS for placement in stage.results.values()))
        if kind not in bodies:
            bodies[kind] = PieceGraph(stage, operands, results, t)
        pieces.append(Piece(operands, results, list(bodies).index(kind)))
    return pieces, list(bodies.values())


def _summed(value: fx.Node, placement: Placement) -> torch.Tensor:
    """A traced tensor of the type in which a sum is added up: its own if the whole op adds in that type too."""
    traced = tensor(value)
    if placement == CARRY:
        return traced
    with traced.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
        return traced.to(_SUMMED_AS.get(traced.dtype, traced.dtype))


class PieceGraph:
    """The ops of one piece as a graph module; ``calls`` has the arguments of each op of the stage, with nodes of the graph."""

    def __init__(self, stage: Stage, operands: Sequence[Slices], results: Sequence[Slices], piece: int) -> None:
        self.stage, self.piece, self.first = stage, piece, piece == 0
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.calls: dict[fx.Node, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.mode = tensor(stage.region.seed).fake_mode  # type: ignore[attr-defined]
        with self.mode, torch.no_grad():
            self.given = {
                operand: self._placeholder(sliced(tensor(operand[0]), slices))
                for operand, slices in zip(stage.operands, operands, strict=True)
            }
            self.targets = {
                value: self._placeholder(sliced(_summed(value, p) if p in TOTALS else stage.returned(value), slices))
                for (value, p), slices in zip(stage.results.items(), results, strict=True)
                if p not in TOTALS or not self.first
            }
        self.sums = [value for value, placement in stage.results.items() if placement in TOTALS]
        self.module = self._module()

    def _module(self) -> fx.GraphModule:
        for op in self.stage.all_ops:
            self._emit(op)
        terms: list[fx.Node] = []
        for value in self.sums if self.first else ():
            total, term = _summed(value, self.stage.results[value]), self.made[value]
            if tensor(term).dtype is not total.dtype:
                term = self._call(aten._to_copy.default, (term,), {"dtype": total.dtype})
            if Layout.of(tensor(term)) != Layout.of(total):
                raise NotChunkable(f"the first term of {value.name} has another layout than the sum")
            terms.append(term)
        self.graph.output(terms)
        self.graph.lint()
        return fx.GraphModule(torch.nn.Module(), self.graph)

    def _placeholder(self, traced: torch.Tensor) -> fx.Node:
        node = self.graph.placeholder(f"slice_{len(self.graph.nodes)}")
        node.meta["val"] = traced
        return node

    def _emit(self, op: fx.Node) -> None:
        """Emit an op on slices, and write or return its outputs that are results."""
        rule = self.stage.region.rules[op]
        placements = iter(rule.inputs)
        positions, unread = itertools.count(), shape_only(op)

        def mapped(argument: fx.Node) -> fx.Node:
            if not isinstance(argument.meta.get("val"), torch.Tensor):
                raise NotChunkable(f"{op.name} reads a size that is known at run time only")
            placement = next(placements)
            if next(positions) in unread and argument not in self.made and (argument, placement) not in self.given:
                return self._empty(argument, placement)
            if placement != WHOLE and argument in self.made:
                return self.made[argument]
            return self.given[argument, placement]

        args, kwargs = fx.map_arg((op.args, op.kwargs), mapped)
        target = self.targets.get(op)
        if target is not None and op in self.sums and tensor(target).dtype is tensor(op).dtype:
            if op.target in _ADDING:
                self._call(_ADDING[op.target], (target, *args), kwargs)  # type: ignore[index]
                return
            if rule.outputs == (CARRY,):
                self._call(CARRYING[op.target], (target, *args[1:]), kwargs)  # type: ignore[index]
                return
        shapes = self._shapes(op, rule)
        target = _COPIES_IF_NEEDED.get(op.target, op.target)  # type: ignore[arg-type]
        self.calls[op] = arguments_of_piece(op.target, rule, args, shapes), kwargs  # type: ignore[arg-type]
        new = self._call(target, *self.calls[op])
        for i, value in enumerate(outputs(op)):
            if value is None:
                continue
            made = new
            if value is not op:
                made = self.graph.call_function(operator.getitem, (new, i))
                made.meta["val"] = new.meta["val"][i]
            self.made[value] = made
            if tuple(tensor(made).shape) != shapes[i]:
                raise NotChunkable(f"{op.name} returns {tuple(tensor(made).shape)} on a slice, not {shapes[i]}")
            target = self.targets.get(value)
            if target is None:
                continue
            writes = value is op and value not in self.sums and out_variant(new.target) is not None
            if writes and Layout.of(tensor(new)) == Layout.of(tensor(target)):
                write_to(new, target)
                self.made[value] = target
            else:
                self._call(aten.add_.Tensor if value in self.sums else aten.copy_.default, (target, made), {})

    def _empty(self, value: fx.Node, placement: Placement) -> fx.Node:
        """A tensor without numbers, of the shape of a slice."""
        with self.mode:
            slices = self.stage.region.slices(value, placement)[self.piece]
            like = Layout.of(torch.empty_like(sliced(tensor(value), slices)))
        given = {"dtype": like.dtype, "device": like.device}
        return self._call(aten.empty_strided.default, (list(like.shape), list(like.stride)), given)

    def _shapes(self, op: fx.Node, rule: Rule) -> list[tuple[int, ...] | None]:
        """Shape of each output of an op for this piece; None for other objects."""
        made, shapes = op.meta["val"], list[tuple[int, ...] | None]()
        for placement, whole in zip(rule.outputs, made if isinstance(made, (tuple, list)) else [made], strict=True):
            if isinstance(placement, Split):
                slices = cuts(tuple(whole.shape), placement, self.stage.region.count)
                assert slices is not None
                whole = sliced(whole, slices[self.piece])
            shapes.append(tuple(whole.shape) if isinstance(whole, torch.Tensor) else None)
        return shapes

    def _call(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        try:
            node.meta["val"] = retraced(node, self.mode)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise NotChunkable(f"{target} does not take slices: {error}") from error
        return node
