"""Hugging Face accelerate under a budget: two lines, the import and the plugin.

Needs `pip install accelerate` and the `torch` extra. Accelerate has a fixed list of backends, without ours; the plugin takes the
place of the backend's name. `accelerate launch` runs it on several processes: every rank then runs one plan.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import set_seed
from plain_loop import BATCHES, Classifier, batches
from torch.utils.data import DataLoader

from checkmate.torch import measure_peak
from checkmate.torch.integrations import BudgetPlugin


def train(budget: str | None) -> tuple[list[float], int]:
    """Losses, and the peak of the last step above the memory in use when it began."""
    AcceleratorState._reset_state(reset_partial_state=True)  # two trainings in one process
    plugin = None if budget is None else BudgetPlugin(budget, time_limit_s=1)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    set_seed(0)
    model = Classifier()
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
