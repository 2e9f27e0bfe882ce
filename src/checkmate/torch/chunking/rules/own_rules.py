"""Rules of single ops that torch's library lacks, or that hold for shards on devices but not for slices in time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch._compat.sharding import Layout
from checkmate.torch.chunking.rules import rule_families as families
from checkmate.torch.chunking.rules.op_call import OpCall
from checkmate.torch.chunking.rules.placements import SUM, WHOLE, Placement, Rule, Split
from checkmate.torch.chunking.rules.rule_families import OwnRules

aten = torch.ops.aten


def nll_loss(call: OpCall) -> Iterator[Rule]:
    """The loss of rows; torch's rule for the mean claims an average of averages, which is wrong where targets are ignored."""
    # The second output is the sum of weights, which is 0 without a reduction.
    for d in _places_of_targets(call):
        if call["reduction"] == 0:
            yield call.rule(0 if d == 0 else d - 1, WHOLE, self=d, target=0 if d == 0 else d - 1)
        elif call["reduction"] == 2:
            yield call.rule(SUM, SUM, self=d, target=0 if d == 0 else d - 1)


def nll_loss_backward(call: OpCall) -> Iterator[Rule]:
    """The gradient of rows; what it is divided by is an input."""
    for d in _places_of_targets(call):
        target = 0 if d == 0 else d - 1
        yield call.rule(d, grad_output=target if call["reduction"] == 0 else WHOLE, self=d, target=target)


def _places_of_targets(call: OpCall) -> list[int]:
    """Dimensions of the scores other than that of the classes, which is the second; one row alone has none."""
    rank = len(call["self"].shape)
    return [d for d in range(rank) if d != 1] if rank > 1 else []


def embedding(call: OpCall) -> Iterator[Rule]:
    """Tokens need the whole table; columns of the result need columns of the table."""
    rank = len(call["indices"].shape)
    yield from (call.rule(d, indices=d) for d in range(rank))
    yield call.rule(rank, weight=1)


def embedding_backward(call: OpCall) -> Iterator[Rule]:
    """Tokens are summed over, unless their frequencies scale the sum; columns are independent."""
    rank = len(call["indices"].shape)
    yield call.rule(1, grad_output=rank)
    if not call["scale_grad_by_freq"]:
        yield from (call.rule(SUM, grad_output=d, indices=d) for d in range(rank))


def attention(call: OpCall) -> Iterator[Rule]:
    """Attention of the CPU, forward: examples, heads, and queries that may look at all keys."""
    for d in _places_of_attention(call):
        keys = WHOLE if d == 2 else d
        yield call.rule(d, d, query=d, key=keys, value=keys, attn_mask=_place_in_mask(call["attn_mask"], d))


def attention_backward(call: OpCall) -> Iterator[Rule]:
    """Attention of the CPU, backward: every query adds to the gradients of all keys."""
    for d in _places_of_attention(call):
        keys = WHOLE if d == 2 else d
        summed = SUM if d == 2 else d
        yield call.rule(
            d, summed, summed,
            grad_out=d, query=d, key=keys, value=keys, out=d, logsumexp=d, attn_mask=_place_in_mask(call["attn_mask"], d),
        )  # fmt: skip


def attention_on_cuda(call: OpCall) -> Iterator[Rule]:
    """Attention of CUDA, forward: examples and heads.

    Torch's rule returns no placement for the state of the random generator, which without dropout nothing reads.
    """
    if call.get("return_debug_mask"):
        return
    for d in _examples_and_heads(call):
        states: list[Placement] = [WHOLE] * (len(call.outputs) - 2)
        yield call.rule(d, d, *states, query=d, key=d, value=d, attn_bias=_place_in_mask(call.get("attn_bias"), d))


def _places_of_attention(call: OpCall) -> list[int]:
    """Dimensions of (examples, heads, queries) that can be cut."""
    # With a causal mask the first query of a piece would see the first key alone.
    return _examples_and_heads(call) if call["is_causal"] else [*_examples_and_heads(call), 2]


def _examples_and_heads(call: OpCall) -> list[int]:
    # Several heads of queries may share one of keys.
    return [d for d in (0, 1) if call["query"].shape[d] == call["key"].shape[d] == call["value"].shape[d]]


def _place_in_mask(mask: Layout | None, d: int) -> Placement:
    if mask is None:
        return WHOLE
    own = d - 4 + len(mask.shape)
    return Split((own,)) if own >= 0 and mask.shape[own] > 1 else WHOLE


def convolution(call: OpCall) -> Iterator[Rule]:
    """Examples, and channels where all are connected or each is alone; torch cuts along pixels, with their neighbours."""
    if len(call["input"].shape) != len(call["weight"].shape):
        return
    outgoing, incoming = (1, 0) if call["transposed"] else (0, 1)
    yield call.rule(0, input=0)
    if call["groups"] == 1:
        yield call.rule(1, weight=outgoing, bias=0)
        if call["bias"] is None:
            yield call.rule(SUM, input=1, weight=incoming)
    elif _depthwise(call):
        yield call.rule(1, input=1, weight=0, bias=0)


def convolution_backward(call: OpCall) -> Iterator[Rule]:
    """As forward; the gradients of weight and bias are sums over examples."""
    if len(call["input"].shape) != len(call["weight"].shape):
        return
    outgoing, incoming = (1, 0) if call["transposed"] else (0, 1)
    yield call.rule(0, SUM, SUM, grad_output=0, input=0)
    if call["groups"] == 1:
        yield call.rule(SUM, outgoing, 0, grad_output=1, weight=outgoing)
        if not call["output_mask"][2]:
            yield call.rule(1, incoming, WHOLE, input=1, weight=incoming)
    elif _depthwise(call):
        yield call.rule(1, 0, 0, grad_output=1, input=1, weight=0)


