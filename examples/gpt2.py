"""A small GPT-2 with random weights, for `checkmate capture examples/gpt2.py:build`.

Needs `pip install transformers` and the `torch` extra.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

BATCH, LENGTH = 4, 128


class Logits(nn.Module):
    """A language model that returns only its logits."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(batch: int = BATCH) -> tuple[nn.Module, object, tuple[Tensor, Tensor]]:
    """The model, its loss and one example of (input, target)."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=4096, n_positions=LENGTH, n_embd=256, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0)
    tokens = torch.randint(config.vocab_size, (batch, LENGTH))
    return Logits(GPT2LMHeadModel(config)), next_token_loss, (tokens, tokens)
