"""Split the backward of each convolution into one op per gradient."""

from __future__ import annotations

import operator

import torch
from torch import fx

_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default
_OUTPUT_MASK = 10
"""Position of ``output_mask`` in the schema of ``convolution_backward`` (``native_functions.yaml``): three flags, for the
gradients of input, weight and bias."""


def split_convolution_backward(graph: fx.Graph) -> None:
    """Replace each ``convolution_backward`` by two: one for the gradient of the input, one for those of weight and bias.

    A single op allocates the weight's gradient together with the input's, and holds it to the end of the step. As a
    separate op it can be scheduled later; until then only the activations that it reads are held, which are usually
    smaller. Results are bitwise equal.

    Args:
        graph: A joint graph; changed in place.
    """
    for node in graph.find_nodes(op="call_function", target=_CONVOLUTION_BACKWARD, sort=True):
        mask = node.args[_OUTPUT_MASK]
        if not (mask[0] and mask[1]) or any(user.target is not operator.getitem for user in node.users):
            continue
        weights = [user for user in node.users if user.args[1] != 0]
        value = node.meta["val"]
        with graph.inserting_after(node):
            second = graph.call_function(node.target, (*node.args[:_OUTPUT_MASK], [False, mask[1], mask[2]]), dict(node.kwargs))
        second.meta = {**node.meta, "val": (None, *value[1:])}
        node.args = (*node.args[:_OUTPUT_MASK], [True, False, False])
        node.meta = {**node.meta, "val": (value[0], None, None)}
        after = second
        for user in weights:
            user.args = (second, user.args[1])
            after.append(user)
            after = user
