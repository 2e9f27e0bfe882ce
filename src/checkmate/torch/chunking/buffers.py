"""Buffers that the pieces of a program share.

The C library returns every large allocation to the system when it is freed, and gets it back page by page: in the head of a
language model with 128,256 words that took a fifth of the time (4,096 tokens in 32 pieces, on a CPU). The largest tensors of a
piece are therefore written into buffers that live as long as the program runs. There are at most as many buffers as tensors
that exist at once: an op writes over its first operand if no later op reads that and the kernel computes number by number, or
row by row. CUDA's allocator keeps freed memory, and needs no buffers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch.chunking.rules.placements import Layout
from checkmate.torch.graph.op_properties import is_pointwise
from checkmate.torch.graph.storages import leaves, storage_bytes, storage_key
from checkmate.torch.measure.estimates import last_uses

aten = torch.ops.aten


def share_buffers(graph: fx.Graph) -> tuple[Layout, ...]:
    """Have the ops of a piece write their largest tensors into buffers, which become the last inputs of the graph."""
    nodes = list(graph.nodes)
    ends = last_uses(nodes)
    most = max((storage_bytes(node.meta["val"]) for node in nodes if _writes_elsewhere(node)), default=0)
    last_input = [node for node in nodes if node.op == "placeholder"][-1]
    slots: list[_Slot] = []
    for position, node in enumerate(nodes):
        key = storage_key(node.meta["val"]) if _writes_elsewhere(node) else None
        if key is None or storage_bytes(node.meta["val"]) < most or ends[key] == len(nodes) - 1:  # the output node reads it
            continue
        made = node.meta["val"]
        wanted = Layout((made.numel(),), (1,), made.dtype, made.device)
        alike = [slot for slot in slots if slot.buffer == wanted]
        slot = next((slot for slot in alike if ends[slot.held] == position and _may_overwrite(node, slot)), None)
        slot = slot or next((slot for slot in alike if ends[slot.held] < position), None)
        if slot is None:
            with graph.inserting_after(last_input):
                last_input = graph.placeholder(f"buffer_{len(slots)}")
            slot = _Slot(wanted, last_input, node, key)
            slots.append(slot)
        slot.writer, slot.held = node, key
        with graph.inserting_before(node):
            write_to(node, graph.call_function(aten.view.default, (slot.given, list(made.shape))))
    return tuple(slot.buffer for slot in slots)


@dataclass(slots=True)
class _Slot:
    """A buffer at a point of the graph."""

    buffer: Layout
    given: fx.Node
    writer: fx.Node
    held: int


_BY_ROWS: Final = frozenset(
    {
        aten._softmax.default,
        aten._log_softmax.default,
        aten._softmax_backward_data.default,
        aten._log_softmax_backward_data.default,
    }
)
"""Ops whose kernels reduce a row and then compute it number by number from the same row."""

_RESHAPES: Final = frozenset({aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.detach.default})
"""Ops that return all of a contiguous tensor in its order, as another contiguous one."""


def _may_overwrite(node: fx.Node, slot: _Slot) -> bool:
    """Whether an op may write over a buffer: the buffer of its first operand alone, number by number in the same places.

    Strides have to be the same even if a dimension has one element, or torch takes the two for overlapping. The strides of a
    buffer differ from the traced strides: the operand must be the tensor that was written, or a plain reshape of it.
    """
    if node.target not in _BY_ROWS and not is_pointwise(node):
        return False
    first = node.args[0]
    holders = [each for each in node.all_input_nodes if slot.held in map(storage_key, leaves(each.meta["val"]))]
    if holders != [first]:
        return False
    written = holders[0]
    while written is not slot.writer and written.target in _RESHAPES:
        written = written.all_input_nodes[0]
    return written is slot.writer and holders[0].meta["val"].shape == node.meta["val"].shape


def write_to(node: fx.Node, target: fx.Node) -> None:
    """Have an op that has an ``out`` variant write its result to another tensor."""
    found = out_variant(node.target)
    assert found is not None
    overload, name = found
    node.target = overload
    node.kwargs = {**node.kwargs, name: target}


@functools.cache
def out_variant(op: object) -> tuple[OpOverload, str] | None:
    """The overload of an op that writes to a given tensor, and the name of that argument; None if there is none.

    Overloads that torch generates are left out: they compute a new tensor and copy it.
    """
    op = _WITH_NUMBER.get(op, op)
    if not isinstance(op, OpOverload) or op.namespace != "aten" or len(op._schema.returns) != 1:
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments]
    packet = op.overloadpacket
    for overload in (getattr(packet, name) for name in packet.overloads()):
        given = [(a.name, str(a.type)) for a in overload._schema.arguments if not a.is_out]
        written = [a.name for a in overload._schema.arguments if a.is_out]
        if len(written) == 1 and given == wanted and torch.Tag.generated not in overload.tags:
            return overload, written[0]
    return None


_WITH_NUMBER: Final[dict[object, OpOverload]] = {
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
}
"""Ops of a tensor and a number, by the ops of two tensors by which torch computes them; the latter take a number too."""


def _writes_elsewhere(node: fx.Node) -> bool:
    """Whether the result of an op can be written to a buffer."""
    made = node.meta.get("val")
    if node.op != "call_function" or not isinstance(made, torch.Tensor) or out_variant(node.target) is None:
        return False
    return made.device.type == "cpu" and made.is_contiguous()
