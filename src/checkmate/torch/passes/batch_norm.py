"""BatchNorm by cuDNN, where PyTorch's eager mode selects cuDNN.

AOTAutograd always traces PyTorch's native kernels, which are slower in float32, sum in another order, and give new running
statistics that other ops copy into the buffers. ``_batch_norm_with_update`` selects its kernel as eager mode does, and
updates the buffers itself. Without cuDNN it runs the native kernel: results do not depend on `selects_cudnn`.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from checkmate.torch._compat.dispatch import cudnn_reserve_bytes
from checkmate.torch.graph.op_properties import (
    BATCH_NORM,
    BATCH_NORM_NO_STATS,
    BATCH_NORM_UPDATE,
    trains_batch_norm,
    used_inputs,
    without_update,
)
from checkmate.torch.graph.storages import concrete
from checkmate.torch.graph.traced import tensor

aten = torch.ops.aten


def use_cudnn_batch_norm(graph: fx.Graph) -> None:
    """Replace each BatchNorm in training for which eager mode selects cuDNN, its backward, and the count of batches, in place."""
    norms = [n for n in graph.nodes if n.target in (BATCH_NORM, BATCH_NORM_NO_STATS) and n.args[-3] is True]
    norms = [n for n in norms if None not in n.args[1:3] and selects_cudnn(_fixed(n.args[0]), tensor(n.args[1]))]
    norms = [n for n in norms if _replace(graph, n)]
    for norm in norms:
        with graph.inserting_after(norm):
            reserve = graph.call_function(operator.getitem, (norm, 3))  # what only cuDNN saves for its backward
        reserve.meta = {**norm.meta, "val": norm.meta["val"][3]}
        for node in [reader for output in norm.users if output.args[1] == 1 for reader in output.users]:
            if node.target is aten.native_batch_norm_backward.default:
                node.target, node.args = aten.batch_norm_backward.default, (*node.args, reserve)
    if norms:
        _count_together(graph)
    graph.lint()


def selects_cudnn(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether eager mode selects cuDNN for a BatchNorm in training on a CUDA device, which need not be present.

    These are the rules of ``_select_batch_norm_backend`` in ``aten/src/ATen/native/Normalization.cpp`` of PyTorch 2.11. Eager
    mode makes the input contiguous before, and the op does not: any other input is left to the native kernel.
    """
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    dense = x.is_contiguous() or (x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]))
    typed = torch.bfloat16 not in (x.dtype, weight.dtype) and (x.dtype is not torch.float16 or weight.dtype is torch.float32)
    sized = x.dim() >= 3 and x.shape[0] <= 880801 and x.numel() < 2**31 - 1
    return x.device.type == "cuda" and torch.version.hip is None and torch.backends.cudnn.enabled and dense and typed and sized


def _fixed(node: fx.Node) -> torch.Tensor:
    """A tensor as a traced one, with every symbolic size at its upper bound."""
    x = tensor(node)
    with x.fake_mode:  # type: ignore[attr-defined]
        return x.new_empty_strided([concrete(n) for n in x.shape], [concrete(n) for n in x.stride()])


def _replace(graph: fx.Graph, node: fx.Node) -> bool:
    """Replace a BatchNorm, if its new statistics go only into its buffers, to the next call of the same layer, or nowhere."""
    new = {made: [u for u in made.users if made in used_inputs(u)] for made in node.users if made.args[1] in (3, 4)}
    updates = any(new.values())
    for made, readers in new.items() if updates else ():
        buffer = node.args[made.args[1]]  # type: ignore[index]
        known = [trains_batch_norm(r) or (r.target is aten.copy_.default and r.args[0] is buffer) for r in readers]
        if known != [True] or buffer.op != "placeholder":  # type: ignore[union-attr]
            return False
    arguments = (*node.args[:3], *(node.args[3:5] if node.target is BATCH_NORM else (None, None)), *node.args[-2:])
    for made, readers in new.items():
        for copy in [r for r in readers if r.target is aten.copy_.default]:
            graph.erase_node(copy)
        made.replace_all_uses_with(arguments[made.args[1]])  # type: ignore[arg-type, index]
        graph.erase_node(made)
    node.target, node.args = (BATCH_NORM_UPDATE, arguments) if updates else without_update(BATCH_NORM_UPDATE, arguments)
    x, made = _fixed(arguments[0]), node.meta["val"][:3]  # type: ignore[arg-type]
    with x.fake_mode:  # type: ignore[attr-defined]
        reserve = x.new_empty(cudnn_reserve_bytes(x), dtype=torch.uint8)
        node.meta["val"] = (*made, reserve, *(() if updates else map(torch.empty_like, made[1:])))
    return True


def _count_together(graph: fx.Graph) -> None:
    """Add 1 to all buffers of a graph that only count by one op, in place of an addition and a copy for each."""
    copies = [(n, *n.args[:2]) for n in graph.find_nodes(op="call_function", target=aten.copy_.default, sort=True)]
    copies = [c for c in copies if c[2].target is aten.add.Tensor and c[2].args == (c[1], 1) and set(c[2].users) == {c[0]}]
    counts = [c for c in copies if set(c[1].users) == {c[0], c[2]}]
    if counts:
        last = counts[-1][0]
        with graph.inserting_before(last):
            together = graph.call_function(aten._foreach_add_.Scalar, ([counter for _, counter, _ in counts], 1))
        together.meta = {**last.meta, "val": None}
    for copy, _, added in counts:
        graph.erase_node(copy)
        graph.erase_node(added)
