"""Buffers that the pieces of a program share.

The C library returns every large allocation to the system when it is freed, and gets it back page by page: in the head of a
language model with 128,256 words that took a fifth of the time (4,096 tokens in 32 pieces, on a CPU). The largest tensors of a
piece are therefore written into buffers that live as long as the program runs. There are as many of them as exist at once, so
that the peak is the same. CUDA's allocator keeps what is freed, and needs none.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch.graph.storages import leaves, storage_bytes, storage_key

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of numbers."""

    dtype: torch.dtype
    numel: int

    def empty(self) -> torch.Tensor:
        """The buffer, on the CPU."""
        return torch.empty(self.numel, dtype=self.dtype)


def share_buffers(graph: fx.Graph) -> tuple[Buffer, ...]:
    """Have the ops of a piece write their largest tensors into buffers, which become the last inputs of the graph.

    Args:
        graph: The graph of a piece; changed in place.

    Returns:
        The buffers, in the order of the inputs.
    """
    nodes = list(graph.nodes)
    ends = _last_uses(nodes)
    most = max((storage_bytes(node.meta["val"]) for node in nodes if _writes_elsewhere(node)), default=0)
    last_input = [node for node in nodes if node.op == "placeholder"][-1]
    free: list[tuple[int, Buffer, fx.Node]] = []
    inputs: list[Buffer] = []
    for position, node in enumerate(nodes):
        key = storage_key(node.meta["val"]) if _writes_elsewhere(node) else None
        if key is None or storage_bytes(node.meta["val"]) < most or ends[key] == len(nodes) - 1:  # the output node reads it
            continue
        made = node.meta["val"]
        wanted = Buffer(made.dtype, made.numel())
        slot = next((each for each in free if each[0] < position and each[1] == wanted), None)
        if slot is not None:
            free.remove(slot)
            given = slot[2]
        else:
            with graph.inserting_after(last_input):
                given = last_input = graph.placeholder(f"buffer_{len(inputs)}")
            inputs.append(wanted)
        free.append((ends[key], wanted, given))
        write_to(node, given, shape=tuple(made.shape))
    return tuple(inputs)


def write_to(node: fx.Node, target: fx.Node, shape: tuple[int, ...] | None = None) -> None:
    """Have an op that has an ``out`` variant write its result to another tensor.

    Args:
        node: The op.
        target: The tensor.
        shape: The shape in which it is written; that of the tensor by default.
    """
    found = out_variant(node.target)
    assert found is not None
    overload, name = found
    if shape is not None:
        with node.graph.inserting_before(node):
            target = node.graph.call_function(aten.view.default, (target, list(shape)))
    node.target = overload
    node.kwargs = {**node.kwargs, name: target}


@functools.cache
def out_variant(op: object) -> tuple[OpOverload, str] | None:
    """The overload of an op that writes to a given tensor, and the name of that argument; None if there is none.

    Those that torch generates are left out: they compute a new tensor and copy it.
    """
    op = _WITH_NUMBER.get(op, op)
    if not isinstance(op, OpOverload) or op.namespace != "aten" or len(op._schema.returns) != 1:
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = op.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        arguments = overload._schema.arguments
        if not arguments:
            continue
        *rest, last = arguments
        writes = last.kwarg_only and last.alias_info is not None and last.alias_info.is_write
        if writes and [(a.name, str(a.type)) for a in rest] == wanted and torch.Tag.generated not in overload.tags:
            return overload, last.name
    return None


_WITH_NUMBER: Final[dict[object, OpOverload]] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}
"""Ops of a tensor and a number by those of tensors, as which torch computes them, and which take a number too."""


def _writes_elsewhere(node: fx.Node) -> bool:
    """Whether the result of an op can be written to a buffer."""
    made = node.meta.get("val")
    if node.op != "call_function" or not isinstance(made, torch.Tensor) or out_variant(node.target) is None:
        return False
    return made.device.type == "cpu" and made.is_contiguous()


def _last_uses(nodes: list[fx.Node]) -> dict[int, int]:
    """Storage to the position of the last node that makes it, views it or reads it."""
    return {
        storage_key(t): position
        for position, node in enumerate(nodes)
        for read in (node, *node.all_input_nodes)
        for t in leaves(read.meta.get("val"))
    }
