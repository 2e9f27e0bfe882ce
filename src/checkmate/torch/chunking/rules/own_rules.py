"""Rules of single ops that torch's library lacks, or that hold for shards on devices but not for slices in time.

Each function of this module gives candidates: `checkmate.torch.chunking.rules.lookup` drops those that cut a dimension of one
element or dimensions of different lengths, and adds the cuts of two neighbouring dimensions at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch._compat.sharding import Layout
from checkmate.torch.chunking.rules.placements import SUM, WHOLE, Placement, Rule, Split

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op and its arguments: a `Layout` for each tensor, and tuples for lists."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Layout | None, ...]  # None for other objects

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the op's schema, or its default; None if the op has no such argument."""
        given = dict(self.kwargs)
        for position, argument in enumerate(self.op._schema.arguments):
            if argument.name == name:
                return self.args[position] if position < len(self.args) else given.get(name, argument.default_value)
        return None

    @property
    def inputs(self) -> list[tuple[str, Layout]]:
        """The tensors among the arguments, in the order of `torch.utils._pytree`, with the names of the arguments."""
        names = [argument.name for argument in self.op._schema.arguments]
        # Arguments after the named ones do not exist: only operators with keyword arguments have more.
        arguments = [*zip(names, self.args, strict=False), *self.kwargs]
        return [(name, tensor) for name, value in arguments for tensor in _tensors(value)]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of the first input and the first output."""
        first = self.outputs[0]
        assert first is not None
        return self.inputs[0][1].shape, first.shape

    def rule(self, /, *outputs: Placement | int, **inputs: Placement | int | None) -> Rule:
        """A rule for this call; a number is the dimension that is cut, and tensors that are not named are read whole."""
        pairs = zip(self.outputs, outputs, strict=True)
        returned: tuple[Placement | None, ...] = tuple(None if out is None else _placement(p) for out, p in pairs)
        return Rule(returned, tuple(_placement(inputs.get(name, WHOLE)) for name, _ in self.inputs))


def _tensors(value: Any) -> list[Layout]:
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, Layout) else []


def _placement(given: Placement | int | None) -> Placement:
    if given is None:
        return WHOLE
    return Split((given,)) if isinstance(given, int) else given


OwnRules: TypeAlias = Callable[[OpCall], Iterator[Rule]]
"""From a call to candidates for its rules."""


def _dimensions(pairs: Callable[[OpCall], Iterable[tuple[int, int]]]) -> OwnRules:
    """Rules of ops by which a dimension of all inputs becomes a dimension of all outputs; ``pairs`` gives both dimensions."""

    def rules(call: OpCall) -> Iterator[Rule]:
        for before, after in pairs(call):
            outputs = tuple(None if out is None else Split((after,)) for out in call.outputs)
            yield Rule(outputs, (Split((before,)),) * len(call.inputs))

    return rules


def _but_last(count: int) -> OwnRules:
    """Ops on the last dimensions, such as the pixels of images: those before can be cut."""
    return _dimensions(lambda call: ((d, d) for d in range(len(call.shapes[0]) - count)))


@_dimensions
def _along(call: OpCall) -> Iterator[tuple[int, int]]:
    """Ops along one dimension; all other dimensions can be cut."""
    rank = len(call.shapes[0])
    return ((d, d) for d in range(rank) if d != call["dim"] % rank)


@_dimensions
def _permuted(call: OpCall) -> Iterator[tuple[int, int]]:
    """Transpositions."""
    rank = len(call.shapes[0])
    order = list(range(rank))
    if call.op is aten.permute.default:
        order = [d % rank for d in call["dims"]]
    elif rank > 1:
        a, b = (0, 1) if call.op is aten.t.default else (call["dim0"] % rank, call["dim1"] % rank)
        order[a], order[b] = order[b], order[a]
    return ((before, after) for after, before in enumerate(order))


@_dimensions
def _squeezed(call: OpCall) -> Iterator[tuple[int, int]]:
    """Dimensions of one element vanish; longer dimensions that are named cannot be cut, as a piece may have one element."""
    shape, given = call.shapes[0], call["dim"]
    named = {d % len(shape) for d in (given if isinstance(given, tuple) else (given,))} if shape else set[int]()
    kept = [d for d in range(len(shape)) if not (d in named and shape[d] == 1)]
    return ((before, after) for after, before in enumerate(kept) if before not in named)


@_dimensions
def _added(call: OpCall) -> Iterator[tuple[int, int]]:
    """Ops whose result has one dimension more than the inputs; torch's rules know no cut of a stack (2.13.0)."""
    rank = len(call.shapes[1])
    return ((before, after) for before, after in enumerate(d for d in range(rank) if d != call["dim"] % rank))


