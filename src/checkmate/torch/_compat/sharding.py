"""Private names of ``torch.distributed.tensor``: the sharding rules of single ops.

DTensor knows, for about 1,200 ops, which slices of the inputs give which slice of the outputs. Its functions take shapes, need
no process group, and run on a mesh without a backend. Read in torch 2.13.0.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from checkmate.torch._compat.dispatch import OpOverload, no_modes

__all__ = ["Layout", "LibraryPlacement", "library_rules"]

_log = logging.getLogger("checkmate.torch")

LibraryPlacement: TypeAlias = int | Literal["whole", "sum"] | None
"""The dimension that is sharded, ``"whole"`` (replicated), ``"sum"`` (partial sums), or None for what is no tensor."""

_PIECES = 2
"""Devices of the imagined mesh. The rules depend on it only where a dimension is shorter than the mesh, or does not divide."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides, type and device of a tensor: all that a rule may depend on."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """The layout of a traced tensor."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        """A new tensor of this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def library_rules(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: int
) -> list[tuple[LibraryPlacement, ...]]:
    """Placements under which DTensor shards an op along one dimension of a mesh."""
    library = _library()
    if library is None:
        return []
    try:
        with no_modes():
            found = library.rules(op, args, kwargs, outputs)
    except Exception as error:  # noqa: BLE001 - the functions are torch's, of any release, and one op fewer is chunked
        _log_once(op, f"{type(error).__name__}: {error}")
        return []
    return [placements for placements in map(_named, found) if placements is not None]


_UNKNOWN = object()


def _named(placements: Sequence[Any]) -> tuple[LibraryPlacement, ...] | None:
    from torch.distributed.tensor.placement_types import Partial, Replicate, Shard

    def name(placement: Any) -> Any:
        # Subclasses mean something else: a strided shard, a partial sum that holds only some rows of an embedding.
        if placement is None or isinstance(placement, int):
            return placement
        if type(placement) is Shard:
            return placement.dim
        if type(placement) is Replicate:
            return "whole"
        return "sum" if type(placement) is Partial and placement.reduce_op == "sum" else _UNKNOWN

    names = tuple(map(name, placements))
    return None if _UNKNOWN in names else names


@functools.cache
def _log_once(op: OpOverload, reason: str) -> None:
    _log.info("the sharding rule of torch for %s failed, so that it is not chunked (%s)", op, reason)


@functools.cache
def _library() -> _Library | None:
    if not torch.distributed.is_available():
        return None
    try:
        # While Dynamo compiles, the mesh would be a fake tensor, and every rule would fail; or a meta tensor, where the caller
        # has that default device.
        with no_modes(), torch.device("cpu"):
            return _Library()
    except Exception as error:  # noqa: BLE001 - private names of torch: any of them can move
        _log.warning("fewer ops can be chunked: torch %s has no sharding rules as expected (%r)", torch.__version__, error)
        return None


class _Library:
    """DTensor's registries of rules, and what their functions take."""

    def __init__(self) -> None:
        from torch.distributed.tensor import DeviceMesh, DTensor
        from torch.distributed.tensor import placement_types as placements
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
        from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
        from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder

        propagator = DTensor._op_dispatcher.sharding_propagator
        self._direct: dict[OpOverload, Callable[..., Any]] = propagator.op_single_dim_strategy_funcs
        self._strategies: dict[OpOverload, Callable[..., Any]] = propagator.op_strategy_funcs
        self._mesh = DeviceMesh("cpu", torch.arange(_PIECES), _init_backend=False, _rank=0)
        if hasattr(self._mesh, "_rank_map"):  # eight bytes that would stay, and that a budget to the byte has no room for
            self._mesh._rank_map = self._mesh._rank_map.to("meta")
        self._placements: Any = placements
        self._placeholder: Any = _ShardingPlaceholder
        self._meta: Any = TensorMeta
        self._spec: Any = DTensorSpec
        self._schema: Any = OpSchema
        self._choice: Any = OpSpec
        self._choices: Any = OpStrategy
        self._tuple: Any = TupleStrategy

    def rules(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: int) -> list[Sequence[Any]]:
        if op in self._direct:
            direct = self._direct[op](op, _replace(args, self._tensor_meta), _replace(kwargs, self._tensor_meta))
            return [[p.dim if isinstance(p, self._placeholder) else p for p in rule] for rule in direct]
        if op in self._strategies:
            schema = self._schema(op, tuple(map(self._argument, args)), {k: self._argument(v) for k, v in kwargs.items()})
            strategy = self._strategies[op](schema)
            tensors = sum(_count(a) for a in (*args, *kwargs.values()))
            return [self._placements_of(choice, tensors, outputs) for choice in getattr(strategy, "strategies", ())]
        return []

    def _tensor_meta(self, tensor: Layout) -> Any:
        return self._meta(shape=torch.Size(tensor.shape), stride=tensor.stride, dtype=tensor.dtype)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(each, Layout) for each in value):
            return self._tuple([self._any_placement(each) for each in value if isinstance(each, Layout)])
        return self._any_placement(value) if isinstance(value, Layout) else value

    def _any_placement(self, tensor: Layout) -> Any:
        # A function walks over the placements that the input can have, and some walk over those of two inputs side by side.
        known = self._placements
        offered = [known.Replicate(), *(known.Shard(d) for d, n in enumerate(tensor.shape) if n > 1), known.Partial()]
        meta = self._tensor_meta(tensor)
        specs = [self._spec(self._mesh, (placement,), tensor_meta=meta) for placement in offered]
        return self._choices([self._choice(output_specs=spec, input_specs=()) for spec in specs])

    def _placements_of(self, choice: Any, tensors: int, outputs: int) -> Sequence[Any]:
        # One for all where all are placed alike.
        returned = choice.output_specs if isinstance(choice.output_specs, (tuple, list)) else (choice.output_specs,) * outputs
        read = (returned[0],) * tensors if choice.input_specs is None else choice.input_specs
        return [None if spec is None else spec.placements[0] for spec in (*returned, *read)]


def _replace(value: Any, change: Callable[[Layout], Any]) -> Any:
    if isinstance(value, Layout):
        return change(value)
    if isinstance(value, dict):
        return {k: _replace(v, change) for k, v in value.items()}
    return type(value)(_replace(v, change) for v in value) if isinstance(value, (list, tuple)) else value


def _count(value: Any) -> int:
    return sum(map(_count, value)) if isinstance(value, (list, tuple)) else isinstance(value, Layout)
