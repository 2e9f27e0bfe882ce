"""Small models with what real ones have: dropout, running statistics, attention, shared weights, and a large head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 0


@dataclass(frozen=True, slots=True)
class Example:
    """A model, its loss and a batch.

    Attributes:
        model: The model, called with the batch's first element.
        loss: Called with the prediction and the batch's second element.
        batch: Input and target.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: tuple[Tensor, Tensor]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


class _Layer(nn.Module):
    """Attention and MLP, each normalised before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projection, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.projection(self.first(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class _Language(nn.Module):
    """A decoder whose head shares its weight with the embedding."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.norm(self.layers(self.embedding(tokens))), self.embedding.weight)


class _Attention(nn.Module):
    """Attention whose matrix of weights is a tensor, by far the largest: it can be computed for some sequences at a time."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.inputs(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(query @ key.transpose(-1, -2) * (self.heads / width) ** 0.5, -1)
        return self.outputs((weights @ value).transpose(1, 2).reshape(batch, length, width))


def convolutions(scale: int) -> Example:
    """Residual convolutions with BatchNorm and dropout.

    Args:
        scale: Factor on the width; 1 for a CPU.
    """
    torch.manual_seed(SEED)
    width = 16 * scale
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    model = nn.Sequential(*stem, *(_Block(width) for _ in range(2)), *head)
    return Example(model, F.cross_entropy, (torch.randn(16, 3, 24, 24), torch.randint(10, (16,))))


def transformer(scale: int) -> Example:
    """A decoder with attention, dropout and a tied head.

    Args:
        scale: Factor on width, length and vocabulary; 1 for a CPU.
    """
    torch.manual_seed(SEED)
    vocabulary, length = 256 * scale, 64 * scale
    tokens = torch.randint(vocabulary, (4, length))
    model = _Language(3, 64 * scale, 4, vocabulary)
    return Example(model, _token_loss, (tokens, tokens.roll(-1, 1)))


def attention_matrix(scale: int) -> Example:
    """Attention that stores its matrix of weights, the largest tensor.

    Args:
        scale: Factor on width and length; 1 for a CPU.
    """
    torch.manual_seed(SEED)
    x = torch.randn(8, 128 * scale, 32 * scale)
    return Example(_Attention(32 * scale, 4), F.mse_loss, (x, torch.randn_like(x)))


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