@_dimensions
def _padded(call: OpCall) -> Iterator[tuple[int, int]]:
    """Padding; dimensions that stay as long as they are can be cut."""
    rank = len(call.shapes[0])
    return ((d, d) for d in range(rank) if not any(call["pad"][2 * (rank - 1 - d) :][:2]))


@_dimensions
def _removed(call: OpCall) -> Iterator[tuple[int, int]]:
    """Ops whose results lack dimensions of the input, and reductions whose terms cannot be added up.

    Torch's rule for `logsumexp` forgets that the reduced dimensions may be kept, and takes one dimension for the next.
    """
    rank, given = len(call.shapes[0]), call["dim"]
    gone = {d % max(rank, 1) for d in (given if isinstance(given, tuple) else (given,)) if d is not None} or set(range(rank))
    kept = [d for d in range(rank) if d not in gone]
    return ((before, before if call["keepdim"] else after) for after, before in enumerate(kept))


def _index_select(call: OpCall) -> Iterator[Rule]:
    """Slices of the index select slices of the result; all other dimensions carry over."""
    rank = len(call.shapes[0])
    yield from (call.rule(d, index=0) if d == call["dim"] % rank else call.rule(d, self=d) for d in range(rank))


def _indexed(call: OpCall) -> Iterator[Rule]:
    """Dimensions that no index selects carry over; those of the indices take the place of what they select, or come first."""
    at = [d for d, index in enumerate(call["indices"]) if index is not None]
    indices = [call["indices"][d] for d in at]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return  # how many elements a mask selects depends on data
    rank, first = max(len(index.shape) for index in indices), at[0] if at[-1] - at[0] < len(at) else 0
    kept = [d for d in range(len(call.shapes[0])) if d not in at]
    yield from (call.rule(place + rank * (place >= first), self=d) for place, d in enumerate(kept))
    for d in range(rank):
        yield Rule((Split((first + d,)),), (WHOLE, *(_from_the_end(index, rank - d) for index in indices)))


def _view(call: OpCall) -> Iterator[Rule]:
    """Views that keep the order of elements: dimensions with as many elements, and as many rows before them, carry over."""
    source, result = call.shapes
    after = {axis: dims for dims, axis in _axes(result)}
    yield from (call.rule(Split(after[axis]), self=Split(dims)) for dims, axis in _axes(source) if axis in after)


def _axes(shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, int]]]:
    """Dimensions, and pairs of neighbours, of more than one element, with (elements before them, elements along them)."""
    for low, high in ((d, d + n) for d in range(len(shape)) for n in (1, 2)):
        if high <= len(shape) and all(n > 1 for n in shape[low:high]):
            yield tuple(range(low, high)), (math.prod(shape[:low]), math.prod(shape[low:high]))


def _expanded(call: OpCall) -> Iterator[Rule]:
    """A dimension that is repeated: every piece needs its one element."""
    source, result = call.shapes
    new = len(result) - len(source)
    for d in range(len(result)):
        kept = d >= new and source[d - new] == result[d]
        yield call.rule(d, self=d - new if kept else WHOLE)


def elementwise(call: OpCall) -> Iterator[Rule]:
    """Every element of the results needs the elements at its place; operands of one element along a dimension are broadcast."""
    for back in range(max((len(tensor.shape) for _, tensor in call.inputs), default=0), 0, -1):
        outputs: tuple[Placement | None, ...] = tuple(None if out is None else _from_the_end(out, back) for out in call.outputs)
        yield Rule(outputs, tuple(_from_the_end(tensor, back) for _, tensor in call.inputs))


def _from_the_end(tensor: Layout | None, back: int) -> Placement:
    d = -1 if tensor is None else len(tensor.shape) - back
    return Split((d,)) if tensor is not None and d >= 0 and tensor.shape[d] > 1 else WHOLE


def _loss(call: OpCall) -> Iterator[Rule]:
    """Losses that are computed element by element, and then added up or not.

    There is no rule for a mean, nor for its gradient: the op divides both by the number of elements that it reads.
    """
    if call["reduction"] != 1:
        for rule in elementwise(call):
            yield Rule((SUM,), rule.inputs) if call.shapes[1] == () else rule


def _filled(call: OpCall) -> Iterator[Rule]:
    """Tensors of a constant: each piece is made with its own sizes."""
    yield from (call.rule(d) for d in range(len(call.shapes[1])))


def _nll_loss(call: OpCall) -> Iterator[Rule]:
    """The loss of rows, or its gradient, which is divided by an input.

    Torch's rule for the mean claims an average of averages, which is wrong if targets are ignored.
    """
    rank = len(call["self"].shape)
    for d in (0, *range(2, rank)) if rank > 1 else ():  # the classes are the second dimension, and a single row has none
        target = max(0, d - 1)
        if call["grad_output"] is not None:
            yield call.rule(d, grad_output=target if call["reduction"] == 0 else WHOLE, self=d, target=target)
        elif call["reduction"] == 0:  # the second output is the sum of weights, 0 without a reduction
            yield call.rule(target, WHOLE, self=d, target=target)
        elif call["reduction"] == 2:
            yield call.rule(SUM, SUM, self=d, target=target)


