"""Hugging Face's Trainer under a budget: two lines, the import and the callback.

Needs `pip install transformers accelerate` and the `torch` extra. The callback reserves memory for the optimizer's state.
`TrainingArguments(torch_compile_backend="checkmate")` does not work: accelerate keeps a fixed list of backends.
"""

from __future__ import annotations

import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from checkmate.torch.integrations import BudgetCallback, PeakCallback

STEPS, LENGTH, VOCABULARY = 4, 64, 512


class Tokens(Dataset):
    """Random sequences."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def train(budget: str | None) -> tuple[list[float], list[torch.Tensor], PeakCallback]:
    """Losses, parameters, and the measurements of the callback; without a budget the same backend keeps everything."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    within = BudgetCallback(budget, time_limit_s=1) if budget else BudgetCallback("1TiB")
    peak = PeakCallback(step=3)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=8,
            logging_steps=1,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(8 * STEPS), callbacks=[within, peak])
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], list(model.parameters()), peak


if __name__ == "__main__":
    torch.set_num_threads(1)
    (plain, parameters, everything), (losses, others, within) = train(None), train("50%")
    assert everything.measured_bytes and within.measured_bytes and within.planned_bytes
    print("losses", *[f"{loss:.6f}" for loss in losses])
    print(f"peak   {everything.measured_bytes / 2**20:.1f} MiB, within the budget {within.measured_bytes / 2**20:.1f} MiB")
    print(f"       of {within.planned_bytes / 2**20:.1f} MiB planned")
    assert losses == plain, "every loss is the same"
    assert all(map(torch.equal, parameters, others)), "every parameter, to the last bit"
    assert within.measured_bytes <= within.planned_bytes < 0.8 * everything.measured_bytes, "and the peak is lower"
