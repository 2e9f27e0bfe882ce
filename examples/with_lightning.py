"""Lightning under a budget: the module compiles its network when it is created, and the Trainer is unchanged.

Needs `pip install lightning` and the `torch` extra.
"""

from __future__ import annotations

import logging
import warnings

import lightning
import torch
from plain_loop import Classifier, batches
from torch.utils.data import DataLoader

from checkmate.torch import measure_peak


class Task(lightning.LightningModule):
    """The network to train."""

    def __init__(self, budget: str | None) -> None:
        super().__init__()
        self.network = Classifier()
        if budget is not None:
            self.network.compile(backend="checkmate", options={"budget": budget, "time_limit_s": 1})
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = self.network(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def fit(task: Task) -> None:
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, DataLoader(batches(), batch_size=None))


def train(budget: str | None) -> tuple[list[float], int]:
    """Losses, and the peak of a second fit, which compiles nothing, above the memory in use when it began."""
    lightning.seed_everything(0, verbose=False)
    task = Task(budget)
    fit(task)
    return task.losses, measure_peak(lambda: fit(task))


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    plain, planned = train(None), train("50%")
    print("losses", *[f"{loss:.6f}" for loss in planned[0]])
    print(f"peak   {plain[1] / 2**20:.1f} MiB, within the budget {planned[1] / 2**20:.1f} MiB")
    assert planned[0] == plain[0], "every loss is the same"
    assert planned[1] < plain[1], "and the peak is lower"
