"""Memory of ``DistributedDataParallel`` and ``fully_shard`` in addition to the graphs of a step.

It is computed from the wrappers' parameter groups and not measured: the CPU has no count of allocated bytes, and on CUDA the
count at compile time differs from the count at run time (docs/decisions/0007).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkmate.torch._compat.distributed import FSDPGroup, active_ddp, fsdp_groups
from checkmate.torch.graph.storages import storage_key, unique_bytes


@dataclass(frozen=True, slots=True)
class WrapperMemory:
    """Memory that the wrappers around a module hold while its graph runs."""

    held_bytes: int = 0  # buckets of DDP; of FSDP shards, their gradients, parameters gathered by other groups, and buffers
    bucket_view_bytes: int = 0  # part of the buckets whose views are the gradients of the graph's parameters
    transient_gradient_bytes: int = 0  # gradients of the graph that its backward frees: reduce-scatter keeps one shard of each
    sharded: bool = False  # whether the wrapper is FSDP, whose shards Python holds; only C++ holds the buckets of DDP

    def counted_bytes(self, device: torch.device) -> int:
        """The part of ``held_bytes`` that a count of the tensors on a device includes."""
        return self.held_bytes if self.sharded or device.type == "cuda" else 0


def wrapper_memory(example_inputs: Sequence[Any], accumulate: bool) -> WrapperMemory:
    """Memory of the wrappers around the module of a graph."""
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    held, views = _buckets(tensors)
    groups = fsdp_groups()
    if not groups:
        return WrapperMemory(held, views)
    mine = {storage_key(t): t.requires_grad for t in tensors}
    passing = own = 0
    for group in groups:
        gathered = {key: size for key, size in group.storages.items() if key in mine}
        trained = sum(size for key, size in gathered.items() if mine[key])
        own += sum(gathered.values())
        passing += trained - trained // group.shards
    return WrapperMemory(held + _sharded_bytes(groups, accumulate) - own, views, passing, sharded=True)


def fsdp_unsharded_bytes() -> dict[int, int]:
    """Storage key to bytes of every parameter that ``fully_shard`` gathers before use and frees afterwards."""
    return {key: size for group in fsdp_groups() for key, size in group.storages.items()}


def _buckets(inputs: Sequence[torch.Tensor]) -> tuple[int, int]:
    """DDP's gradient buckets, as a pair of bytes."""
    wrapped = active_ddp(inputs)
    if wrapped is None:
        return 0, 0
    ignored = wrapped.parameters_to_ignore
    trained = [p for n, p in wrapped.module.named_parameters() if p.requires_grad and n not in ignored]
    size = sum(p.nbytes for p in trained)
    if not wrapped.gradient_as_bucket_view:
        return size, 0
    there = unique_bytes(p.grad for p in trained if p.grad is not None)
    return max(0, size - there), size


def _sharded_bytes(groups: Sequence[FSDPGroup], accumulate: bool) -> int:
    """Upper bound on the bytes that FSDP groups hold while one of them computes, in forward or backward."""
    shards = sum(group.shard_bytes for group in groups)
    gradients = shards if accumulate else unique_bytes(g for group in groups for g in group.gradients)
    staying = sum(group.unsharded_bytes for group in groups if group.stays_unsharded)
    computing = max((group.unsharded_bytes for group in groups if not group.stays_unsharded), default=0)
    # Forward: the all-gather buffer of a group is freed when the next group's is ready. Backward: the next group is
    # prefetched during the reduce-scatter of the previous group's gradients.
    moving = max(group.unsharded_bytes for group in groups)
    if len(groups) > 1:
        moving += max(group.reduce_scatter_bytes for group in groups)
    return shards + gradients + staying + computing + moving