def _embedding(call: OpCall) -> Iterator[Rule]:
    """Each slice of tokens needs the whole table; the table's gradient is a sum over tokens, unless frequencies scale it.

    Columns of the result need columns of the table.
    """
    rank, backward = len(call["indices"].shape), call["grad_output"] is not None
    yield call.rule(1 if backward else rank, weight=1, grad_output=rank)
    if not (backward and call["scale_grad_by_freq"]):
        yield from (call.rule(SUM if backward else d, grad_output=d, indices=d) for d in range(rank))


def _attention(call: OpCall) -> Iterator[Rule]:
    """Attention of the CPU: examples, heads, and queries that may read all keys; each key's gradient is a sum over queries."""
    # With a causal mask the first query of a piece would see only the first key.
    for d in _examples_and_heads(call) if call["is_causal"] else [*_examples_and_heads(call), 2]:
        keys, summed = (WHOLE, SUM) if d == 2 else (d, d)
        outputs = (d, d) if call["grad_out"] is None else (d, summed, summed)
        mask = _place_in_mask(call["attn_mask"], d)
        yield call.rule(*outputs, grad_out=d, query=d, key=keys, value=keys, out=d, logsumexp=d, attn_mask=mask)


def _attention_on_cuda(call: OpCall) -> Iterator[Rule]:
    """Attention of CUDA, forward: examples and heads.

    Torch's rule returns no placement for the state of the random generator; without dropout no op reads the state.
    """
    for d in () if call["return_debug_mask"] else _examples_and_heads(call):
        states: list[Placement] = [WHOLE] * (len(call.outputs) - 2)
        yield call.rule(d, d, *states, query=d, key=d, value=d, attn_bias=_place_in_mask(call["attn_bias"], d))


def _examples_and_heads(call: OpCall) -> list[int]:
    # Several heads of queries may share one head of keys.
    return [d for d in (0, 1) if call["query"].shape[d] == call["key"].shape[d] == call["value"].shape[d]]


def _place_in_mask(mask: Layout | None, d: int) -> Placement:
    return _from_the_end(mask, 4 - d)


def _convolution(call: OpCall) -> Iterator[Rule]:
    """Examples, and channels if all are connected or each is alone; torch cuts along pixels, with their neighbours."""
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


def _convolution_backward(call: OpCall) -> Iterator[Rule]:
    """As in the forward; the gradients of weight and bias are sums over examples."""
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


def _group_norm(call: OpCall) -> Iterator[Rule]:
    """Examples, each of which has its own statistics; the gradients of weight and bias are sums over examples."""
    mask = call["output_mask"]
    if mask is None:
        yield call.rule(0, 0, 0, input=0)
    elif mask[0]:  # else no output tells how many examples a piece has
        yield call.rule(0, SUM, SUM, grad_out=0, input=0, mean=0, rstd=0)


def _layer_norm(call: OpCall) -> Iterator[Rule]:
    """Layer and RMS norms: the gradients of weight and bias are sums over all that has its own statistics."""
    for d in range(len(call["input"].shape) - len(call["normalized_shape"])):
        others: list[Placement | int] = [d if call["grad_out"] is None else SUM] * (len(call.outputs) - 1)
        yield call.rule(d, *others, grad_out=d, input=d, mean=d, rstd=d)


def _batch_norm(call: OpCall) -> Iterator[Rule]:
    """Channels; and examples if the statistics are constants, not computed from the examples."""
    channels = dict.fromkeys(("weight", "bias", "running_mean", "running_var", "save_mean", "save_invstd"), 0)
    gradient = call["grad_out"]
    if gradient is not None or call["training"]:
        yield call.rule(1, *[0] * (len(call.outputs) - 1), grad_out=1, input=1, **channels)
    if gradient is None and not call["training"]:
        # The other outputs are empty on the CPU; elsewhere a piece returns the whole outputs in their place.
        yield call.rule(0, *map(_placement, [None] * (len(call.outputs) - 1)), input=0)
    # If a slice has one example, the CPU's kernel reads the gradient in the layout of the input (torch 2.13.0).
    if gradient is not None and not call["train"] and gradient.stride == call["input"].stride:
        yield call.rule(0, SUM, SUM, grad_out=0, input=0)


