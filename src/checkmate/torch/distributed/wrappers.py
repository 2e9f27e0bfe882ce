"""What DistributedDataParallel and fully_shard hold beside the graphs of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkmate.torch._compat.distributed import DistributedDataParallel, FSDPGroup, active_ddp, fsdp_groups
from checkmate.torch.graph.storages import storage_key, unique_bytes


@dataclass(frozen=True, slots=True)
class WrapperMemory:
    """What is held beside a graph by what wraps its module.

    Attributes:
        held_bytes: While the graph runs, its own inputs not counted twice. The wrappers' buffers, every shard and its gradient
            that is there, parameters of other modules that are gathered, and what gathering and reducing take.
        bucket_view_bytes: Buffers among that which the gradients of the graph's parameters are views of.
        transient_gradient_bytes: Gradients of the graph that its backward frees: reduce-scatter keeps one shard of each.
    """

    held_bytes: int = 0
    bucket_view_bytes: int = 0
    transient_gradient_bytes: int = 0


def wrapper_memory(example_inputs: Sequence[Any], accumulate: bool) -> WrapperMemory:
    """What is held beside a graph.

    Args:
        example_inputs: The inputs that it was traced with.
        accumulate: Whether gradients may be there when it runs.
    """
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
    return WrapperMemory(held + _sharded_bytes(groups, accumulate) - own, views, passing)


def fsdp_unsharded_bytes() -> dict[int, int]:
    """Storage -> bytes of every parameter that ``fully_shard`` gathers and lets go again."""
    return {key: size for group in fsdp_groups() for key, size in group.storages.items()}


def run_inside_ddp(wrapped: DistributedDataParallel, run: Callable[..., Any]) -> Callable[..., Any]:
    """A program that runs where the module of a `DistributedDataParallel` does.

    What that does before a forward, and to the gradients of one, is done for the program: buffers are the same on every
    rank, and gradients are averaged in its hooks.

    Args:
        wrapped: What the module is in.
        run: The program; it calls the module itself.
    """
    program = _Program(run)

    def forward(*args: Any, **kwargs: Any) -> Any:
        module = wrapped.module
        wrapped.module = program
        try:
            return wrapped(*args, **kwargs)
        finally:
            wrapped.module = module

    return forward


class _Program(torch.nn.Module):
    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _buckets(inputs: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Bytes of the buckets that gradients are reduced in, beyond gradients that are views of them; and of those that are."""
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
    """The most that groups hold at once while one of them computes, forward or backward."""
    shards = sum(group.shard_bytes for group in groups)
    gradients = shards if accumulate else unique_bytes(g for group in groups for g in group.gradients)
    staying = sum(group.unsharded_bytes for group in groups if group.stays_unsharded)
    computing = max((group.unsharded_bytes for group in groups if not group.stays_unsharded), default=0)
    # Forward: what a group was gathered into stays until the next is. Backward: the next to come is being
    # gathered already, and the gradients of the one before are being reduced.
    moving = max(group.unsharded_bytes for group in groups)
    if len(groups) > 1:
        moving += max(group.reduce_scatter_bytes for group in groups)
    return shards + gradients + staying + computing + moving
