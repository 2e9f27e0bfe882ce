"""Every private name of torch.distributed that this package uses, in one place; `compat` has the others.

Seen and tested in 2.13.0.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from checkmate.torch._compat.dynamo import dynamo_config

__all__ = [
    "DistributedDataParallel",
    "FSDPGroup",
    "active_ddp",
    "fsdp_groups",
    "inside_ddp_forward",
    "job_store",
    "uses_fsdp",
]


def job_store() -> torch.distributed.Store:
    """Where the processes of a job met, with keys of our own."""
    from torch.distributed.distributed_c10d import PrefixStore, _get_default_store  # not in every build of torch

    return PrefixStore("checkmate", _get_default_store())


@dataclass(frozen=True, slots=True)
class FSDPGroup:
    """Parameters that ``fully_shard`` gathers together.

    Attributes:
        shard_bytes: What this rank holds of them, padding included.
        unsharded_bytes: What they take when gathered.
        reduce_scatter_bytes: What their gradients take while they are reduced.
        shards: How many ranks they are spread over.
        storages: Storage -> bytes of each gathered parameter; empty before the first time.
        stays: Whether they stay gathered from forward to backward.
        gradients: Their sharded gradients that are there.
    """

    shard_bytes: int
    unsharded_bytes: int
    reduce_scatter_bytes: int
    shards: int
    storages: dict[int, int]
    stays_unsharded: bool
    gradients: list[torch.Tensor]


def uses_fsdp(model: torch.nn.Module) -> bool:
    """Whether ``fully_shard`` manages a model, or a part of it."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and any(isinstance(m, module.FSDPModule) for m in model.modules())


def fsdp_groups() -> list[FSDPGroup]:
    """All that ``fully_shard`` manages in this process."""
    module = sys.modules.get("torch.distributed._composable_state")
    states = [] if module is None else [ref() for ref in list(module._module_state_mapping.values())]
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
    # Sharded over fewer ranks after the forward counts as staying, too.
    stays = not group._reshard_after_forward or group._use_post_forward_mesh
    return FSDPGroup(shard, unsharded, reduced, shards, storages, stays, gradients)


def active_ddp(inputs: Sequence[Any]) -> DistributedDataParallel | None:
    """The ``DistributedDataParallel`` whose forward runs now; under its Python reducer, the one that has some of the inputs."""
    active = DistributedDataParallel._get_active_ddp_module()
    if active is not None or dynamo_config.optimize_ddp != "python_reducer":
        return active
    # The Python reducer does not say whose forward runs.
    mine = {id(t) for t in inputs}
    alive = [each for each in gc.get_objects() if type(each) is DistributedDataParallel]
    return next((each for each in alive if any(id(p) in mine for p in each.parameters())), None)


def inside_ddp_forward(wrapped: DistributedDataParallel) -> contextlib.AbstractContextManager[None]:
    """What the module in a ``DistributedDataParallel`` runs in, without what is done before and after it."""
    return wrapped._inside_ddp_forward()
