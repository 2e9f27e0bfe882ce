"""Estimates for ops that are not measured: workspace on a CPU, and time by a roofline.

Rules for the kernels of PyTorch 2.13, each with its measured bytes. An op without a rule counts with its largest argument or with
all of its results, whichever is more, since kernels may compute a result in a wider type. Copies of arguments that are not
contiguous are added.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry

from checkmate.cost.device import Device, load_device, roofline_ns
from checkmate.cost.store import OpCost
from checkmate.torch.graph.op_properties import PIECES, Pieces, makes_views, out_argument
from checkmate.torch.graph.optimizer_ops import UPDATE
from checkmate.torch.graph.storages import concrete, leaves, storage_bytes, storage_key
from checkmate.torch.measure.single_op import layout

aten = torch.ops.aten


def estimated_workspace_bytes(node: fx.Node) -> int:
    """Estimated bytes that an op allocates besides its results, while it runs on a CPU."""
    if PIECES in node.meta:
        return pieces_workspace_bytes(node, estimated_workspace_bytes)
    if makes_views(node):
        return 0
    target: Any = node.target
    given, made = _bytes(node.all_input_nodes), _bytes([node])
    scalars = 64  # numbers that an op makes into tensors: 8 to 16 bytes were measured
    rule = _RULES.get(getattr(target, "overloadpacket", None))
    if rule is not None:
        return rule(node, given, made) + scalars
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return _casts(node, given, made) + scalars
    return max([sum(made), *given]) + _copies(node, given, made) + scalars


def pieces_workspace_bytes(node: fx.Node, workspace_of: Callable[[fx.Node], int] = lambda op: 0) -> int:
    """Maximum of bytes that an op holds besides its operands and results while it runs its pieces, workspace of ops included."""
    pieces: Pieces = node.meta[PIECES]
    terms = _sums(node)
    # At the end, a sum in a wider type exists besides its result.
    sums = sum(storage_bytes(term) for term, made in terms if term.dtype is not made.dtype)
    not_yet = sum(storage_bytes(made) for term, made in terms if term.dtype is not made.dtype)
    there = {storage_key(term) for term, _ in terms}
    runs = dict(zip(pieces.graphs, pieces.buffers_bytes, strict=True))  # equal pieces have the same graph
    held = max(buffers + _temporary_bytes(graph, there, workspace_of) for graph, buffers in runs.items())
    return max(held + sums - not_yet, pieces.buffers_bytes[-1] + sums)


def _sums(node: fx.Node) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The first term of each sum over the pieces of an op, and the sum in the type of the result."""
    pieces: Pieces = node.meta[PIECES]
    terms = [value.meta["val"] for value in pieces.graphs[0].output_node().args[0]]  # type: ignore[union-attr]
    return [*zip(terms, itertools.compress(leaves(node.meta["val"]), pieces.sums), strict=True)]


def _temporary_bytes(graph: fx.Graph, there: set[int], workspace_of: Callable[[fx.Node], int]) -> int:
    """Maximum of temporary tensors and workspace of a piece, in bytes, without the storages of sums, ``there`` already."""
    nodes = list(graph.nodes)
    ends = last_uses(nodes)
    # An op with an argument to write to was traced without it.
    outside = [node for node in nodes if node.op == "placeholder" or out_argument(node)]
    given = {storage_key(t) for node in outside for t in leaves(node.meta.get("val"))}
    live: dict[int, int] = {}
    most = 0
    for position, node in enumerate(nodes):
        if node.op == "call_function" and node.target is not operator.getitem:
            made = {storage_key(t): storage_bytes(t) for t in leaves(node.meta.get("val"))}
            live |= {key: size for key, size in made.items() if key not in given and key not in there}
            most = max(most, sum(live.values()) + workspace_of(node))
        live = {key: size for key, size in live.items() if ends[key] > position}
    return most


