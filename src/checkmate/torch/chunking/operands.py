"""Operands of a region that it had better make itself, piece by piece, because what they are made of takes less memory.

Growth ends at small tensors, which are then given to the region whole. Some of them exist for the region alone, and are made of
a smaller tensor, such as a mask of booleans, or of one that is there anyway: the gradient of attention's output is a product of
the gradient that the residual connection passes on. An op that makes such a tensor becomes part of the region.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from checkmate.torch.chunking.graph_values import inputs, outputs, own_bytes, producer, readers, tensor
from checkmate.torch.chunking.regions import Region, extended
from checkmate.torch.chunking.rules.placements import Split
from checkmate.torch.chunking.stages import Stage, stages_of, widens
from checkmate.torch.graph.op_properties import makes_views
from checkmate.torch.graph.storages import storage_key


def with_private_operands(region: Region, stages: Sequence[Stage], graph: fx.Graph, allows: Callable[[fx.Node], bool]) -> Region:
    """A region with the ops that make what it alone reads, where what these read takes less memory.

    Args:
        region: The region.
        stages: Its stages.
        graph: Its graph.
        allows: Whether an op may belong to the region.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for stage in stages:
        elsewhere = {_storage(value) for other in stages if other is not stage for value, _ in other.operands}
        for value, placement in stage.operands:
            path = _path_to(value)
            if not isinstance(placement, Split) or not path or not _is_private(path, region):
                continue
            op = path[-1]
            # An op that would run in several stages has to be quick, and what it reads is needed until the last of them.
            if not (widens(op) if _storage(value) in elsewhere else _needed_bytes(op, stage, position) < own_bytes(value)):
                continue
            found = extended(region, path, allows)
            if found is not None and len(stages_of(found, graph)) == len(stages):
                region = found
    return region


def _path_to(value: fx.Node) -> list[fx.Node]:
    """The op that makes a tensor, after the ops that make views of it; empty where the graph is given it."""
    path: list[fx.Node] = []
    while (op := producer(value)).op == "call_function":
        path.append(op)
        if not makes_views(op):
            return path
        value = inputs(op)[0]
    return []


def _is_private(path: Sequence[fx.Node], region: Region) -> bool:
    """Whether only a region reads what the ops of a path make, and none of them belongs to it."""
    if not region.rules.keys().isdisjoint(path):
        return False
    inside = region.rules.keys() | set(path)
    return all(user in inside for op in path for _, user in readers(op))


def _needed_bytes(op: fx.Node, stage: Stage, position: Mapping[fx.Node, int]) -> int:
    """Bytes of what an op reads that need not be there while a stage runs unless this stage runs the op."""
    last = max(map(position.__getitem__, stage.own))
    there = {_storage(value) for value, _ in stage.operands}
    needed: dict[int, int] = {}
    for value in inputs(op):
        if _storage(value) not in there and not _is_there(value, last, position):
            needed[_storage(value)] = own_bytes(value)
    return sum(needed.values())


def _is_there(value: fx.Node, last: int, position: Mapping[fx.Node, int]) -> bool:
    """Whether a tensor is an input of the graph, or is read after a stage."""
    todo, seen = [value], {value}
    while todo:
        value = todo.pop()
        op = producer(value)
        near = [user for user in value.users if user.op == "call_function"]
        if op.op == "placeholder" or any(position[user] > last and not makes_views(user) for user in near):
            return True
        views = [v for user in near if makes_views(user) for v in outputs(user) if v is not None]
        found = {*views, *(inputs(op)[:1] if makes_views(op) else ())} - seen
        seen |= found
        todo += found
    return False


def _storage(value: fx.Node) -> int:
    return storage_key(tensor(value))