def _depthwise(call: OpCall) -> bool:
    weight = call["weight"].shape
    return call["groups"] == weight[0] == call["input"].shape[1] and weight[1] == 1


def group_norm(call: OpCall) -> Iterator[Rule]:
    """Examples, each of which has its own statistics."""
    yield call.rule(0, 0, 0, input=0)


def group_norm_backward(call: OpCall) -> Iterator[Rule]:
    """Examples; the gradients of weight and bias are sums over them."""
    if call["output_mask"][0]:  # else no output tells how many examples a piece has
        yield call.rule(0, SUM, SUM, grad_out=0, input=0, mean=0, rstd=0)


def batch_norm(call: OpCall) -> Iterator[Rule]:
    """Channels; and examples where the statistics are constants, so that those of the examples are not computed."""
    channels = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), 0)
    if call.get("training"):
        yield call.rule(1, 0, 0, input=1, **channels)
    else:
        # The other outputs are empty on the CPU; what a piece returns in their place elsewhere is that of the whole.
        yield call.rule(0, WHOLE, WHOLE, input=0)


def batch_norm_backward(call: OpCall) -> Iterator[Rule]:
    """Channels; and examples where the statistics are constants, not those of the examples."""
    channels = dict.fromkeys(("weight", "running_mean", "running_var", "save_mean", "save_invstd"), 0)
    yield call.rule(1, 0, 0, grad_out=1, input=1, **channels)
    # Of one example that is a slice the CPU's kernel reads the gradient in the layout of the input (torch 2.13.0).
    if not call["train"] and call["grad_out"].stride == call["input"].stride:
        yield call.rule(0, SUM, SUM, grad_out=0, input=0)


_IMAGES: Final[dict[OwnRules, tuple[OpOverload, ...]]] = {
    families.all_but_last(1): (
        aten.reflection_pad1d.default, aten.reflection_pad1d_backward.default, aten.replication_pad1d.default,
        aten.replication_pad1d_backward.default, aten.upsample_linear1d.vec, aten.upsample_nearest1d.vec,
        aten.view_as_real.default,
    ),
    families.all_but_last(2): (
        aten.avg_pool2d_backward.default, aten.adaptive_max_pool2d_backward.default, aten.reflection_pad2d.default,
        aten.reflection_pad2d_backward.default, aten.replication_pad2d.default, aten.replication_pad2d_backward.default,
        aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec, aten.tril.default,
        aten.triu.default,
    ),
    families.all_but_last(3): (
        aten.avg_pool3d_backward.default, aten.max_pool3d_with_indices_backward.default, aten.pixel_shuffle.default,
        aten.pixel_unshuffle.default, aten.upsample_nearest3d.vec, aten.upsample_trilinear3d.vec,
    ),
}  # fmt: skip

OWN_RULES: Final[dict[OpOverload, OwnRules]] = {
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default, aten.detach.default,
         aten.unsqueeze.default),
        families.view,
    ),
    aten.expand.default: families.expand,
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), families.permute),
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), families.squeeze),
    aten.unbind.int: families.removed,
    aten.logsumexp.default: families.reduced_over,
    aten.select_backward.default: families.added,
    aten.stack.default: families.added,
    # Torch's rules take a negative dimension of cumulative sums for another one.
    **dict.fromkeys(
        (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default,
         aten.glu.default, aten.glu_backward.default),
        families.along,
    ),
    # Not marked as pointwise in torch, or without a rule there all the same.
    **dict.fromkeys(
        (aten.hardtanh_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default,
         aten.hardsigmoid_backward.default, aten.hardswish.default, aten.hardswish_backward.default,
         aten.softplus_backward.default, aten.mish_backward.default, aten.log_sigmoid_forward.default,
         aten.log_sigmoid_backward.default, aten.hardshrink_backward.default, aten.softshrink_backward.default,
         aten._prelu_kernel.default, aten._prelu_kernel_backward.default, aten.copy.default, aten.masked_fill.Tensor,
         aten.floor_divide.default, aten.rsub.Tensor, aten.fill.Scalar, aten.fill.Tensor),
        families.elementwise,
    ),
    **dict.fromkeys(
        (aten.mse_loss.default, aten.mse_loss_backward.default, aten.smooth_l1_loss.default,
         aten.smooth_l1_loss_backward.default, aten.huber_loss.default, aten.huber_loss_backward.default,
         aten.soft_margin_loss.default, aten.soft_margin_loss_backward.default, aten.binary_cross_entropy.default,
         aten.binary_cross_entropy_backward.default, aten.binary_cross_entropy_with_logits.default),
        families.reduced,
    ),
    **dict.fromkeys(
        (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default), families.filled
    ),
    **{op: rules for rules, ops in _IMAGES.items() for op in ops},
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), nll_loss),
    **dict.fromkeys((aten.nll_loss_backward.default, aten.nll_loss2d_backward.default), nll_loss_backward),
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    aten._scaled_dot_product_flash_attention_for_cpu.default: attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: attention_backward,
    **dict.fromkeys(
        (aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default,
         aten._scaled_dot_product_cudnn_attention.default),
        attention_on_cuda,
    ),
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    **dict.fromkeys((aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default), batch_norm),
    aten.native_batch_norm_backward.default: batch_norm_backward,
}  # fmt: skip
"""Op to what computes its rules; torch's library is not asked for these."""