def last_uses(nodes: Sequence[fx.Node]) -> dict[int, int]:
    """Storage to the position of the last node that computes it, views it or reads it."""
    return {
        storage_key(t): position
        for position, node in enumerate(nodes)
        for read in (node, *node.all_input_nodes)
        for t in leaves(read.meta.get("val"))
    }


def _bytes(nodes: list[fx.Node]) -> list[int]:
    return [*{storage_key(t): storage_bytes(t) for n in nodes for t in leaves(n.meta.get("val"))}.values()]


_Rule = Callable[[fx.Node, list[int], list[int]], int]


def _copies(node: fx.Node, given: list[int], made: list[int]) -> int:
    """Arguments that are not contiguous are copied."""
    values = {t for n in node.all_input_nodes for t in leaves(n.meta.get("val"))}
    return sum(concrete(t.numel()) * t.element_size() for t in values if not _is_contiguous(*layout(t)))


def _is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    return all(n < 2 or s == math.prod(shape[d + 1 :]) for d, (n, s) in enumerate(zip(shape, stride, strict=True)))


def _casts(node: fx.Node, given: list[int], made: list[int]) -> int:
    """A pointwise kernel computes in one type: operands and results of other types are copied, but for results that are flags."""
    results = [t for t in leaves(node.meta.get("val")) if t.dtype is not torch.bool]
    values = [*{t for n in node.all_input_nodes for t in leaves(n.meta.get("val"))}, *results]
    sized = [t for t in values if t.dim()] or values
    common = functools.reduce(torch.promote_types, (t.dtype for t in sized), torch.bool)
    return sum(concrete(t.numel()) * common.itemsize for t in sized if t.dtype is not common)


def _mask(node: fx.Node, given: list[int], made: list[int]) -> int:
    """The kernel scales the mask, which is then as large as the gradient, in single precision at least."""
    gradient = node.meta["val"]
    scaled = 4 * concrete(gradient.numel())
    return scaled + (0 if gradient.dtype is torch.float32 else max(made))


def _of_several(node: fx.Node, given: list[int], made: list[int]) -> int:
    """The kernel calls several pointwise kernels."""
    return max([sum(made), *given]) + _casts(node, given, made)


