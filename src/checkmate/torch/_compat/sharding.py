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
from torch.utils import _pytree as pytree

from checkmate.torch._compat.dispatch import OpOverload, no_modes

_log = logging.getLogger("checkmate.torch")

LibraryPlacement: TypeAlias = int | Literal["whole", "sum"] | None
"""The dimension that is sharded, ``"whole"`` (replicated), ``"sum"`` (partial sums), or None for other objects."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape, strides, type and device of a tensor, on which alone a rule may depend."""

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
    """Placements of the outputs, and then of each `Layout`, under which DTensor shards an op along one dimension of a mesh.

    The layouts stand for the tensors among the arguments, in the order of `torch.utils._pytree`. Ways to shard with a placement
    that has no name here, such as a running maximum, are left out.
    """
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
        # Subclasses have another meaning: a strided shard, a partial sum with only some rows of an embedding.
        if type(placement) is Shard:
            return placement.dim
        if type(placement) is Replicate:
            return "whole"
        if type(placement) is Partial and placement.reduce_op == "sum":
            return "sum"
        return placement if placement is None or isinstance(placement, int) else _UNKNOWN

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
        # While Dynamo compiles, the mesh would be a fake tensor, and every rule would fail. It would be a meta tensor if the
        # caller has that default device.
        with no_modes(), torch.device("cpu"):
            return _Library()
    except Exception as error:  # noqa: BLE001 - private names of torch: any of them can move
        _log.warning("fewer ops can be chunked: torch %s has no sharding rules as expected (%r)", torch.__version__, error)
        return None


class _Library:
    """DTensor's registries of rules, and the arguments of their functions."""

    def __init__(self) -> None:
        from torch.distributed.tensor import DeviceMesh, DTensor, _dtensor_spec, _op_schema, placement_types
        from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder

        propagator = DTensor._op_dispatcher.sharding_propagator
        self._direct: dict[OpOverload, Callable[..., Any]] = propagator.op_single_dim_strategy_funcs
        self._strategies: dict[OpOverload, Callable[..., Any]] = propagator.op_strategy_funcs
        # Rules depend on the mesh only if a dimension is shorter, or does not divide: this mesh has the fewest devices.
        self._mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
        if hasattr(self._mesh, "_rank_map"):  # eight bytes that would stay, for which a budget to the byte has no room
            self._mesh._rank_map = self._mesh._rank_map.to("meta")
        self._placements: Any = placement_types
        self._placeholder: Any = _ShardingPlaceholder
        self._specs: Any = _dtensor_spec
        self._schemas: Any = _op_schema

    def rules(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: int) -> list[Sequence[Any]]:
        if op in self._direct:
            direct = self._direct[op](op, *pytree.tree_map_only(Layout, self._tensor_meta, (args, kwargs)))
            return [[p.dim if isinstance(p, self._placeholder) else p for p in rule] for rule in direct]
        if op in self._strategies:
            given = tuple(map(self._argument, args)), {k: self._argument(v) for k, v in kwargs.items()}
            strategy = self._strategies[op](self._schemas.OpSchema(op, *given))
            tensors = sum(isinstance(leaf, Layout) for leaf in pytree.tree_leaves((args, kwargs)))
            return [self._placements_of(choice, tensors, outputs) for choice in getattr(strategy, "strategies", ())]
        return []

    def _tensor_meta(self, tensor: Layout) -> Any:
        return self._specs.TensorMeta(shape=torch.Size(tensor.shape), stride=tensor.stride, dtype=tensor.dtype)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, list) and any(isinstance(each, Layout) for each in value):
            return self._schemas.TupleStrategy([self._any_placement(each) for each in value if isinstance(each, Layout)])
        return self._any_placement(value) if isinstance(value, Layout) else value

    def _any_placement(self, tensor: Layout) -> Any:
        # A function walks over the possible placements of the input, and some walk over those of two inputs in parallel.
        known, meta = self._placements, self._tensor_meta(tensor)
        offered = [known.Replicate(), *(known.Shard(d) for d, n in enumerate(tensor.shape) if n > 1), known.Partial()]
        specs = [self._specs.DTensorSpec(self._mesh, (placement,), tensor_meta=meta) for placement in offered]
        return self._schemas.OpStrategy([self._schemas.OpSpec(output_specs=spec, input_specs=()) for spec in specs])

    def _placements_of(self, choice: Any, tensors: int, outputs: int) -> Sequence[Any]:
        # A single spec stands for all outputs that are placed alike.
        returned = choice.output_specs if isinstance(choice.output_specs, (tuple, list)) else (choice.output_specs,) * outputs
        read = (returned[0],) * tensors if choice.input_specs is None else choice.input_specs
        return [None if spec is None else spec.placements[0] for spec in (*returned, *read)]
