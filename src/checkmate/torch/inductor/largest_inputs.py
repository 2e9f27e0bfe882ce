"""Inputs of the largest sizes, for the trial steps of a graph with dynamic shapes.

Where sizes may change a plan is made for the largest, and what it takes is measured there, whatever size the first batch has. The
inputs of such a step are the first batch, repeated along its dynamic dimensions: indices stay valid, and masks are those of data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from checkmate.core.errors import OptionError
from checkmate.torch._compat.symbolic import bound_by_hint, value_at_upper_bounds
from checkmate.torch.graph.storages import storage_key


def traced_values(gm: fx.GraphModule) -> list[Any]:
    """The values that Dynamo traced the inputs of a graph with: fake tensors, symbolic numbers, and others."""
    metas = [node.meta for node in gm.graph.nodes if node.op == "placeholder"]
    return [meta.get("example_value", meta.get("val")) for meta in metas]


def dynamic_dimensions(traced: Sequence[Any]) -> list[tuple[int, int]]:
    """Which dimensions of which inputs are symbolic: positions of input and dimension."""
    return [
        (i, dim)
        for i, value in enumerate(traced)
        if isinstance(value, torch.Tensor)
        for dim, size in enumerate(value.shape)
        if _symbols(size)
    ]


def bound_sizes(traced: Sequence[Any]) -> None:
    """Give every symbol in shapes and strides an upper bound, through guards: its current value, if there is no other yet."""
    for value in traced:
        for number in _geometry(value):
            if _symbols(number):
                bound_by_hint(number)


def largest_inputs(inputs: Sequence[Any], traced: Sequence[Any]) -> list[Any]:
    """Inputs of the largest sizes: those of the first batch where it has these sizes, else copies that repeat it."""
    copies: dict[tuple[Any, ...], torch.Tensor] = {}
    storages: dict[int, tuple[Any, ...]] = {}
    found: list[Any] = []
    for value, of in zip(inputs, traced, strict=True):
        if isinstance(value, torch.SymInt):
            largest = value_at_upper_bounds(value)
            found.append(value.node.hint if largest is None else largest)
        elif isinstance(value, torch.Tensor) and (sizes := [_largest(n) for n in _geometry(of)]) != _geometry(value):
            view = (storage_key(value), *_geometry(value))
            if storages.setdefault(view[0], view) != view:
                raise OptionError(
                    "inputs of dynamic sizes share memory, so that a step of the largest sizes cannot be tried out",
                    hint="pass copies (tensor.clone()), compile with dynamic=False, or with compiler='eager'",
                )
            if view not in copies:
                copies[view] = _repeated(value, sizes[: value.ndim], sizes[value.ndim : 2 * value.ndim])
            found.append(copies[view].detach().requires_grad_(value.requires_grad))
        else:
            found.append(value)
    return found


def _geometry(value: Any) -> list[Any]:
    """Sizes, strides and offset of a tensor, one after the other; nothing for other values."""
    return [*value.shape, *value.stride(), value.storage_offset()] if isinstance(value, torch.Tensor) else []


def _symbols(number: Any) -> bool:
    """Whether a number has symbols in it: one that was specialised has none any more."""
    return isinstance(number, torch.SymInt) and bool(number.node.expr.free_symbols)


def _largest(number: Any) -> int:
    if not isinstance(number, torch.SymInt):
        return int(number)
    largest = value_at_upper_bounds(number)
    return int(number.node.hint if largest is None else largest)


def _repeated(tensor: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """A tensor of a shape and strides that repeats another along each dimension."""
    with torch.no_grad():
        tensor = tensor.detach()
        # An expanded dimension is one row in memory, and stays one.
        stored = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
        for dim, size in enumerate(stored):
            rows = tensor.shape[dim]
            if rows != size:
                tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % max(rows, 1))
        made = torch.empty_strided(stored, strides, dtype=tensor.dtype, device=tensor.device)
        return made.copy_(tensor).expand(shape)
