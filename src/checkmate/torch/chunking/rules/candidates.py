"""Rules of single ops, by name; the same in every release of torch.

Each function of this module gives candidates: `checkmate.torch.chunking.rules.lookup` drops those that cut a dimension of one
element or dimensions of different lengths, and adds the cuts of two neighbouring dimensions at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch.utils import _pytree as pytree

from checkmate.torch._compat.dispatch import OpOverload
from checkmate.torch.chunking.rules.placements import CARRY, SUM, WHOLE, Layout, Placement, Rule, Split
from checkmate.torch.graph.op_properties import argument

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
        return argument(self.op, self.args, dict(self.kwargs), name)

    @property
    def name(self) -> str:
        """The name of the op without its overload, such as ``aten::sum``."""
        return self.op._schema.name

    @property
    def inputs(self) -> list[tuple[str, Layout]]:
        """The tensors among the arguments, in the order of `torch.utils._pytree`, with the names of the arguments."""
        names = [argument.name for argument in self.op._schema.arguments]
        # Arguments after the named ones do not exist: only operators with keyword arguments have more.
        arguments = [*zip(names, self.args, strict=False), *self.kwargs]
        return [(name, leaf) for name, value in arguments for leaf in pytree.tree_leaves(value) if isinstance(leaf, Layout)]

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


def _placement(given: Placement | int | None) -> Placement:
    if given is None:
        return WHOLE
    return Split((given,)) if isinstance(given, int) else given


Candidates: TypeAlias = Callable[[OpCall], Iterator[Rule]]
"""From a call to candidates for its rules."""


def _named_dimensions(call: OpCall) -> set[int]:
    """Dimensions of the first input that an argument names; all of them if there is none."""
    rank = max(len(call.shapes[0]), 1)
    given = call["dims"] if call["dim"] is None else call["dim"]
    named = {d % rank for d in (given if isinstance(given, (tuple, list)) else (given,)) if d is not None}
    return named or set(range(rank))


def _dimensions(pairs: Callable[[OpCall], Iterable[tuple[int, int]]]) -> Candidates:
    """Rules of ops by which a dimension of all inputs becomes a dimension of all outputs; ``pairs`` gives both dimensions."""

    def rules(call: OpCall) -> Iterator[Rule]:
        for before, after in pairs(call):
            outputs = tuple(None if out is None else Split((after,)) for out in call.outputs)
            yield Rule(outputs, (Split((before,)),) * len(call.inputs))

    return rules


def _but_last(count: int) -> Candidates:
    """Ops on the last dimensions: those before can be cut."""
    return _dimensions(lambda call: ((d, d) for d in range(len(call.shapes[0]) - count)))


@_dimensions
def _along(call: OpCall) -> Iterator[tuple[int, int]]:
    """Ops along some dimensions; all other dimensions can be cut, and all of them where a slice is the whole tensor."""
    named = set[int]() if call.name == "aten::slice" and call.shapes[0] == call.shapes[1] else _named_dimensions(call)
    return ((d, d) for d in range(len(call.shapes[0])) if d not in named)


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
    shape, named = call.shapes[0], _named_dimensions(call)
    kept = [d for d in range(len(shape)) if not (d in named and shape[d] == 1)]
    return ((before, after) for after, before in enumerate(kept) if before not in named)


@_dimensions
def _added(call: OpCall) -> Iterator[tuple[int, int]]:
    """Ops whose result has one dimension more than the inputs."""
    rank = len(call.shapes[1])
    return ((before, after) for before, after in enumerate(d for d in range(rank) if d != call["dim"] % rank))


@_dimensions
def _padded(call: OpCall) -> Iterator[tuple[int, int]]:
    """Padding; dimensions that stay as long as they are can be cut."""
    rank = len(call.shapes[0])
    return ((d, d) for d in range(rank) if not any(call["pad"][2 * (rank - 1 - d) :][:2]))


@_dimensions
def _repeated(call: OpCall) -> Iterator[tuple[int, int]]:
    """Repeated tensors; dimensions that stay as they are can be cut."""
    new = len(call.shapes[1]) - len(call.shapes[0])
    return ((d, d + new) for d in range(len(call.shapes[0])) if call["repeats"][d + new] == 1)


@_dimensions
def _reduced(call: OpCall) -> Iterator[tuple[int, int]]:
    """Ops whose results lack dimensions of the input, or have one element along them."""
    kept = [d for d in range(len(call.shapes[0])) if d not in _named_dimensions(call)]
    return ((before, before if call["keepdim"] else after) for after, before in enumerate(kept))


def _summed(call: OpCall) -> Iterator[Rule]:
    """Sums: what is summed over can be cut into terms."""
    yield from _reduced(call)
    yield from (call.rule(SUM, self=d) for d in sorted(_named_dimensions(call)))


def _product(call: OpCall) -> Iterator[Rule]:
    """Products of matrices, with a tensor that is added or not: rows, columns, and examples; or terms if nothing is added."""
    rank, added = len(call.shapes[1]), [tensor for _, tensor in call.inputs[:-2]]
    for d in range(rank):
        factors = _placement(None if d == rank - 1 else d), _placement(None if d == rank - 2 else d)
        yield Rule((Split((d,)),), (*(_from_the_end(tensor, rank - d) for tensor in added), *factors))
    if not added:
        yield Rule((SUM,), (Split((rank - 1,)), Split((rank - 2,))))


def _selected(call: OpCall) -> Iterator[Rule]:
    """Slices of the index select slices of the result, or the places to which slices are added; other dimensions carry over."""
    (dim,), gathers = _named_dimensions(call), call.name == "aten::gather"
    others = (d for d in range(len(call.shapes[0])) if d != dim)
    yield from (call.rule(d, self=d, index=d if gathers else None, source=d) for d in others)
    yield call.rule(dim if call["source"] is None else CARRY, index=dim if gathers else 0, source=dim)


def _indexed(call: OpCall) -> Iterator[Rule]:
    """Dimensions that no index selects carry over; those of the indices take the place of what they select, or come first.

    Values that are put there have the shape of what is selected, or are broadcast to it.
    """
    at = [d for d, index in enumerate(call["indices"]) if index is not None]
    indices = [call["indices"][d] for d in at]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return  # how many elements a mask selects depends on data
    rank, first = max(len(index.shape) for index in indices), at[0] if at[-1] - at[0] < len(at) else 0
    kept = [d for d in range(len(call.shapes[0])) if d not in at]
    for place, d in enumerate(kept):
        selected = place + rank * (place >= first)
        if (values := call["values"]) is None:
            yield call.rule(selected, self=d)
        else:
            yield call.rule(d, self=d, values=_from_the_end(values, len(kept) + rank - selected))
    for d in range(rank) if call["values"] is None or call["accumulate"] else ():
        cut: tuple[Placement, ...] = (WHOLE, *(_from_the_end(index, rank - d) for index in indices))
        if (values := call["values"]) is None:
            yield Rule((Split((first + d,)),), cut)
        else:
            yield Rule((CARRY,), (*cut, _from_the_end(values, len(kept) + rank - first - d)))


def _scattered(call: OpCall) -> Iterator[Rule]:
    """Numbers that are put or added to a tensor along a dimension, which can be cut if they are added; and all others."""
    yield from _along(call)
    mean = call["reduce"] == "mean" or call["include_self"] is False
    if call["src"] is not None and not mean:
        (dim,) = _named_dimensions(call)
        yield call.rule(CARRY, index=dim, src=dim)


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
    assert call.outputs[0] is not None
    yield from (call.rule(d) for d in range(len(call.outputs[0].shape)))


def _nll_loss(call: OpCall) -> Iterator[Rule]:
    """The loss of rows, or its gradient, which is divided by an input; there is no rule for a mean if targets may be ignored."""
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
    """Examples and heads. On the CPU also queries, which may read all keys; each key's gradient is then a sum over queries.

    The state of CUDA's random generator stays whole; without dropout no op reads it.
    """
    backward = call["logsumexp"] is not None
    if call["return_debug_mask"] or (backward and any(gradient is not None for gradient in call.outputs[3:])):
        return  # the gradient of a mask is a sum over what the mask is broadcast to
    # Several heads of queries may share one head of keys.
    dims = [d for d in (0, 1) if call["query"].shape[d] == call["key"].shape[d] == call["value"].shape[d]]
    # With a causal mask the first query of a piece would see only the first key.
    for d in [*dims, 2] if "_for_cpu" in call.name and not call["is_causal"] else dims:
        keys, summed = (WHOLE, SUM) if d == 2 else (d, d)
        outputs = (d, summed, summed) if backward else (d, d)
        others: list[Placement] = [WHOLE] * (len(call.outputs) - len(outputs))
        cut = dict.fromkeys(("grad_out", "grad_out_", "query", "out", "logsumexp"), d)
        masks: dict[str, Placement] = {name: _from_the_end(call[name], 4 - d) for name in ("attn_mask", "attn_bias")}
        yield call.rule(*outputs, *others, **cut, **masks, key=keys, value=keys)


def _convolution(call: OpCall) -> Iterator[Rule]:
    """Examples, and channels if all are connected or each is alone; the gradients of weight and bias are sums over examples."""
    backward, channels, weight = call["grad_output"] is not None, call["input"].shape[1], call["weight"].shape
    if len(call["input"].shape) != len(weight):
        return
    outgoing, incoming = (1, 0) if call["transposed"] else (0, 1)
    yield call.rule(*(0, SUM, SUM) if backward else (0,), grad_output=0, input=0)
    if call["groups"] == 1:
        yield call.rule(*(SUM, outgoing, 0) if backward else (1,), grad_output=1, weight=outgoing, bias=0)
        if not (call["output_mask"][2] if backward else call["bias"]):
            yield call.rule(*(1, incoming, WHOLE) if backward else (SUM,), input=1, weight=incoming)
    elif call["groups"] == weight[0] == channels and weight[1] == 1:
        yield call.rule(*(1, 0, 0) if backward else (1,), grad_output=1, input=1, weight=0, bias=0)


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


_TABLE: Final[tuple[tuple[Candidates, str], ...]] = (
    (_view, "view _unsafe_view reshape alias detach unsqueeze"),
    (_expanded, "expand"),
    (_permuted, "permute transpose t"),
    (_squeezed, "squeeze"),
    (_padded, "constant_pad_nd"),
    (_repeated, "repeat"),
    (_added, "select_backward stack"),
    (_summed, "sum nansum"),
    (_reduced, "select unbind mean amax amin max min argmax argmin any all prod median nanmedian mode kthvalue logsumexp var std "
               "var_mean linalg_vector_norm"),
    (_along, "cumsum cumprod logcumsumexp cummax cummin sort topk _softmax _softmax_backward_data _log_softmax "
             "_log_softmax_backward_data _safe_softmax glu glu_backward cat split split_with_sizes slice slice_backward "
             "slice_scatter flip roll scatter _fft_c2c _fft_c2r _fft_r2c"),
    (_selected, "index_select gather index_add"),
    (_scattered, "scatter_add scatter_reduce"),
    (_indexed, "index _unsafe_index index_put _unsafe_index_put"),
    (_product, "mm bmm addmm baddbmm"),
    # Not marked as pointwise in torch.
    (elementwise, "_to_copy _conj copy zeros_like ones_like full_like empty_like fill masked_fill floor_divide rsub leaky_relu "
                  "leaky_relu_backward hardtanh_backward elu_backward hardsigmoid_backward hardswish hardswish_backward "
                  "softplus_backward mish_backward log_sigmoid_forward log_sigmoid_backward hardshrink_backward "
                  "softshrink_backward _prelu_kernel _prelu_kernel_backward"),
    (_loss, "mse_loss mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward soft_margin_loss "
            "soft_margin_loss_backward binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits"),
    (_filled, "full new_zeros new_ones new_full new_empty"),
    (_but_last(1), "view_as_real view_as_complex"),
    (_but_last(2), "tril triu"),
    (_but_last(3), "pixel_shuffle pixel_unshuffle"),
    (_dimensions(lambda _: ((0, 0),)), "grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward"),
    (_nll_loss, "nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward"),
    (_embedding, "embedding embedding_dense_backward"),
    (_attention, "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
                 "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
                 "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
                 "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward"),
    (_convolution, "convolution convolution_backward"),
    (_group_norm, "native_group_norm native_group_norm_backward"),
    (_layer_norm, "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward"),
    (_batch_norm, "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
                  "_native_batch_norm_legit_functional native_batch_norm_backward"),
)  # fmt: skip

_RULES: Final = {f"aten::{name}": candidates for candidates, names in _TABLE for name in names.split()}

_OF_PIXELS: Final = re.compile(
    r"aten::_?((adaptive_)?(avg|max)_(un)?pool|(reflection|replication)_pad|upsample_[a-z_]*)(?P<count>[123])d.*"
)
"""Ops on the pixels of images, whose name tells how many dimensions these have."""


def candidates(call: OpCall) -> Iterable[Rule]:
    """Ways to run an op piece by piece, among them some that do not hold for the shapes of its tensors; none if unknown."""
    if torch.Tag.pointwise in call.op.tags:
        return elementwise(call)
    if pixels := _OF_PIXELS.fullmatch(call.name):
        return _but_last(int(pixels["count"]))(call)
    return _RULES[call.name](call) if call.name in _RULES else ()
