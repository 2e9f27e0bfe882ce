"""Regions that run piece by piece under Inductor: their choice, and their ops written out piece by piece.

In a plan a region is one op, ``checkmate::chunked``. Before code is generated, the ops of its pieces replace the op, one piece
after the other: Inductor fuses the ops in a piece like all others, and their memory is counted in its code.

Only regions that compute nothing twice run in pieces, such as the head of a language model with its loss in a whole step. They do
so at every budget, because sums over pieces change bits: all plans have the bits of the plan that keeps everything.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import fx

from checkmate.cost.store import OpCost
from checkmate.torch.chunking.buffers import out_variant
from checkmate.torch.chunking.choose import ChunkableStep, ChunkChoices, Chunks
from checkmate.torch.chunking.program import CHUNKED, Slices, program_of
from checkmate.torch.chunking.region_groups import RegionGroup
from checkmate.torch.chunking.unit_tangent import SCALE
from checkmate.torch.graph.op_properties import out_argument
from checkmate.torch.graph.storages import storage_bytes
from checkmate.torch.graph.traced import copy_graph, retraced
from checkmate.torch.inductor.fusion import contract_fusible_chains, predicted_peak, trailing_reductions
from checkmate.torch.joint.capture import Capture, Costs, capture_joint
from checkmate.torch.partition.split import Recapture

aten = torch.ops.aten
_CONVERT = torch.ops.prims.convert_element_type.default

# A fragment: the library itself is defined in checkmate.torch.graph.optimizer_ops.
_library = torch.library.Library("checkmate", "FRAGMENT")
_library.define("add_product_(Tensor(a!) sum, Tensor left, Tensor right) -> ()")
_library.define("pick(Tensor source, int dim, Tensor index) -> Tensor")

ADD_PRODUCT = torch.ops.checkmate.add_product_.default
"""Adds a matrix product to a tensor in place; Inductor's own ``addmm`` would allocate another sum for each piece."""

PICK = torch.ops.checkmate.pick.default
"""``aten::gather`` that Inductor does not fuse."""