def _convolution(node: fx.Node, given: list[int], made: list[int]) -> int:
    """OneDNN keeps tensors in blocked layouts: it copies arguments, and results afterwards, with channels rounded up.

    For types other than float32 it has no kernel on some processors: there they are products of the unfolded input. On others,
    with AMX, each group has its channels rounded up, and each thread sums gradients of the weight in float32.
    """
    values = {storage_key(t): t for n in (node, *node.all_input_nodes) for t in leaves(n.meta.get("val"))}
    single = all(t.dtype is torch.float32 for t in values.values())
    backward = node.target is aten.convolution_backward.default
    groups: int = 1 if single else node.args[8 + backward]  # type: ignore[assignment]
    blocked = 2 * sum(t.element_size() * concrete(t.numel()) * _rounded(t, groups) for t in values.values())
    if single:
        return blocked
    weight: torch.Tensor = node.args[1 + backward].meta["val"]  # type: ignore[union-attr]
    sums = 4 * concrete(weight.numel()) * _rounded(weight) * -(-16 * groups // min(16 * groups, concrete(weight.shape[0])))
    return max(blocked + torch.get_num_threads() * (sums + 3 * 2**14), _unfolded(node))


def _unfolded(node: fx.Node) -> int:
    backward = node.target is aten.convolution_backward.default
    operands: tuple[Any, ...] = (*node.args[:3], node.args[7]) if backward else (node, *node.args[:2], node.args[6])
    result, given, weight, transposed = (n.meta["val"] if isinstance(n, fx.Node) else n for n in operands)
    rows, columns = (result, given) if transposed else (given, result)
    sizes = (*rows.shape[:2], *weight.shape[2:], *columns.shape[2:])
    return rows.element_size() * math.prod(map(concrete, sizes))


def _rounded(value: torch.Tensor, groups: int = 1) -> int:
    """Factor by which a blocked layout has more channels in each group, in blocks of 16, as with AVX-512."""
    channels = concrete(value.shape[1]) // groups if value.dim() > 2 else 16
    return -(-16 // channels) if 0 < channels < 16 else 2 if channels % 16 else 1


def _indices(node: fx.Node, given: list[int], made: list[int]) -> int:
    """The kernel copies or counts the indices."""
    values = [t for n in node.all_input_nodes for t in leaves(n.meta.get("val")) if not t.is_floating_point()]
    return 2 * sum(concrete(t.numel()) * t.element_size() for t in values)


def _product(node: fx.Node, given: list[int], made: list[int]) -> int:
    """MKL reads matrices by rows or by columns and copies others, also expanded ones; oneDNN, for half precision, copies all."""
    if any(t.dtype in (torch.bfloat16, torch.float16) for t in leaves(node.meta.get("val"))):
        return sum(given) + sum(made)
    values = [t for n in node.all_input_nodes for t in leaves(n.meta.get("val")) if t.dim() > 1]
    return sum(concrete(t.numel()) * t.element_size() for t in values if not _in_rows_or_columns(t))


def _in_rows_or_columns(matrix: torch.Tensor) -> bool:
    (rows, columns), (down, right) = ([concrete(n) for n in of[-2:]] for of in (matrix.shape, matrix.stride()))
    return (right == 1 and down >= max(1, columns)) or (down == 1 and right >= max(1, rows))


def _tiles(node: fx.Node, given: list[int], made: list[int]) -> int:
    """Each thread has tiles of scores and results: ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``."""
    backward = node.target is aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    query, key = (n.meta["val"].shape for n in node.args[backward : backward + 2])  # type: ignore[union-attr]
    length, width, keys = concrete(query[2]), concrete(query[3]), min(512, concrete(key[2]))
    rows = 256 if length >= 768 else 64 if length >= 192 else 32
    halves = 1 + any(t.dtype in (torch.bfloat16, torch.float16) for t in leaves(node.meta.get("val")))
    return 4 * halves * torch.get_num_threads() * rows * ((1 + backward) * keys + width + 4)


_RULES: dict[Any, _Rule] = {
    UPDATE.overloadpacket: lambda node, given, made: 4 * max(given),  # loops make up to 3.4 tensors like the gradient
    **dict.fromkeys((aten.convolution, aten.convolution_backward), _convolution),
    aten.native_dropout_backward: _mask,
    **dict.fromkeys((aten.deg2rad, aten.rad2deg, aten.isinf, aten.ldexp, aten.mvlgamma), _of_several),
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.baddbmm), _product),
    **dict.fromkeys((aten.embedding, aten.embedding_dense_backward, aten.scatter, aten.scatter_add), _indices),
    **dict.fromkeys(
        (aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward), _tiles
    ),
    **dict.fromkeys(
        (
            aten._softmax, aten._log_softmax, aten._softmax_backward_data, aten._log_softmax_backward_data, aten.nll_loss_forward,
            aten.nll_loss_backward, aten.max_pool2d_with_indices, aten.gelu, aten.gelu_backward,
        ),
        _copies,
    ),
    **dict.fromkeys(
        (
            aten.clone, aten._to_copy, aten.cat, aten.stack, aten.fill, aten.full, aten.zeros, aten.ones, aten.empty, aten.arange,
            aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_empty, aten.new_zeros, aten.new_full,
            aten.scalar_tensor, aten.rand, aten.randn, aten.rand_like, aten.randn_like, aten.sum, aten.mean, aten.gather,
            aten.constant_pad_nd, aten.select_backward, aten.slice_backward, aten.tril, aten.triu, aten.softplus_backward,
            aten.where, aten.masked_fill, aten.copy, aten.copy_,
        ),
        lambda node, given, made: 0,
    ),
}  # fmt: skip


_log = logging.getLogger("checkmate.torch")


