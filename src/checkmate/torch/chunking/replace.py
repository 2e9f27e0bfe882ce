"""Replaces regions of a joint graph by ops that run them piece by piece."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.torch.chunking.program import CHUNKED, ChunkOp, NotChunkable
from checkmate.torch.chunking.unit_tangent import SCALE, UnitTangent
from checkmate.torch.graph.op_properties import DESCRIPTION, PIECES
from checkmate.torch.graph.traced import ancestors, producer, retraced, tensor

aten = torch.ops.aten

_Item: TypeAlias = fx.Node | ChunkOp


def with_regions(joint: fx.GraphModule, chunk_ops: Sequence[ChunkOp]) -> fx.GraphModule:
    """A new joint module in which regions without common ops run piece by piece, one op for each of their stages.

    Raises `NotChunkable` if regions wait for each other.
    """
    return _Writer(joint, chunk_ops).write()


class _Writer:
    """Writes the module; ``env`` maps nodes of the joint graph, and the chunk ops, to nodes of the new graph."""

    def __init__(self, joint: fx.GraphModule, chunk_ops: Sequence[ChunkOp]) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        self.env: dict[_Item, fx.Node] = {}
        self.maker = {value: op for op in chunk_ops for value in op.stage.results}
        self.begins = {op.stage.new_ops[0]: op for op in chunk_ops}
        self.inside = {node for op in chunk_ops for node in op.stage.region.rules}

    def write(self) -> fx.GraphModule:
        for node in self.joint.graph.nodes:
            if node in self.begins:
                self._emit(self.begins[node])
            if node not in self.inside and producer(node) not in self.inside:
                self._emit(node)
        self.graph.lint()
        return fx.GraphModule(self.joint, self.graph)

    def _emit(self, wanted: _Item) -> None:
        """Emit a node or a chunk op after all its inputs. It uses a stack: chains of inputs are as long as the graph."""
        stack = [wanted]
        waiting: set[_Item] = set()
        while stack:
            item = stack[-1]
            missing = [need for need in self._needs(item) if need not in self.env]
            if not waiting.isdisjoint(missing):
                # Two chunk ops can each read a result of the other, if their ops were between each other.
                raise NotChunkable("regions wait for each other")
            if missing:
                waiting.add(item)
                stack += missing
                continue
            stack.pop()
            if item in self.env:
                continue
            if isinstance(item, ChunkOp):
                self._write(item)
            else:
                # A view of a region's tensor that an op outside reads is computed again there, from the results of the region.
                self.env[item] = self.graph.node_copy(item, self.env.__getitem__)

    def _needs(self, item: _Item) -> list[_Item]:
        if isinstance(item, ChunkOp):
            read = [value for value, _ in item.stage.operands]
            unit = item.stage.unit_tangent
            if unit is not None:  # copies of the ops between read the tangent of one
                inner = {unit.tangent, *unit.between}
                read = [n for n in (*read, *(i for node in unit.between for i in node.all_input_nodes)) if n not in inner]
        else:
            read = item.all_input_nodes
        return [self.maker.get(value, value) for value in read]

    def _write(self, op: ChunkOp) -> None:
        stage, program, unit = op.stage, op.program, op.stage.unit_tangent
        env = self.env if unit is None else self.env | self._with_tangent_of_one(unit)
        operands = [env[value] for value, _ in stage.operands]
        like = stage.new_ops[0].meta
        name = re.sub(r"\W+", "_", stage.description)  # messages, explanations and reports show the names of ops
        node = self.env[op] = self.graph.create_node("call_function", CHUNKED, (operands, program.key), name=name)
        returned = [stage.returned(value) for value in stage.results]
        node.meta = {**like, "val": returned, DESCRIPTION: stage.description, PIECES: program.runs}
        if unit is not None:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # its results are scaled in place
            for read in ancestors([node]):  # none of which depends on a tangent
                if "backward" in str(read.meta.get("partitioner_tag", "")):
                    read.meta["partitioner_tag"] = "is_forward"
        for i, value in enumerate(stage.results):
            item = self.graph.call_function(operator.getitem, (node, i))
            item.meta = {**like, "val": returned[i]}
            if unit is not None and value in unit.scaled:
                item = self.graph.call_function(SCALE, (item, self.env[unit.tangent]))
                item.meta = {**producer(value).meta, "val": returned[i]}
            self.env[value] = item

    def _with_tangent_of_one(self, unit: UnitTangent) -> dict[fx.Node, fx.Node]:
        """Copies of the ops between a tangent and a region, by original, with a tangent of one."""
        like = tensor(unit.tangent)
        made = {"dtype": like.dtype, "device": like.device}
        copies = {unit.tangent: self.graph.call_function(aten.full.default, (list(like.shape), 1), made)}
        for node in unit.between:
            copies[node] = self.graph.node_copy(node, lambda n: copies[n] if n in copies else self.env[n])
        for node, copy in copies.items():
            copy.meta = {**node.meta, "val": retraced(copy, like.fake_mode)}  # type: ignore[attr-defined]
        return copies
