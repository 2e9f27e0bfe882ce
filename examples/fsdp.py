"""Sharded training under a budget: `torchrun --nproc-per-node 2 examples/fsdp.py`.

`fully_shard` gathers the parameters of each layer before it runs, so each layer is a separate graph. All graphs are planned
together after the first step, and the budget holds from the second step on.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from plain_loop import Classifier, batches
from torch.distributed.fsdp import fully_shard

from checkmate.torch import measure_peak


def train(budget: str | None) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses on this rank, its shards, and the peak of the last step above the memory in use when it began."""
    torch.manual_seed(0)
    model = Classifier()
    for layer in model.layers:
        if budget is not None:
            layer.compile(backend="checkmate", options={"budget": budget, "time_limit_s": 3})
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    mine = batches(8)[dist.get_rank() :: dist.get_world_size()]
    losses, peak = [], 0
    for x, y in mine:

        def step(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        peak = measure_peak(step) if len(losses) == len(mine) - 1 else step()
    return losses, [p.to_local() for p in model.parameters()], peak or 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (losses, shards, peak), (same, others, lower) = train(None), train("50%")
    print(f"rank {dist.get_rank()}: peak {peak / 2**20:.1f} MiB, within the budget {lower / 2**20:.1f} MiB")
    assert same == losses, "every loss is the same"
    assert all(map(torch.equal, shards, others)), "every shard, to the last bit"
    assert lower < 0.85 * peak, "and the peak is lower"
    dist.destroy_process_group()
