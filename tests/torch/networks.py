"""Small networks, each with one thing that recomputation can get wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def mlp(depth: int = 4, width: int = 64, dropout: float = 0.2) -> nn.Module:
    """Dropout: random masks must be replayed, and the generator must end where it would."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))]
    return nn.Sequential(*layers)


class Cnn(nn.Module):
    """BatchNorm: statistics are updated once, however often the layer is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.view(x.shape[0], 3, 8, 8))
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.max_pool2d(x, 2)


class Unet(nn.Module):
    """What is around convolutions: norms of groups, pooling, skips, attention, upsampling."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 16, 3, padding=1)
        self.batch_norm = nn.BatchNorm2d(16, track_running_stats=False)
        self.qkv = nn.Conv2d(16, 48, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.leave = nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = F.silu(self.norm(self.enter(x.view(x.shape[0], 3, 8, 8))))
        x = F.relu(self.batch_norm(self.down(F.max_pool2d(skip, 2))))
        q, k, v = self.qkv(x).flatten(2).transpose(1, 2).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        return self.leave(torch.cat([self.up(x), skip], 1))


class Transformer(nn.Module):
    """Attention with dropout inside the kernel, layer norms and residuals."""

    def __init__(self, dropout: float = 0.1, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(-1, 16, 32)
        for layer in self.layers:
            x = layer(x)
        return x


class Tied(nn.Module):
    """One weight used twice: two gradients for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64, bias=False)
        self.between = mlp(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.between(self.embed(x)) @ self.embed.weight.t()


class InPlace(nn.Module):
    """In-place arithmetic, and a buffer that the forward reads and then overwrites."""

    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("running", torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu_()
        h = h * (1 + self.running).tanh()
        with torch.no_grad():
            self.running.mul_(0.9).add_(h.mean(0), alpha=0.1)
        y = self.second(h)
        y += h.sigmoid()
        return y.mul_(0.5).exp()


class Views(nn.Module):
    """Chunks, transposes and expanded tensors: many names for one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, dim=-1)
        scores = (q.view(-1, 4, 16).transpose(0, 1) @ k.view(-1, 4, 16).transpose(0, 1).mT).softmax(-1)
        mixed = (scores @ v.view(-1, 4, 16).transpose(0, 1)).transpose(0, 1).reshape(x.shape)
        return self.out(mixed + mixed.mean(0, keepdim=True).expand_as(mixed))[:, :32].unbind(0)[0] + mixed[:, 32:]


class Frozen(nn.Module):
    """Parameters without gradients, and one that the loss does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(3)
        self.unused = nn.Parameter(torch.ones(3))
        for parameter in self.body[0].parameters():
            parameter.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


class Custom(nn.Module):
    """A hand-written backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Cube.apply(self.body(_Cube.apply(x * 0.1)))


class Checkpointed(nn.Module):
    """Regions that the user put under `torch.utils.checkpoint`: hints, not walls."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(mlp(2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return x


class Noise(nn.Module):
    """Random numbers that are made, not drawn from an input."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x + torch.rand(x.shape) * torch.randn_like(x)).tanh()


class Mixed(nn.Module):
    """Dropout, BatchNorm, a weight that is used twice, a frozen and an unused parameter: all that an optimizer meets at once."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.stem, self.body, self.head = Cnn(), mlp(depth, 128), nn.Linear(128, 128)
        self.frozen = nn.Parameter(torch.ones(128), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.stem(x).flatten(1) * self.frozen)
        return self.head(hidden) @ self.head.weight


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dropout": mlp,
    "batch_norm": Cnn,
    "unet": Unet,
    "attention": Transformer,
    "tied": Tied,
    "in_place": InPlace,
    "views": Views,
    "frozen": Frozen,
    "custom_function": Custom,
    "checkpointed": Checkpointed,
    "noise": Noise,
}


def batch(rows: int = 128) -> torch.Tensor:
    """A batch for any of the networks, the same each time."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, 192, generator=generator)


def input_of(name: str, rows: int = 128) -> torch.Tensor:
    """The batch with the width that a network wants."""
    x = batch(rows)
    return x if name in ("batch_norm", "unet") else x[:, :64].contiguous()
