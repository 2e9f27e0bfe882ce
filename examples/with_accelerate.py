"""Hugging Face accelerate under a budget: compile before `prepare`, and do not pass the backend's name to accelerate.

Needs `pip install accelerate` and the `torch` extra. Accelerate has a fixed list of backends, without ours, and does not change a
model that is already compiled. `accelerate launch` runs it on several processes: every rank then runs one plan.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from plain_loop import BATCHES, Classifier, batches
from torch.utils.data import DataLoader

from checkmate.torch import measure_peak


def train(budget: str | None) -> tuple[list[float], int]:
    """Losses, and the peak of the last step above the memory in use when it began."""
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = Classifier()
    if budget is not None:
        model.compile(backend="checkmate", options={"budget": budget, "time_limit_s": 1})
    model, optimizer, data = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), 1e-3), DataLoader(batches(), batch_size=None)
    )
    losses, peak = [], 0
    for x, y in data:

        def step(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            loss = model(x, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        peak = measure_peak(step) if len(losses) == BATCHES - 1 else step()
    return losses, peak or 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain, planned = train(None), train("50%")
    print("losses", *[f"{loss:.6f}" for loss in planned[0]])
    print(f"peak   {plain[1] / 2**20:.1f} MiB, within the budget {planned[1] / 2**20:.1f} MiB")
    assert planned[0] == plain[0], "every loss is the same"
    assert planned[1] < 0.7 * plain[1], "and the peak is lower"