_TABLE: Final[tuple[tuple[OwnRules, tuple[OpOverload, ...]], ...]] = (
    (_view, (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default, aten.detach.default,
             aten.unsqueeze.default)),
    (_expanded, (aten.expand.default,)),
    (_permuted, (aten.permute.default, aten.transpose.int, aten.t.default)),
    (_squeezed, (aten.squeeze.dim, aten.squeeze.dims)),
    (_padded, (aten.constant_pad_nd.default,)),
    (_removed, (aten.unbind.int, aten.logsumexp.default, aten.var_mean.correction)),
    (_index_select, (aten.index_select.default,)),
    (_indexed, (aten.index.Tensor, aten._unsafe_index.Tensor)),
    (_added, (aten.select_backward.default, aten.stack.default)),
    # For cumulative sums, torch's rules take a negative dimension for another dimension.
    (_along, (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default,
              aten.glu.default, aten.glu_backward.default, aten.scatter.value)),
    # Not marked as pointwise in torch.
    (elementwise, (aten.leaky_relu.default, aten.hardtanh_backward.default, aten.leaky_relu_backward.default,
                    aten.elu_backward.default,
                    aten.hardsigmoid_backward.default, aten.hardswish.default, aten.hardswish_backward.default,
                    aten.softplus_backward.default, aten.mish_backward.default, aten.log_sigmoid_forward.default,
                    aten.log_sigmoid_backward.default, aten.hardshrink_backward.default, aten.softshrink_backward.default,
                    aten._prelu_kernel.default, aten._prelu_kernel_backward.default, aten.copy.default,
                    aten.masked_fill.Tensor, aten.floor_divide.default, aten.rsub.Tensor, aten.fill.Scalar, aten.fill.Tensor)),
    (_loss, (aten.mse_loss.default, aten.mse_loss_backward.default, aten.smooth_l1_loss.default,
             aten.smooth_l1_loss_backward.default, aten.huber_loss.default, aten.huber_loss_backward.default,
             aten.soft_margin_loss.default, aten.soft_margin_loss_backward.default, aten.binary_cross_entropy.default,
             aten.binary_cross_entropy_backward.default, aten.binary_cross_entropy_with_logits.default)),
    (_filled, (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)),
    (_but_last(1), (aten.reflection_pad1d.default, aten.reflection_pad1d_backward.default, aten.replication_pad1d.default,
                    aten.replication_pad1d_backward.default, aten.upsample_linear1d.vec, aten.upsample_nearest1d.vec,
                    aten.view_as_real.default)),
    (_but_last(2), (aten.avg_pool2d.default, aten.avg_pool2d_backward.default, aten.max_pool2d_with_indices.default,
                    aten.max_pool2d_with_indices_backward.default, aten._adaptive_avg_pool2d.default,
                    aten._adaptive_avg_pool2d_backward.default, aten.adaptive_max_pool2d.default,
                    aten.adaptive_max_pool2d_backward.default, aten.upsample_nearest2d.default,
                    aten.upsample_nearest2d_backward.default, aten.upsample_bilinear2d.default,
                    aten.upsample_bilinear2d_backward.default,
                    aten.reflection_pad2d.default, aten.reflection_pad2d_backward.default, aten.replication_pad2d.default,
                    aten.replication_pad2d_backward.default, aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec,
                    aten.upsample_bicubic2d.vec, aten.tril.default, aten.triu.default)),
    (_but_last(3), (aten.avg_pool3d.default, aten.avg_pool3d_backward.default, aten.max_pool3d_with_indices.default,
                    aten.max_pool3d_with_indices_backward.default,
                    aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.upsample_nearest3d.vec,
                    aten.upsample_trilinear3d.vec)),
    (_nll_loss, (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, aten.nll_loss_backward.default,
                 aten.nll_loss2d_backward.default)),
    (_embedding, (aten.embedding.default, aten.embedding_dense_backward.default)),
    (_attention, (aten._scaled_dot_product_flash_attention_for_cpu.default,
                  aten._scaled_dot_product_flash_attention_for_cpu_backward.default)),
    (_attention_on_cuda, (aten._scaled_dot_product_flash_attention.default,
                          aten._scaled_dot_product_efficient_attention.default,
                          aten._scaled_dot_product_cudnn_attention.default)),
    (_convolution, (aten.convolution.default,)),
    (_convolution_backward, (aten.convolution_backward.default,)),
    (_group_norm, (aten.native_group_norm.default, aten.native_group_norm_backward.default)),
    (_layer_norm, (aten.native_layer_norm.default, aten.native_layer_norm_backward.default, aten._fused_rms_norm.default,
                   aten._fused_rms_norm_backward.default)),
    (_batch_norm, (aten.native_batch_norm.default, aten._native_batch_norm_legit_no_training.default,
                   aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats,
                   aten.native_batch_norm_backward.default)),
)  # fmt: skip

OWN_RULES: Final[dict[OpOverload, OwnRules]] = {op: rules for rules, ops in _TABLE for op in ops}
"""Op to the function that computes its rules; torch's library is not asked for these ops."""
