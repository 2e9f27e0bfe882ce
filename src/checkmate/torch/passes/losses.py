"""Rewrites of losses that let their inputs be computed and used piece by piece, and the storages of reduced losses.

``nll_loss`` reads the log-probabilities of all tokens and returns one number, and its gradient depends on the number of
targets. Rewritten, it picks one log-probability for each token, and the same kernel sums the picks: the order of the sum is the
kernel's, and pieces change no bit. The number of targets is computed from the targets.

Ops such as ``ones_like(loss)``, with which a whole step begins its backward, only read a shape. As a data dependency it would
make the backward of the first piece wait for the forward of the last.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from checkmate.torch.graph.storages import concrete
from checkmate.torch.graph.traced import caller

aten = torch.ops.aten
_NLL = aten.nll_loss_forward.default
_NONE = 0  # at::Reduction::None


def pick_before_reducing(graph: fx.Graph) -> None:
    """Let each ``nll_loss`` with unweighted classes pick per token first and reduce after, in place."""
    for node in graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default):
        if node.args[4] == _NONE:  # it ignores the total weight of all tokens, and need not wait for it
            total = node.args[6].meta["val"]  # type: ignore[union-attr]
            with graph.inserting_before(node):
                node.update_arg(6, caller(graph, node)(aten.full.default, [], 0, dtype=total.dtype, device=total.device))
    for node in graph.find_nodes(op="call_function", target=_NLL):
        log_p, target, weight, reduction, ignore = node.args
        if reduction != _NONE and weight is None and log_p.meta["val"].dim() == 2:
            _pick(graph, node, log_p, target, reduction, ignore)


def _pick(graph: fx.Graph, node: fx.Node, log_p: fx.Node, target: fx.Node, reduction: int, ignore: int) -> None:
    call = caller(graph, node)
    with graph.inserting_before(node):
        picks = call(operator.getitem, call(_NLL, log_p, target, None, _NONE, ignore), 0)
        column = call(aten.unsqueeze.default, call(aten.neg.default, picks), 1)
        counted = call(aten.ne.Scalar, target, ignore)
        # The class of each pick in its one column: 0, or the class to ignore. It equals target - target * counted.
        classes = call(aten.sub.Tensor, target, call(aten.mul.Tensor, target, counted))
        count = call(aten.sum.dim_IntList, counted, [0])
        total_weight = call(aten._to_copy.default, count, dtype=log_p.meta["val"].dtype)
        reduced = call(_NLL, column, classes, None, reduction, ignore)
    reduced.meta["val"] = node.meta["val"]  # the storages of results and views of the old node
    for user in [u for u in node.users if u.target is operator.getitem and u.args[1] == 1]:
        user.replace_all_uses_with(total_weight)
        graph.erase_node(user)
    node.replace_all_uses_with(reduced)
    graph.erase_node(node)


def fill_without_input(graph: fx.Graph) -> None:
    """Replace ops such as ``ones_like`` by ``full``, which reads nothing, in place."""
    filled = {aten.ones_like: 1, aten.new_ones: 1, aten.zeros_like: 0, aten.new_zeros: 0}
    found = [(n, value) for op, value in filled.items() for n in graph.find_nodes(op="call_function", target=op.default)]
    for node, value in found:
        made = node.meta["val"]
        if not made.is_contiguous() or not all(isinstance(n, int) for n in made.shape):
            continue
        with graph.inserting_before(node):
            full = graph.call_function(aten.full.default, (list(made.shape), value), {"dtype": made.dtype, "device": made.device})
        full.meta = dict(node.meta)
        node.replace_all_uses_with(full)
        graph.erase_node(node)


def correct_loss_storages(graph: fx.Graph) -> None:
    """Give the scalar result of a reduced loss the storage that its CPU kernel allocates: one element per input element.

    The kernels write the elementwise loss into the result and reduce it in place (``aten/src/ATen/native/Loss.cpp``): the scalar
    keeps the larger storage alive. Fake tensors do not show this, and the plan would lack the size of the prediction. A test
    compares every op of torch's own op database; only these ops do so. The fake tensors in the metadata of the graph are resized
    in place.
    """
    losses = (aten.binary_cross_entropy, aten.mse_loss, aten.smooth_l1_loss, aten.soft_margin_loss)
    for node in [n for loss in losses for n in graph.find_nodes(op="call_function", target=loss.default)]:
        value = node.meta["val"]
        size = max(concrete(n.meta["val"].numel()) for n in node.all_input_nodes) * value.element_size()
        if concrete(value.untyped_storage().nbytes()) < size:
            value.untyped_storage().resize_(size)
