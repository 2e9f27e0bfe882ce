"""Gradients that are computed in the forward, with a tangent of one in place of the true one.

The only value between forward and backward of a loss is its tangent, a scalar that is one unless the caller scales the loss. A
region with the head of a language model and its loss can therefore compute its gradients with a tangent of one as soon as it has
the logits of a piece, and need not compute these again in the backward. The backward multiplies the gradients by the true
tangent: every op between is linear in it, which is checked. Multiplying by one changes no bit. Liger Kernel does this by hand.

A custom `torch.autograd.Function` may do anything with a gradient: an op counts as linear only if it is known to be linear, and
only if no term is added that does not depend on the tangent.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.engine import keeps_graph
from checkmate.torch.chunking.regions import Region
from checkmate.torch.graph.op_properties import makes_views
from checkmate.torch.graph.traced import ancestors, descendants, inputs, outputs, producer, size_bytes, tensor

aten = torch.ops.aten

# A fragment: the library itself is defined in checkmate.torch.graph.optimizer_ops.
_library = torch.library.Library("checkmate", "FRAGMENT")
_library.define("scale_(Tensor(a!) gradient, Tensor factor) -> Tensor(a!)")

SCALE = torch.ops.checkmate.scale_.default


@dataclass(frozen=True, eq=False, slots=True)
class UnitTangent:
    """The only tangent that a region depends on, taken to be one: the tangent of a scalar."""

    tangent: fx.Node
    between: tuple[fx.Node, ...]  # ops outside of the region through which it depends on the tangent, in the order of the graph
    scaled: frozenset[fx.Node]  # tensors made in the region that are linear in the tangent


def unit_tangent_of(region: Region, graph: fx.Graph) -> UnitTangent | None:
    """The tangent with which a region can compute its gradients in the forward; None if it cannot."""
    before = ancestors(region.rules)
    tangents = [node for node in before if is_tangent(node)]
    if len(tangents) != 1 or tensor(tangents[0]).numel() != 1:
        return None
    dependent = {*tangents}
    follows = descendants(region.rules, within=before)
    between: list[fx.Node] = []
    for node in graph.nodes:
        inside = producer(node) in region.rules
        if not (inside or node in before) or not any(n in dependent for n in node.all_input_nodes):
            continue
        if node is producer(node):
            made = [value for value in outputs(node) if value is not None]
            if not is_linear(node, dependent) or any(tensor(value).dtype is torch.float16 for value in made):
                return None  # in half precision a tangent of one would lose small gradients, unlike a loss scale
            if not inside and any(size_bytes(value) > region.length * tensor(value).element_size() for value in made):
                return None  # a network is between, not a loss
        dependent.add(node)
        if not inside and node in follows:
            return None  # the op and the region would wait for each other
        if not inside:
            between.append(node)
    return UnitTangent(tangents[0], tuple(between), frozenset(dependent.difference(tangents, between)))


def is_linear(op: fx.Node, dependent: Set[fx.Node]) -> bool:
    """Whether all results of an op are linear, without a constant term, in the inputs that depend on something."""
    read = [value in dependent for value in inputs(op)]
    if makes_views(op) or op.target in _IN_FIRST:
        return read[0] and not any(read[1:])
    if op.target in _IN_EACH:
        return sum(read) == 1
    if op.target in _IN_ALL:
        return all(read) and all(isinstance(a, (fx.Node, list, tuple)) for a in op.args[: len(read)])
    if op.target is aten.where.self:
        return not read[0] and any(read[1:]) and all(depends or _is_zero(op.args[i]) for i, depends in enumerate(read) if i)
    if op.target in (aten.masked_fill.Scalar, aten.constant_pad_nd.default):  # in the first argument, if zero is filled in
        filled = op.args[2:]  # left out if it is the default, zero
        return read[0] and not any(read[1:]) and all(value == 0 for value in (*filled, *op.kwargs.values()))
    return False


def _is_zero(value: object) -> bool:
    """Whether a node makes zeros and nothing else."""
    filled = {aten.full.default: 1, aten.scalar_tensor.default: 0}
    return isinstance(value, fx.Node) and value.target in filled and value.args[filled[value.target]] == 0  # type: ignore[index]


_IN_FIRST: Final[frozenset[object]] = frozenset(
    {
        *(aten.neg.default, aten._to_copy.default, aten.clone.default, aten.view.default, aten._unsafe_view.default),
        *(torch.ops.prims.convert_element_type.default, aten.mul.Scalar, aten.div.Scalar, aten.div.Tensor),
        *(aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.expand.default),
        *(aten.slice_backward.default, aten.select_backward.default, aten.embedding_dense_backward.default),
        *(aten.nll_loss_backward.default, aten._log_softmax_backward_data.default, aten._softmax_backward_data.default),
        *(aten.tanh_backward.default, aten.sigmoid_backward.default, aten.gelu_backward.default, aten.silu_backward.default),
        *(aten.threshold_backward.default, aten.native_dropout_backward.default),
    }
)
"""Ops that are linear in their first argument."""

_IN_EACH: Final[frozenset[object]] = frozenset(
    {aten.mm.default, aten.bmm.default, aten.mul.Tensor, aten.mv.default, aten.dot.default}
)
"""Products, which are linear in each factor."""

_IN_ALL: Final[frozenset[object]] = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default})
"""Ops that are linear in all of their tensors together."""


@torch.library.impl(_library, "scale_", "CompositeExplicitAutograd")
def _scale(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    if keeps_graph():  # another backward will read the unscaled gradient
        return gradient * factor
    # As a new tensor with the same storage: autograd takes over a gradient, without a copy, only if it has no other owner.
    return gradient.mul_(factor).detach()


@torch.library.register_fake("checkmate::scale_", lib=_library)
def _traced(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return gradient
