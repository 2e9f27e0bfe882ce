"""Data-parallel training under a budget: `torchrun --nproc-per-node 2 examples/ddp.py`.

It uses the CPU and gloo, so that it runs anywhere; on GPUs use "nccl" and move model and batches. Every rank runs the plan of
rank 0 and keeps the budget. If one rank cannot plan, all stop with the reason.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from plain_loop import Classifier, batches
from torch.nn.parallel import DistributedDataParallel

from checkmate.torch import measure_peak


def train(budget: str | None) -> tuple[list[float], list[torch.Tensor], int]:
    """Losses on this rank, the parameters, and the peak of the last step above the memory in use when it began."""
    torch.manual_seed(0)
    model = Classifier()
    run = DistributedDataParallel(model)
    if budget is not None:
        # One graph, one plan. By default torch splits the graph at DDP's buckets, to reduce gradients during the
        # backward; the parts are planned together after the first step.
        torch._dynamo.config.optimize_ddp = False
        run = torch.compile(run, backend="checkmate", options={"budget": budget, "time_limit_s": 2})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    mine = batches(8)[dist.get_rank() :: dist.get_world_size()]
    losses, peak = [], 0
    for x, y in mine:

        def step(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            loss = run(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        peak = measure_peak(step) if len(losses) == len(mine) - 1 else step()
    return losses, list(model.parameters()), peak or 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (losses, parameters, peak), (same, others, lower) = train(None), train("50%")
    print(f"rank {dist.get_rank()}: peak {peak / 2**20:.1f} MiB, within the budget {lower / 2**20:.1f} MiB")
    assert same == losses, "every loss is the same"
    assert all(map(torch.equal, parameters, others)), "every parameter, to the last bit"
    assert lower < 0.7 * peak, "and the peak is lower"
    dist.destroy_process_group()
