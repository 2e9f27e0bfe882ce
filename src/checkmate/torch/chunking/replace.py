"""Replace regions of a joint graph by ops that run them piece by piece."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from checkmate.torch.chunking.graph_values import producer, tensor
from checkmate.torch.chunking.program import CHUNKED, Part
from checkmate.torch.graph.op_properties import DESCRIPTION


def with_regions(joint: fx.GraphModule, parts: Sequence[Part]) -> fx.GraphModule:
    """A joint module in which regions run piece by piece, one op for each of their stages.

    Args:
        joint: The joint module; it is not changed.
        parts: All parts of regions of its graph that have no common ops.
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
        while stack:
            item = stack[-1]
            missing = [need for need in self._needs(item) if not self._is_done(need)]
            if missing:
                stack += missing
                continue
            stack.pop()
            if not self._is_done(item):
                self._write(item)

    def _needs(self, item: fx.Node | Part) -> list[fx.Node | Part]:
        read = [value for value, _ in item.stage.operands] if isinstance(item, Part) else item.all_input_nodes
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
        stage, program = part.stage, part.program
        operands = [self.env[value] for value, _ in stage.operands]
        like = stage.own[0].meta
        node = self.graph.call_function(CHUNKED, (operands, program.key))
        node.meta = {**like, "val": [tensor(value) for value in stage.results], DESCRIPTION: program.description}
        for i, value in enumerate(stage.results):
            item = self.graph.call_function(operator.getitem, (node, i))
            item.meta = {**like, "val": tensor(value)}
            self.env[value] = item
