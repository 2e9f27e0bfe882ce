"""A language model whose logits exceed the budget: run piece by piece with the bits of the plain step, and with less memory.

Needs `pip install transformers` and the `torch` extra.
"""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import checkmate
import checkmate.torch

VOCABULARY, SEQUENCES, LENGTH = 32_000, 2, 512
BUDGET, SMALL = "260MiB", "150MiB"


class Loss(torch.nn.Module):
    """A language model of transformers that returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=LENGTH, use_cache=False,
        )  # fmt: skip
        self.net = LlamaForCausalLM(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss of predicting each token from those before it."""
        return self.net(input_ids=ids, labels=ids).loss


def compiled(chunking: str, budget: str = BUDGET) -> tuple[Loss, torch.Tensor, checkmate.torch.Step]:
    """The model, its batch and its training step within the budget."""
    torch.manual_seed(0)
    model, ids = Loss(), torch.randint(VOCABULARY, (SEQUENCES, LENGTH))
    return model, ids, checkmate.torch.compile(model, example=(ids,), budget=budget, chunking=chunking)


def trained(chunking: str, budget: str) -> None:
    """Run a step, and compare gradients, peak and budget with what was promised."""
    model, ids, step = compiled(chunking, budget)
    print(*step.result.remarks, sep="\n")
    plain = copy.deepcopy(model)
    loss = step(ids)[1]
    plain(ids).backward()
    assert torch.equal(loss, plain(ids))
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad - other.grad).norm() <= (0 if chunking == "exact" else 1e-5) * other.grad.norm()
    del plain, mine, other
    model.zero_grad(set_to_none=True)
    peak = checkmate.torch.measure_peak(lambda: step(ids))
    assert peak <= step.result.peak_bytes - step.graph.resident_bytes
    measured = (peak + step.graph.resident_bytes) / 2**20
    print(f"measured {measured:.1f} MiB, within the budget of {budget}, {step.result.overhead:.2f}x the time\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    trained("exact", BUDGET)  # which is the default
    try:
        compiled("exact", SMALL)
    except checkmate.InfeasibleBudgetError as refused:
        print(f"{refused}\n")
    trained("auto", SMALL)
