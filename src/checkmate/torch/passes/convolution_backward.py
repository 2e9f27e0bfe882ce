"""Split the backward of convolutions into one op per gradient."""

from __future__ import annotations

import operator

import torch
from torch import fx

_CONVOLUTION_BACKWARD = torch.ops.aten.convolution_backward.default


_OUTPUT_MASK = 10  # position of `output_mask`: whether the gradients of input, weight and bias are wanted


def split_convolution_backward(graph: fx.Graph) -> None:
    """Make two ops of every convolution's backward: one for the input's gradient, one for the weight's.

    In one op the weight's gradient is born with the input's and stays to the end of the step. By itself
    it can wait, while only the usually smaller activations that it is made of are held.
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
