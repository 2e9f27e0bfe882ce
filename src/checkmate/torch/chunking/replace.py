"""Replace regions of a joint graph by ops that run them piece by piece."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from checkmate.torch.chunking.ahead import SCALE, Ahead
from checkmate.torch.chunking.graph_values import ancestors, producer, tensor
from checkmate.torch.chunking.program import CHUNKED, NotChunkable, Part
from checkmate.torch.graph.op_properties import DESCRIPTION
from checkmate.torch.graph.pieces import PIECES
from checkmate.torch.graph.retrace import retraced

aten = torch.ops.aten


def with_regions(joint: fx.GraphModule, parts: Sequence[Part]) -> fx.GraphModule:
    """A joint module in which regions run piece by piece, one op for each of their stages.

    Args:
        joint: The joint module; it is not changed.
        parts: All parts of regions of its graph that have no common ops.

    Raises:
        NotChunkable: Parts of regions wait for each other.
    """
    return _Writer(joint, parts).write()


class _Writer:
    """Writes the module; the arguments are those of `with_regions`.

    Attributes:
        part_of: Result of a part -> the part.
        env: Node of the joint graph -> its node in the new graph.
    """

    def __init__(self, joint: fx.GraphModule, parts: Sequence[Part]) -> None:
        self.joint = joint
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.done: set[Part] = set()
        self.part_of = {value: part for part in parts for value in part.stage.results}
        self.begins = {part.stage.own[0]: part for part in parts}
        self.inside = {op for part in parts for op in part.stage.region.rules}

    def write(self) -> fx.GraphModule:
        for node in self.joint.graph.nodes:
            if node in self.begins:
                self._emit(self.begins[node])
            if node.op == "output":
                self._emit(node)
                break
            if node not in self.inside and producer(node) not in self.inside:
                self._emit(node)
        self.graph.lint()
        return fx.GraphModule(self.joint, self.graph)

    def _emit(self, wanted: fx.Node | Part) -> None:
        """Emit a node or a part after all that it needs. A stack, because chains of needs are as long as the graph."""
        stack = [wanted]
        waiting: set[fx.Node | Part] = set()
        while stack:
            item = stack[-1]
            missing = [need for need in self._needs(item) if not self._is_done(need)]
            if not waiting.isdisjoint(missing):
                # Each of two parts can read what the other makes, where their ops were between each other.
                raise NotChunkable("regions wait for each other")
            if missing:
                waiting.add(item)
                stack += missing
                continue
            stack.pop()
            if not self._is_done(item):
                self._write(item)

    def _needs(self, item: fx.Node | Part) -> list[fx.Node | Part]:
        if not isinstance(item, Part):
            read = item.all_input_nodes
        else:
            read = [value for value, _ in item.stage.operands]
            ahead = item.stage.ahead
            if ahead is not None:  # the ops between are copied, and read the tangent of one
                read = [n for n in (*read, *(i for node in ahead.between for i in node.all_input_nodes)) if n not in ahead.inner]
        return [self.part_of.get(value, value) for value in read]

    def _is_done(self, item: fx.Node | Part) -> bool:
        return item in self.done if isinstance(item, Part) else item in self.env

    def _write(self, item: fx.Node | Part) -> None:
        if isinstance(item, Part):
            self._write_part(item)
        else:
            # A view of a region's tensor that an op outside reads is made again outside, of the tensor that the region returns.
            self.env[item] = self.graph.node_copy(item, self.env.__getitem__)

    def _write_part(self, part: Part) -> None:
        self.done.add(part)
        stage, program, ahead = part.stage, part.program, part.stage.ahead
        env = self.env if ahead is None else {**self.env, **self._with_tangent_of_one(ahead)}
        operands = [env[value] for value, _ in stage.operands]
        like = stage.own[0].meta
        name = re.sub(r"\W+", "_", stage.description)  # messages, explanations and reports call ops by their names
        node = self.graph.create_node("call_function", CHUNKED, (operands, program.key), name=name)
        returned = [stage.returned(value) for value in stage.results]
        node.meta = {**like, "val": returned, DESCRIPTION: stage.description, PIECES: program.runs}
        if ahead is not None:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE  # what it returned is scaled in place
            for read in ancestors([node]):  # none of which depends on a tangent
                if "backward" in str(read.meta.get("partitioner_tag", "")):
                    read.meta["partitioner_tag"] = "is_forward"
        for i, value in enumerate(stage.results):
            item = self.graph.call_function(operator.getitem, (node, i))
            item.meta = {**like, "val": returned[i]}
            if ahead is not None and value in ahead.scaled:
                item = self.graph.call_function(SCALE, (item, self.env[ahead.tangent]))
                item.meta = {**producer(value).meta, "val": returned[i]}
            self.env[value] = item

    def _with_tangent_of_one(self, ahead: Ahead) -> dict[fx.Node, fx.Node]:
        """Copies of the ops between a tangent and a region, by original, with a tangent of one."""
        like = tensor(ahead.tangent)
        made = {"dtype": like.dtype, "device": like.device}
        copies = {ahead.tangent: self.graph.call_function(aten.full.default, (list(like.shape), 1), made)}
        for node in ahead.between:
            copies[node] = self.graph.node_copy(node, lambda n: copies[n] if n in copies else self.env[n])
        for node, copy in copies.items():
            copy.meta = {**node.meta, "val": retraced(copy, like.fake_mode)}  # type: ignore[attr-defined]
        return copies