@torch.library.impl(_library, "add_product_", "CompositeExplicitAutograd")
def _add_product(sum: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:  # noqa: A002 - the name in the schema
    add = sum.addmm_ if sum.ndim == 2 else sum.baddbmm_
    add(left, right)


@torch.library.register_fake("checkmate::add_product_", lib=_library)
def _traced_add_product(sum: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:  # noqa: A002
    pass


@torch.library.impl(_library, "pick", "CompositeExplicitAutograd")
def _pick(source: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return source.gather(dim, index)


torch.library.register_fake("checkmate::pick", _pick, lib=_library)


def with_pieces(capture: Capture, recapture: Recapture, allows: Callable[[fx.Node], bool]) -> tuple[Capture, list[RegionGroup]]:
    """A captured step in which the regions that compute nothing twice run piece by piece, in the fewest offered pieces."""
    step = ChunkableStep(capture, (capture.joint,), lambda modules: recapture(modules[0]))
    variants = ChunkChoices(step, Chunks(exact=False, allows=allows, recomputes_nothing=True))
    chosen: list[RegionGroup] = []
    for kind in sorted(variants.groups, key=lambda kind: kind.regions[0].count):
        if not any(kind.excludes(other) for other in chosen):
            chosen.append(kind)
    return variants.captured(tuple(chosen)), chosen


def with_fused_pieces(costs: Costs) -> Costs:
    """Costs of ops, with the workspace of regions in pieces if Inductor fuses the ops of a piece."""

    def changed(nodes: Sequence[fx.Node]) -> list[OpCost]:
        found = zip(nodes, costs(nodes), strict=True)
        return [cost._replace(workspace_bytes=_fused_bytes(n)) if n.target is CHUNKED else cost for n, cost in found]

    return changed


_FUSED_BYTES: dict[str, int] = {}
"""Workspace of regions in pieces, by the key of the program."""


def _fused_bytes(node: fx.Node) -> int:
    """Bytes that a region in pieces needs in addition to its results, as predicted for the code of its pieces."""
    key = program_of(node).key
    if key not in _FUSED_BYTES:
        graph = fx.Graph()
        operands = [graph.placeholder(operand.name) for operand in node.args[0]]  # type: ignore[union-attr]
        for operand, like in zip(operands, node.args[0], strict=True):  # type: ignore[arg-type]
            operand.meta = {"val": like.meta["val"]}  # type: ignore[union-attr]
        pieces = graph.call_function(CHUNKED, (operands, key))
        pieces.meta = {"val": node.meta["val"]}
        results = [graph.call_function(operator.getitem, (pieces, i)) for i in range(len(node.meta["val"]))]
        for result, value in zip(results, node.meta["val"], strict=True):
            result.meta = {"val": value}
        graph.output(results)
        module = write_out_pieces(fx.GraphModule(torch.nn.Module(), graph))
        capture = capture_joint(module, None, lambda nodes: [OpCost(1, 0)] * len(nodes))
        chains = contract_fusible_chains(capture.graph, trailing_reductions(m.node for m in capture.members))
        peak = predicted_peak(chains, range(len(chains.contracted.ops)))
        _FUSED_BYTES[key] = max(0, peak - sum(storage_bytes(value) for value in node.meta["val"]))
    return _FUSED_BYTES[key]


def write_out_pieces(module: fx.GraphModule) -> fx.GraphModule:
    """The module with the ops of the pieces in place of the ops that run them."""
    if not any(node.target in {CHUNKED, SCALE} for node in module.graph.nodes):
        return module
    written = fx.GraphModule(module, copy_graph(module.graph))
    written.meta = dict(module.meta)
    for node in list(written.graph.nodes):
        if node.target is CHUNKED:
            _PieceWriter(node).replace()
        elif node.target is SCALE:  # Inductor writes over the gradient by itself
            node.target = aten.mul.Tensor
    written.graph.lint()
    written.recompile()
    return written


class _PieceWriter:
    """Writes the ops of the pieces of an op in front of the op."""

    def __init__(self, node: fx.Node) -> None:
        self._node, self._graph = node, node.graph
        self._program = program_of(node)
        self._mode = node.meta["val"][0].fake_mode
        self._about = {key: node.meta[key] for key in ("stack_trace", "nn_module_stack") if key in node.meta}

    def replace(self) -> None:
        """Write the ops, and remove the op that they replace."""
        operands: list[fx.Node] = self._node.args[0]  # type: ignore[assignment]
        program = self._program
        cut: dict[int, list[fx.Node]] = {i: [] for i, is_sum in enumerate(program.sums) if not is_sum}
        sums: dict[int, fx.Node] = {}
        with self._graph.inserting_before(self._node):
            for piece in program.pieces:
                slices = [self._sliced(value, cuts) for value, cuts in zip(operands, piece.operands, strict=True)]
                self._run(program.bodies[piece.body].graph, slices, cut, sums)
            results = {i: self._sum_of(i, total) for i, total in sums.items()}
            for i, parts in cut.items():
                results[i] = self._assembled(parts, [piece.results[i] for piece in program.pieces])
        for item in list(self._node.users):
            assert item.target is operator.getitem
            result = results[item.args[1]]  # type: ignore[index]
            item.replace_all_uses_with(result)
            self._graph.erase_node(item)
            result.name = item.name  # the inputs of the backward have the names of the forward's outputs
        self._graph.erase_node(self._node)

    def _run(self, body: fx.Graph, operands: Sequence[fx.Node], cut: dict[int, list[fx.Node]], sums: dict[int, fx.Node]) -> None:
        """Write the ops of one piece."""
        given = [i for i, is_sum in enumerate(self._program.sums) if not is_sum or i in sums]
        inputs = body.find_nodes(op="placeholder")
        env = dict(zip(inputs, operands, strict=False))
        targets = dict(zip(inputs[len(operands) :], given, strict=False))
        buffers = set(inputs[len(operands) + len(given) :])  # Inductor allocates the results that are written to these
        env.update({target: sums[i] for target, i in targets.items() if i in sums})
        for node in body.nodes:
            if node.op != "call_function" or not buffers.isdisjoint(node.all_input_nodes):
                continue
            target = node.args[0] if node.target in _WRITES_FIRST else node.kwargs.get(out_argument(node))
            env[node] = self._write(node, env)
            if isinstance(target, fx.Node) and target in targets:
                env[target] = env[node]
        for target, i in targets.items():
            if i in sums:
                sums[i] = env[target]
            else:
                env[target].meta["inductor_realize_to_strides"] = True  # now, and not when the results are read
                cut[i].append(env[target])
        terms = (env[term] for term in body.output_node().args[0])  # type: ignore[union-attr]
        sums.update(zip((i for i, is_sum in enumerate(self._program.sums) if is_sum and i not in sums), terms, strict=True))

    def _write(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """Write an op of a piece as one that returns a new tensor, or that adds a product to a sum."""
        if node.target is aten.copy_.default:
            return env[node.args[1]]  # type: ignore[index]
        inputs = node.args, {k: v for k, v in node.kwargs.items() if k != out_argument(node)}
        args, kwargs = cast("tuple[Any, Any]", fx.map_arg(inputs, env.__getitem__))
        match node.target:
            case aten.addmm_.default | aten.baddbmm_.default:
                self._call(ADD_PRODUCT, args)
                return args[0]
            case aten.add_.Tensor:
                return self._call(aten.add.Tensor, args)
            case aten.gather.default | aten.gather.out:
                return self._pick(*args)
            case aten._to_copy.default if kwargs.keys() == {"dtype"}:
                return self._call(_CONVERT, (args[0], kwargs["dtype"]))
            case _:
                return self._call(_functional(node), args, kwargs)

    def _pick(self, source: fx.Node, dim: int, index: fx.Node) -> fx.Node:
        """Pick numbers from a tensor; if the tensor is a difference, from its minuend.

        A loss picks log-probabilities: logits minus the logarithm of their row's sum. A separate kernel picks from the logits
        before that sum is known: the gradient of the logits can then be written over them.
        """
        subtracted: list[fx.Node] = []
        while source.target is aten.sub.Tensor and not source.kwargs and _is_like(source.args[1], index):
            source, other = source.args  # type: ignore[assignment]
            subtracted.append(other)  # type: ignore[arg-type]
        picked = self._call(PICK, (source, dim, index))
        for other in reversed(subtracted):
            picked = self._call(aten.sub.Tensor, (picked, other))
        return picked

    def _sum_of(self, index: int, total: fx.Node) -> fx.Node:
        dtype = self._program.results[index].dtype
        return total if total.meta["val"].dtype is dtype else self._call(_CONVERT, (total, dtype))

    def _assembled(self, parts: Sequence[fx.Node], cuts: Sequence[Slices]) -> fx.Node:
        """The tensor that consists of slices in the order of the pieces; the last dimension that is cut varies fastest."""
        if len(parts) == 1:
            return parts[0]
        rows = []
        for _, row in itertools.groupby(zip(parts, cuts, strict=True), key=lambda part_and_cuts: part_and_cuts[1][0]):
            inner, rest = zip(*((part, cut[1:]) for part, cut in row), strict=True)
            rows.append(self._assembled(inner, rest))
        return self._call(aten.cat.default, (rows, cuts[0][0][0]))

    def _sliced(self, value: fx.Node, cuts: Slices) -> fx.Node:
        for dim, start, length in cuts:
            value = self._call(aten.slice.Tensor, (value, dim, start, start + length))
        return value

    def _call(self, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        node = self._graph.call_function(target, tuple(args), kwargs or {})
        node.meta = {**self._about, "val": retraced(node, self._mode)}
        return node


_WRITES_FIRST = frozenset({aten.copy_.default, aten.add_.Tensor, aten.addmm_.default, aten.baddbmm_.default})
"""Ops of pieces that write to their first argument."""


def _is_like(value: Any, index: fx.Node) -> bool:
    """Whether the subtrahend has one number for each picked number: the same for all numbers of a row."""
    return isinstance(value, fx.Node) and value.meta["val"].shape == index.meta["val"].shape


def _functional(node: fx.Node) -> Any:
    """The overload of an op that returns a new tensor, if the op may write to a given tensor."""
    if not (name := out_argument(node)):
        return node.target
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return next(op for op in overloads if out_variant(op) == (node.target, name))
