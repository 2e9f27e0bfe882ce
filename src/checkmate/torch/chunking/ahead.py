"""Gradients that are computed in the forward, ahead of the backward.

Between forward and backward of a loss comes only its tangent, a scalar that is one unless the caller scales the loss. A region
with the head of a language model and its loss can therefore compute its gradients with a tangent of one as soon as it has the
logits of a piece, instead of making these again in the backward. The backward multiplies the gradients by the true tangent: every
op between is linear in it, which is checked. A multiplication by one changes no bit. Liger Kernel does the same by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.engine import keeps_graph
from checkmate.torch.chunking.graph_values import ancestors, outputs, producer, size_bytes, tensor
from checkmate.torch.chunking.linear import is_linear
from checkmate.torch.chunking.regions import Region

# A fragment: the library itself is defined in checkmate.torch.graph.optimizer_ops.
_library = torch.library.Library("checkmate", "FRAGMENT")
_library.define("scale_(Tensor(a!) gradient, Tensor factor) -> Tensor(a!)")

SCALE = torch.ops.checkmate.scale_.default


@dataclass(frozen=True, eq=False, slots=True)
class Ahead:
    """How a region depends on the one tangent that it depends on.

    Attributes:
        tangent: The tangent of a scalar.
        between: The ops outside of the region by which it depends on the tangent, in the order of the graph.
        scaled: The tensors made in the region that are linear in the tangent.
    """

    tangent: fx.Node
    between: tuple[fx.Node, ...]
    scaled: frozenset[fx.Node]

    @property
    def inner(self) -> frozenset[fx.Node]:
        """The tangent and the ops between."""
        return frozenset({self.tangent, *self.between})


def ahead_of(region: Region, graph: fx.Graph) -> Ahead | None:
    """How a region can compute its gradients ahead of the backward; None if it cannot.

    Args:
        region: The region.
        graph: Its graph.
    """
    before = ancestors(region.rules)
    tangents = [node for node in before if is_tangent(node)]
    if len(tangents) != 1 or tensor(tangents[0]).numel() != 1:
        return None
    dependent = {*tangents}
    follows: set[fx.Node] = set()  # what depends on the region
    between: list[fx.Node] = []
    most = region.splits[region.seed].length(tensor(region.seed).shape)
    for node in graph.nodes:
        inside = producer(node) in region.rules
        if inside or not follows.isdisjoint(node.all_input_nodes):
            follows.add(node)
        if not (inside or node in before) or not any(n in dependent for n in node.all_input_nodes):
            continue
        if node is producer(node):
            made = [value for value in outputs(node) if value is not None]
            if not is_linear(node, dependent) or any(tensor(value).dtype is torch.float16 for value in made):
                return None  # in half precision a tangent of one instead of a loss scale would lose small gradients
            if not inside and any(size_bytes(value) > most * tensor(value).element_size() for value in made):
                return None  # a network is between, not a loss
        dependent.add(node)
        if not inside and node in follows:
            return None  # it would wait for the region, and the region for it
        if not inside:
            between.append(node)
    return Ahead(tangents[0], tuple(between), frozenset(dependent.difference(tangents, between)))


@torch.library.impl(_library, "scale_", "CompositeExplicitAutograd")
def _scale(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    if keeps_graph():  # another backward will read the gradient as it is
        return gradient * factor
    # As a new tensor, of the same storage: autograd takes over a gradient, without a copy, only if nothing else holds it.
    return gradient.mul_(factor).detach()


@torch.library.register_fake("checkmate::scale_", lib=_library)
def _traced(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return gradient
