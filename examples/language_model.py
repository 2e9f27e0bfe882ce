"""A small language model like GPT-2: `build` for `checkmate capture`, and a plain training script for `checkmate run`.

Needs the `torch` extra only.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH, LENGTH, VOCABULARY = 4, 128, 4096
WIDTH, HEADS, LAYERS = 256, 4, 6


class Block(nn.Module):
    """Causal attention and an MLP, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attention(self.first(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.projection(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.second(x)))


class LanguageModel(nn.Module):
    """A language model that returns its logits; the head has the weights of the token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return nn.functional.linear(self.norm(self.blocks(x)), self.tokens.weight)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def build(batch: int = BATCH) -> tuple[nn.Module, object, tuple[Tensor, Tensor]]:
    """The model, its loss and one example of (input, target)."""
    torch.manual_seed(0)
    tokens = torch.randint(VOCABULARY, (batch, LENGTH))
    return LanguageModel(), next_token_loss, (tokens, tokens)


def train(steps: int = 4) -> None:
    """A plain loop, which knows nothing of budgets."""
    model, loss, (tokens, targets) = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        value = loss(model(tokens), targets)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: loss {value.item():.4f}")


if __name__ == "__main__":
    train()