def estimated_costs(nodes: Sequence[fx.Node]) -> list[OpCost]:
    """Estimated costs of nodes on the ``"CPU"`` device profile, without running any; their workspace is an upper estimate."""
    return [OpCost(estimate_ns(n), estimated_workspace_bytes(n)) for n in nodes]


def estimate_ns(node: fx.Node, device: Device | None = None) -> int:
    """Lower bound on the nanoseconds of an op on a device, by default a generic CPU: ratios between ops are useful."""
    device = load_device("CPU") if device is None else device
    if PIECES in node.meta:
        return _pieces_ns(node, device)
    if makes_views(node):
        return 100  # no kernel runs, but the dispatcher is called
    read = (t for n in node.all_input_nodes for t in leaves(n.meta.get("val")))
    moved = _moved_bytes(read) + _moved_bytes(leaves(node.meta.get("val")))
    return roofline_ns(device, flop=_flop(node), dtype=_dtype(node), moved_bytes=moved)


def _pieces_ns(node: fx.Node, device: Device) -> int:
    """Time of the ops of all pieces, and of the cast of wider sums to the type of the results."""
    pieces: Pieces = node.meta[PIECES]
    casts = [_moved_bytes(each) for each in _sums(node) if each[0].dtype is not each[1].dtype]
    total = sum(roofline_ns(device, flop=0, dtype="float32", moved_bytes=moved) for moved in casts)
    for graph, count in Counter(pieces.graphs).items():
        calls = [op for op in graph.nodes if op.op == "call_function" and op.target is not operator.getitem]
        total += count * sum(estimate_ns(op, device) for op in calls)
    return total


def _moved_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes read or written: only the bytes of a slice; expanded or repeated tensors count once."""
    elements: dict[int, int] = {}
    there: dict[int, int] = {}
    for t in tensors:
        key = storage_key(t)
        there[key] = storage_bytes(t)
        elements[key] = elements.get(key, 0) + concrete(t.numel()) * t.element_size()
    return sum(min(size, elements[key]) for key, size in there.items())


def _dtype(node: fx.Node) -> str:
    """The type in which an op computes, by its name in device profiles: a torch type, or ``"tf32"``."""
    read = [t.dtype for n in node.all_input_nodes for t in leaves(n.meta.get("val")) if t.dtype.is_floating_point]
    dtype = str(read[0] if read else torch.float32).removeprefix("torch.")
    if dtype != "float32":
        return dtype
    convolutions = (torch.ops.aten.convolution, torch.ops.aten.convolution_backward)
    convolves = getattr(node.target, "overloadpacket", None) in convolutions
    tf32 = torch.backends.cudnn.allow_tf32 if convolves else torch.get_float32_matmul_precision() != "highest"
    return "tf32" if tf32 else dtype


def _flop(node: fx.Node) -> int:
    formula = flop_registry.get(_functional(getattr(node.target, "overloadpacket", None)))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: _shaped(n.meta.get("val")))
    try:
        return int(formula(*args, **kwargs, out_val=_shaped(node.meta.get("val"))))
    except (AssertionError, TypeError, ValueError, RuntimeError) as error:
        _log.warning("the floating-point operations of %s could not be counted and are taken as 0: %s", node.target, error)
        return 0


def _functional(packet: Any) -> Any:
    """The functional form of an in-place op, such as ``addmm`` for ``addmm_``: torch has formulas for it."""
    name = getattr(packet, "__name__", "")
    return getattr(torch.ops.aten, name[:-1], packet) if name.endswith("_") else packet


def _shaped(value: Any) -> Any:
    """Meta tensors with the traced shapes in integers: a formula that compares symbolic sizes would install guards."""

    def known(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return torch.empty([concrete(n) for n in leaf.shape], dtype=leaf.dtype, device="meta")
        return concrete(leaf) if isinstance(leaf, torch.SymInt) else leaf

    return pytree.tree_map(known, value)
