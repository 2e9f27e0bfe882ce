"""Private names of ``torch.distributed``, DistributedDataParallel and FSDP2 (``fully_shard``)."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from checkmate.torch._compat.dynamo import dynamo_config

__all__ = ["DistributedDataParallel"]


def job_store() -> torch.distributed.Store:
    """The key-value store of the default process group, under a prefix that no other library uses."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # not in every build of torch

    return PrefixStore("checkmate", _get_default_store())


@dataclass(frozen=True, slots=True)
class FSDPGroup:
    """One parameter group of ``fully_shard``: parameters whose all-gather is one collective."""

    shard_bytes: int  # size of this rank's shards, padding included
    unsharded_bytes: int  # size of the parameters after the all-gather
    reduce_scatter_bytes: int  # size of the reduce-scatter's input: the unsharded gradients
    shards: int  # how many ranks the parameters are sharded over
    storages: dict[int, int]  # storage key to bytes of each all-gather output; empty before the first forward
    stays_unsharded: bool  # whether parameters stay gathered from forward to backward (``reshard_after_forward=False``)
    gradients: list[torch.Tensor]


def uses_fsdp(model: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to a model or to one of its modules."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and any(isinstance(m, module.FSDPModule) for m in model.modules())


def fsdp_groups() -> list[FSDPGroup]:
    """Every parameter group of ``fully_shard`` in this process, whichever model it belongs to."""
    module = sys.modules.get("torch.distributed._composable_state")
    if module is None or not module._module_state_mapping:
        return []
    states = [ref() for ref in list(module._module_state_mapping.values())]
    groups = {id(group): group for state in states for group in getattr(state, "_fsdp_param_groups", ())}
    return [_fsdp_group(group) for group in groups.values()]


def _fsdp_group(group: Any) -> FSDPGroup:
    shards = getattr(group.mesh_info, "shard_mesh_size", 1)
    shard = unsharded = reduced = 0
    storages: dict[int, int] = {}
    gradients = []
    for parameter in group.fsdp_params:
        data = parameter._sharded_param_data
        dtype = getattr(parameter, "param_dtype", None) or data.dtype
        shard += data.nbytes
        unsharded += data.numel() * shards * dtype.itemsize
        if parameter.sharded_param.requires_grad:
            reduced += data.numel() * shards * (getattr(parameter, "reduce_dtype", None) or dtype).itemsize
        for gathered in parameter.all_gather_outputs:
            storages[gathered.untyped_storage()._cdata] = gathered.numel() * gathered.element_size()
        if (gradient := parameter.sharded_param.grad) is not None:
            gradients.append(gradient.to_local())
    # Resharding to a smaller world size after the forward counts as staying unsharded, which is an upper bound.
    stays = not group._reshard_after_forward or group._use_post_forward_mesh
    return FSDPGroup(shard, unsharded, reduced, shards, storages, stays, gradients)


def wrapper_runs(mode: FrameType) -> bool:
    """Whether an op that a dispatch mode sees belongs to ``DistributedDataParallel`` or ``fully_shard``.

    No function of ``fully_shard`` encloses the forward or the backward of a module: one function on the stack of this thread
    suffices. The forward of ``DistributedDataParallel`` encloses the module's forward; its own C++ code allocates its buckets.
    """
    names = []
    frame = mode.f_back
    while frame is not None:
        names.append(frame.f_globals.get("__name__", ""))
        frame = frame.f_back
    caller = next((name for name in names if name not in _DISPATCH), "")
    return caller == DistributedDataParallel.__module__ or any(name.startswith("torch.distributed.fsdp._fully") for name in names)


_DISPATCH = ("torch._compile", "torch._dynamo.eval_frame")
"""Modules of the functions that call ``__torch_dispatch__`` of a mode."""


def active_ddp(inputs: Sequence[Any]) -> DistributedDataParallel | None:
    """The ``DistributedDataParallel`` whose forward is running, or None."""
    active = DistributedDataParallel._get_active_ddp_module()
    if active is not None or dynamo_config.optimize_ddp != "python_reducer":
        return active
    mine = {id(t) for t in inputs}
    alive = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    return next((each for each in alive if any(id(p) in mine for p in each.parameters())), None)
