"""One op of a graph, run alone on tensors of the traced shapes: its inputs, and the memory of this run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from checkmate.torch._compat.dispatch import OpOverload, run_and_save_rng_state, run_with_rng_state
from checkmate.torch._compat.symbolic import value_at_upper_bounds
from checkmate.torch.graph.op_properties import PIECES, Pieces, makes_views, unused_arguments
from checkmate.torch.graph.optimizer_ops import UPDATE, updates_of
from checkmate.torch.graph.storages import concrete, leaves, storage_bytes, storage_key

INPUTS: ContextVar[Mapping[int, torch.Tensor]] = ContextVar("inputs", default=MappingProxyType({}))
"""The inputs of the graph, by the key of the storage of the traced tensor. Ops read them in place, as in a step: a budget
may leave no room for copies."""


def ready_to_run(node: fx.Node, rows: tuple[int, int] = (0, 0)) -> Callable[[], Iterator[Any]]:
    """A function that runs an op on new inputs: it yields at the end of each part (see `LeastTimes`), and finally the results.

    ``rows``: a number of rows for tensors that have the other number of rows.
    """
    target, args, kwargs = call_of(node)
    fill, given = not makes_views(node), _given(node)  # unwritten pages take no time
    real_args, real_kwargs = fx.map_arg(
        (args, kwargs), lambda n: materialised(n.meta.get("val"), fill=fill, given=given, rows=rows)
    )
    if target is UPDATE:
        parameter, gradient, optimizer, which = real_args
        update = updates_of(optimizer).clone_for_measurement(which, parameter)
        update(parameter, gradient)  # the first call allocates the optimizer's state, which is resident and not workspace
        return lambda: _in_one(update, parameter, gradient)
    if PIECES in node.meta:
        pieces: Pieces = node.meta[PIECES]
        return lambda: pieces.run(real_args[0])
    return lambda: _in_one(target, *real_args, **real_kwargs)


def _in_one(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    yield call(*args, **kwargs)


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target, arguments and keyword arguments to measure; of ops with a random state, the op inside."""
    if node.target is run_and_save_rng_state:
        return node.args[0], tuple(node.args[1:]), dict(node.kwargs)
    if node.target is run_with_rng_state:
        return node.args[1], tuple(node.args[2:]), dict(node.kwargs)
    skip = unused_arguments(node)
    return node.target, tuple(None if i in skip else a for i, a in enumerate(node.args)), dict(node.kwargs)


def needed_bytes(node: fx.Node) -> int:
    """Bytes of the results of an op and of its arguments other than inputs of the graph, each with its own storage."""
    given, arguments = _given(node), list[torch.Tensor]()
    fx.map_arg(call_of(node)[1:], lambda n: arguments.extend(leaves(n.meta.get("val"))))
    own = sum(_extent(*layout(t)) * t.dtype.itemsize for t in arguments if storage_key(t) not in given)
    return own + new_bytes(node)


def new_bytes(node: fx.Node) -> int:
    """Bytes of output storages that are no storages of inputs: the part of an op's peak that is not workspace."""
    read: set[int] = set()
    fx.map_arg(call_of(node)[1:], lambda n: read.update(storage_key(t) for t in leaves(n.meta.get("val"))))
    made = {storage_key(t): storage_bytes(t) for t in leaves(node.meta.get("val"))}
    return sum(size for key, size in made.items() if key not in read)


def on_cuda(node: fx.Node) -> bool:
    """Whether an op makes a tensor on a CUDA device."""
    return any(t.device.type == "cuda" for t in leaves(node.meta.get("val")))


def layout(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of a traced tensor."""
    return [concrete(s) for s in tensor.shape], [concrete(s) for s in tensor.stride()]


def materialised(
    value: Any, *, fill: bool = True, given: Mapping[int, torch.Tensor] = MappingProxyType({}), rows: tuple[int, int] = (0, 0)
) -> Any:
    """A real tensor with the shape and strides of a traced one (expanded dimensions stay expanded), or a plain number.

    A tensor whose storage key is in ``given`` is a view of that input. Other tensors are written if ``fill`` is true.
    """
    if isinstance(value, torch.Tensor):
        shape, stride = layout(value)
        if rows[0] and shape and shape[0] == rows[1]:
            shape[0] = rows[0]
        if storage_key(value) in given and (real := _view(given[storage_key(value)], value, shape, stride)) is not None:
            return real
        flat = torch.empty(_extent(shape, stride), dtype=value.dtype, device=value.device)
        if fill:
            _fill(flat)
        return flat.as_strided(shape, stride)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        largest = value_at_upper_bounds(value)
        return value.node.hint if largest is None else largest
    if isinstance(value, (list, tuple)):
        return type(value)(materialised(v, fill=fill, given=given, rows=rows) for v in value)
    return value


def _fill(flat: torch.Tensor) -> None:
    """Fill a tensor with numbers for which an op takes its usual time.

    Time hardly depends on values, except denormals and NaN, which are slow on CPUs. Integers are 0, which is a valid index, and
    booleans are true, which masks nothing.
    """
    if not (flat.dtype.is_floating_point or flat.dtype.is_complex):
        flat.fill_(flat.dtype is torch.bool)
    elif flat.dtype.itemsize == 1 or flat.dtype.is_complex:
        flat.fill_(0.5)
    else:  # random numbers that repeat: drawing 200 MB takes 0.2 s, copying a quarter of that
        block = flat[: 1 << 18].uniform_(0.1, 0.9)
        for part in flat[block.numel() :].split(block.numel()):
            part.copy_(block[: part.numel()])


def _given(node: fx.Node) -> Mapping[int, torch.Tensor]:
    """Inputs of the graph that an op is measured with, by storage key; empty for an op that changes its arguments."""
    target = call_of(node)[0]
    return INPUTS.get() if isinstance(target, OpOverload) and not target._schema.is_mutable else {}


def _view(real: torch.Tensor, traced: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor | None:
    """The part of an input that a traced tensor is a view of; None if its type differs or the input is smaller now."""
    offset = concrete(traced.storage_offset())
    size = (offset + _extent(shape, stride)) * real.element_size()
    if real.dtype is not traced.dtype or size > real.untyped_storage().nbytes():
        return None
    return real.detach().as_strided(shape, stride, offset)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0
