"""The eight models of the pack: plain PyTorch, random weights, no other package, at two sizes.

At full size they are meant to take 10 to 40 GiB keeping everything and less than a second a step on an H100; the tiny ones
run on a CPU in milliseconds. Every op has a deterministic kernel, so that bits can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model that returns its loss, a batch, and the blocks that checkpointing by block would wrap."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    blocks: tuple[nn.Module, ...]


def _heads(x: Tensor, heads: int) -> Tensor:
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).transpose(1, 2)


class Layer(nn.Module):
    """Attention and MLP with LayerNorm, before them or after; causal or not; dropout or none."""

    def __init__(self, width: int, heads: int, *, causal: bool, before: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.before = heads, causal, before
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (_heads(part, self.heads) for part in self.inputs(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.drop(self.outputs(attended.transpose(1, 2).reshape(x.shape)))

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = x + self.attend(self.norms[0](x))
            return x + self.drop(self.mlp(self.norms[1](x)))
        x = self.norms[0](x + self.attend(x))
        return self.norms[1](x + self.drop(self.mlp(x)))


class Tokens(nn.Module):
    """A language model: embeddings, layers, a head, and the cross entropy of all tokens."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: list[nn.Module], norm: nn.Module, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width) if tied else None
        self.layers, self.norm = nn.ModuleList(layers), norm
        self.head = None if tied else nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        logits = self.head(x) if self.head is not None else F.linear(x, self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Top-2 of several gated MLPs, with a capacity and dispatch by matrix product (GShard, Lepikhin et al. 2020)."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.router = nn.Linear(width, experts, bias=False)
        shape = (experts, width, hidden)
        self.gate, self.up = (nn.Parameter(torch.randn(shape) * width**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        capacity = 2 * length // self.experts
        weight, chosen = torch.softmax(self.router(x).float(), -1).topk(2, -1)
        mask = chosen.unsqueeze(-1) == torch.arange(self.experts, device=x.device)  # [batch, length, 2, expert]
        place = mask.flatten(1, 2).int().cumsum(1).view(mask.shape) - 1
        slots = (place.unsqueeze(-1) == torch.arange(capacity, device=x.device)) & mask.unsqueeze(-1)
        combine = (weight[..., None, None] * slots).sum(2).to(x.dtype)  # [batch, length, expert, slot]
        given = torch.einsum("blec,blw->ebcw", (combine > 0).to(x.dtype), x).flatten(1, 2)
        hidden = F.silu(torch.bmm(given, self.gate)) * torch.bmm(given, self.up)
        made = torch.bmm(hidden, self.down).view(self.experts, batch, capacity, -1)
        return torch.einsum("blec,ebcw->blw", combine, made)


class LlamaLayer(nn.Module):
    """Grouped-query attention with rotary positions and RMSNorm, and a gated MLP or experts."""

    def __init__(self, width: int, heads: int, groups: int, mlp: nn.Module) -> None:
        super().__init__()
        self.heads, self.groups, self.mlp = heads, groups, mlp
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        size = width // heads * groups
        self.query, self.key, self.value = (nn.Linear(width, n, bias=False) for n in (width, size, size))
        self.outputs = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k = _rotated(_heads(self.query(y), self.heads)), _rotated(_heads(self.key(y), self.groups))
        v = _heads(self.value(y), self.groups)
        k, v = (t.repeat_interleave(self.heads // self.groups, 1) for t in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outputs(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


def _rotated(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turns = torch.arange(x.shape[-2], device=x.device)[:, None] * 1e4 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = turns.cos().to(x.dtype), turns.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Patches(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self, size: int, patch: int, width: int, layers: list[nn.Module], classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.layers, self.norm, self.head = nn.ModuleList(layers), nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)[:, 0]).float(), classes)


class Bottleneck(nn.Module):
    """The block of ResNet-50."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width

        def conv(i: int, o: int, kernel: int, stride: int = 1) -> list[nn.Module]:
            return [nn.Conv2d(i, o, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(o)]

        relu = nn.ReLU()
        self.body = nn.Sequential(*conv(inputs, width, 1), relu, *conv(width, width, 3, stride), relu, *conv(width, outputs, 1))
        self.skip = nn.Sequential(*conv(inputs, outputs, 1, stride)) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.skip(x) + self.body(x))


class ResNet(nn.Module):
    """ResNet (He et al. 2015). Its pooling is by strided convolution where the paper has a maximum, whose gradient is not
    deterministic on every GPU."""

    def __init__(self, width: int, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.AvgPool2d(2)]
        blocks: list[nn.Module] = []
        inputs = width
        for stage, depth in enumerate(depths):
            for k in range(depth):
                blocks.append(Bottleneck(inputs, width << stage, 2 if stage and not k else 1))
                inputs = 4 * width << stage
        self.stem, self.blocks, self.head = nn.Sequential(*stem), nn.ModuleList(blocks), nn.Linear(inputs, classes)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), classes)


class DoubleConv(nn.Module):
    """Two convolutions with BatchNorm and ReLU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in (inputs, outputs):
            layers += [nn.Conv2d(i, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """U-Net (Ronneberger et al. 2015) with BatchNorm; it halves by strided means."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(DoubleConv(i, o) for i, o in zip((3, *widths), widths, strict=False))
        self.middle = DoubleConv(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths))
        self.merge = nn.ModuleList(DoubleConv(2 * w, w) for w in reversed(widths))
        self.out = nn.Conv2d(widths[0], classes, 1)

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        x, skipped = images, []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skipped), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        scores = self.out(x).permute(0, 2, 3, 1).flatten(0, 2)  # the loss of images has no deterministic kernel on a GPU
        return F.cross_entropy(scores.float(), classes.flatten())


class DiffusionLayer(nn.Module):
    """A layer of DiT (Peebles and Xie 2022): shifts, scales and gates from the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width, elementwise_affine=False) for _ in range(2)])
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale, gate, shift_mlp, scale_mlp, gate_mlp = self.modulation(condition).unsqueeze(1).chunk(6, -1)
        y = self.norms[0](x) * (1 + scale) + shift
        q, k, v = (_heads(part, self.heads) for part in self.inputs(y).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + gate * self.outputs(attended.transpose(1, 2).reshape(x.shape))
        return x + gate_mlp * self.mlp(self.norms[1](x) * (1 + scale_mlp) + shift_mlp)


class Diffusion(nn.Module):
    """DiT on latents: predicts the noise, given a time."""

    def __init__(self, size: int, width: int, layers: list[nn.Module]) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, (size // 2) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.layers, self.norm, self.out = nn.ModuleList(layers), nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, latents: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        x = self.patches(latents + noise).flatten(2).transpose(1, 2) + self.positions
        turns = time[:, None] * torch.exp(-torch.arange(128, device=time.device) / 14)
        condition = self.time(torch.cat([turns.cos(), turns.sin()], -1).to(x.dtype))
        for layer in self.layers:
            x = layer(x, condition)
        batch, _, height, width = noise.shape
        wanted = noise.view(batch, 4, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, 16)
        return F.mse_loss(self.out(self.norm(x)).float(), wanted.float())


def _tokens(vocabulary: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocabulary, (batch, length))
    return tokens, tokens.roll(-1, 1)


def gpt2(tiny: bool) -> Case:
    """GPT-2 small: 12 layers of width 768, 16 sequences of 1024 tokens."""
    vocabulary, batch, length, width, heads, depth = (256, 2, 32, 32, 2, 1) if tiny else (50257, 16, 1024, 768, 12, 12)
    layers: list[nn.Module] = [Layer(width, heads, causal=True) for _ in range(depth)]
    model = Tokens(vocabulary, length, width, layers, nn.LayerNorm(width), tied=True)
    return Case(model, _tokens(vocabulary, batch, length), tuple(layers))


def llama_1b(tiny: bool) -> Case:
    """The shapes of Llama 3.2 1B but for its vocabulary of 32,000: 16 layers of width 2048, 4 sequences of 2048 tokens."""
    vocabulary, batch, length, width, heads, groups, hidden, depth = (
        (256, 2, 32, 32, 4, 2, 64, 2) if tiny else (32000, 4, 2048, 2048, 32, 8, 8192, 16)
    )
    layers: list[nn.Module] = [LlamaLayer(width, heads, groups, GatedMlp(width, hidden)) for _ in range(depth)]
    model = Tokens(vocabulary, length, width, layers, nn.RMSNorm(width), tied=False)
    return Case(model, _tokens(vocabulary, batch, length), tuple(layers))


def bert(tiny: bool) -> Case:
    """BERT large with dropout 0.1: 24 layers of width 1024, 16 sequences of 512 tokens."""
    vocabulary, batch, length, width, heads, depth = (256, 2, 32, 32, 2, 2) if tiny else (30522, 16, 512, 1024, 16, 24)
    layers: list[nn.Module] = [Layer(width, heads, causal=False, before=False, dropout=0.1) for _ in range(depth)]
    model = Tokens(vocabulary, length, width, layers, nn.LayerNorm(width), tied=True)
    return Case(model, _tokens(vocabulary, batch, length), tuple(layers))


def vit_l(tiny: bool) -> Case:
    """ViT-L/16: 24 layers of width 1024, 64 images of 224 x 224."""
    batch, size, patch, width, heads, depth = (2, 16, 4, 32, 2, 2) if tiny else (64, 224, 16, 1024, 16, 24)
    layers: list[nn.Module] = [Layer(width, heads, causal=False) for _ in range(depth)]
    model = Patches(size, patch, width, layers, 1000)
    return Case(model, (torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))), tuple(layers))


def resnet50(tiny: bool) -> Case:
    """ResNet-50 in float32 on 128 images of 224 x 224."""
    batch, size, width, depths = (2, 32, 4, (1, 1)) if tiny else (128, 224, 64, (3, 4, 6, 3))
    model = ResNet(width, depths, 1000)
    return Case(model, (torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))), tuple(model.blocks))


def unet(tiny: bool) -> Case:
    """U-Net in float32, four levels, on 16 images of 512 x 512."""
    batch, size, widths = (2, 16, (4, 8)) if tiny else (16, 512, (64, 128, 256, 512))
    model = UNet(widths, 4)
    batch_of = (torch.randn(batch, 3, size, size), torch.randint(0, 4, (batch, size, size)))
    return Case(model, batch_of, (*model.down, model.middle, *model.merge))


def dit(tiny: bool) -> Case:
    """DiT-L/2: 24 layers of width 1024, 64 latents of 4 x 32 x 32."""
    batch, size, width, heads, depth = (2, 8, 32, 2, 2) if tiny else (64, 32, 1024, 16, 24)
    layers: list[nn.Module] = [DiffusionLayer(width, heads) for _ in range(depth)]
    model = Diffusion(size, width, layers)
    latents = (torch.randn(batch, 4, size, size) for _ in range(2))
    return Case(model, (*latents, torch.rand(batch)), tuple(layers))


def mixtral(tiny: bool) -> Case:
    """A Mixtral of 8 layers of width 1024 with 8 experts each, 8 sequences of 1024 tokens."""
    vocabulary, batch, length, width, heads, groups, hidden, experts, depth = (
        (256, 2, 32, 32, 4, 2, 64, 4, 2) if tiny else (32000, 8, 1024, 1024, 16, 4, 3584, 8, 8)
    )
    layers: list[nn.Module] = [LlamaLayer(width, heads, groups, Experts(width, hidden, experts)) for _ in range(depth)]
    model = Tokens(vocabulary, length, width, layers, nn.RMSNorm(width), tied=False)
    return Case(model, _tokens(vocabulary, batch, length), tuple(layers))


MODELS: dict[str, Callable[[bool], Case]] = {
    "gpt2": gpt2,
    "llama_1b": llama_1b,
    "bert": bert,
    "vit_l": vit_l,
    "resnet50": resnet50,
    "unet": unet,
    "dit": dit,
    "mixtral": mixtral,
}

FLOAT32 = ("resnet50", "unet")
"""Models that are trained in float32; the others are in bfloat16 at full size."""


def build(name: str, device: str, tiny: bool) -> Case:
    """A model by name, the same each time, with its batch on the device."""
    torch.manual_seed(0)
    case = MODELS[name](tiny)
    dtype = torch.float32 if tiny or name in FLOAT32 else torch.bfloat16
    model = case.model.to(dtype).to(device)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() and tensor.ndim > 1 else None)

    return Case(model.train(), tuple(moved(t) for t in case.batch), case.blocks)


def parameters(case: Case) -> Iterator[Any]:
    """Parameters of a case's model."""
    return case.model.parameters()
