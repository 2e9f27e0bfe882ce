"""The eight models of the pack with random weights, at two sizes; all but `dit` and the experts of `mixtral` are of transformers.

At full size they are meant to take 10 to 40 GiB keeping everything and less than a second a step on an H100; the tiny ones
run on a CPU in milliseconds. Every op has a deterministic kernel, so that bits can be compared.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import models
import torch
import torch.nn.functional as F
from models import Case, Loss, transformer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class PixelLoss(Loss):
    """Cross entropy of all pixels: the loss of images has no deterministic kernel on a GPU."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.net(x).permute(0, 2, 3, 1).flatten(0, 2), y.flatten())


class Experts(nn.Module):
    """Top-2 of several gated MLPs, with a capacity and dispatch by matrix product (GShard, Lepikhin et al. 2020)."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.experts = experts
        self.register_buffer("numbers", torch.arange(experts))
        self.router = nn.Linear(width, experts, bias=False)
        shape = (experts, width, hidden)
        self.gate, self.up = (nn.Parameter(torch.empty(shape).normal_(0, width**-0.5)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(experts, hidden, width).normal_(0, hidden**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        capacity = 2 * length // self.experts
        weight, chosen = torch.softmax(self.router(x).float(), -1).topk(2, -1)
        mask = chosen.unsqueeze(-1) == self.numbers  # [batch, length, 2, expert]
        place = mask.flatten(1, 2).int().cumsum(1).view(mask.shape) - 1
        slots = (place.unsqueeze(-1) == torch.arange(capacity, device=x.device)) & mask.unsqueeze(-1)
        combine = (weight[..., None, None] * slots).sum(2).to(x.dtype)  # [batch, length, expert, slot]
        given = torch.einsum("blec,blw->ebcw", (combine > 0).to(x.dtype), x).flatten(1, 2)
        hidden = F.silu(torch.bmm(given, self.gate)) * torch.bmm(given, self.up)
        made = torch.bmm(hidden, self.down).view(self.experts, batch, capacity, -1)
        return torch.einsum("blec,ebcw->blw", combine, made)


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
        inputs = self.inputs(self.norms[0](x) * (1 + scale) + shift)
        q, k, v = inputs.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + gate * self.outputs(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + gate_mlp * self.mlp(self.norms[1](x) * (1 + scale_mlp) + shift_mlp)


class Diffusion(nn.Module):
    """DiT on latents: predicts the noise, given a time."""

    def __init__(self, size: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(4, width, 2, stride=2)
        self.positions = nn.Parameter(torch.randn(1, (size // 2) ** 2, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(DiffusionLayer(width, heads) for _ in range(depth))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 16)

    def forward(self, latents: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        x = self.patches(latents + noise).flatten(2).transpose(1, 2) + self.positions
        turns = time[:, None] * torch.exp(-torch.arange(128, device=time.device) / 14)
        condition = self.time(torch.cat([turns.cos(), turns.sin()], -1).to(x.dtype))
        for layer in self.layers:
            x = layer(x, condition)
        wanted = F.pixel_unshuffle(noise, 2).flatten(2).transpose(1, 2)
        return F.mse_loss(self.out(self.norm(x)).float(), wanted.float())


LLAMA_1B = transformer(16, 2048, 32, 8192, num_key_value_heads=8)
TINY = transformer(2, 32, 2, 64, vocab_size=256)
TINY_LLAMA = {**TINY, "num_key_value_heads": 1}


def gpt2(tiny: bool) -> Case:
    """GPT-2 small: 12 layers of width 768, 16 sequences of 1024 tokens."""
    layers, width, heads, vocabulary, batch, length = (1, 32, 2, 256, 2, 32) if tiny else (12, 768, 12, 50257, 16, 1024)
    others = {"n_head": heads, "n_positions": length, "activation_function": "gelu"}
    return models.gpt2(layers, width, vocabulary, batch, length, **others)


def llama_1b(tiny: bool) -> Case:
    """The shapes of Llama 3.2 1B but for its vocabulary of 32,000: 16 layers of width 2048, 4 sequences of 2048 tokens."""
    return models.llama(2, 32, TINY_LLAMA) if tiny else models.llama(4, 2048, LLAMA_1B)


def bert(tiny: bool) -> Case:
    """BERT large with dropout 0.1: 24 layers of width 1024, 16 sequences of 512 tokens."""
    batch, length, sizes = (2, 32, TINY) if tiny else (16, 512, transformer(24, 1024, 16, 4096))
    return models.bert(batch, length, {**sizes, "attention_probs_dropout_prob": 0.0})


def vit_l(tiny: bool) -> Case:
    """ViT-L/16: 24 layers of width 1024, 64 images of 224 x 224."""
    if tiny:
        return models.vit(2, transformer(2, 32, 2, 128, image_size=16, patch_size=4))
    return models.vit(64, transformer(24, 1024, 16, 4096, image_size=224))


def resnet50(tiny: bool) -> Case:
    """ResNet-50 in float32 on 128 images of 224 x 224; it pools by means: the gradient of a maximum is not deterministic."""
    small = {"embedding_size": 4, "hidden_sizes": [16, 32], "depths": [1, 1]}
    case = models.resnet50(2, 32, **small) if tiny else models.resnet50(128, 224)
    case.model.net.resnet.embedder.pooler = nn.AvgPool2d(3, 2, 1)  # type: ignore[union-attr]
    return case


def unet(tiny: bool) -> Case:
    """U-Net in float32, four levels that halve by means, on 16 images of 512 x 512."""
    batch, size, widths = (2, 16, (4, 8)) if tiny else (16, 512, (64, 128, 256, 512))
    return models.unet(batch, size, PixelLoss, widths=widths, pool=F.avg_pool2d)


def dit(tiny: bool) -> Case:
    """DiT-L/2: 24 layers of width 1024, 64 latents of 4 x 32 x 32."""
    batch, size, width, heads, depth = (2, 8, 32, 2, 2) if tiny else (64, 32, 1024, 16, 24)
    model = Diffusion(size, width, heads, depth)
    latents, noise = torch.randn(2, batch, 4, size, size)
    return Case(model, {"latents": latents, "noise": noise, "time": torch.rand(batch)}, tuple(model.layers))


def mixtral(tiny: bool) -> Case:
    """A Mixtral of 8 layers of width 1024 with 8 experts each, 8 sequences of 1024 tokens."""
    width, hidden, experts = (32, 64, 4) if tiny else (1024, 3584, 8)
    case = models.llama(2, 32, TINY_LLAMA) if tiny else models.llama(8, 1024, transformer(8, 1024, 16, 1, num_key_value_heads=4))
    for layer in case.blocks:
        layer.mlp = Experts(width, hidden, experts)
    return case


CASES = {case.__name__: case for case in (gpt2, llama_1b, bert, vit_l, resnet50, unet, dit, mixtral)}

FLOAT32 = ("resnet50", "unet")
"""Models that are trained in float32; the others are in bfloat16 at full size."""


class RepeatedNumbers(TorchFunctionMode):
    """Random weights repeat the same million numbers: a processor draws a hundred times as many in a second or two."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, most = kwargs or {}, 2**20
        if function not in (Tensor.normal_, Tensor.uniform_) or args[0].numel() <= most:
            return function(*args, **given)
        flat = args[0].view(-1)
        numbers = function(flat[:most], *args[1:], **given)
        flat.copy_(numbers.repeat(-(-len(flat) // most))[: len(flat)])
        return args[0]


@functools.lru_cache(1)
def built(name: str, tiny: bool) -> Case:
    """A model by name on the processor, the same each time."""
    torch.manual_seed(0)
    with RepeatedNumbers():
        return CASES[name](tiny)


def build(name: str, device: str, tiny: bool) -> Case:
    """A model by name, the same each time, with its batch on the device."""
    if device == "cpu":
        built.cache_clear()  # a copy would count as memory beside the step
    case = built(name, tiny) if device == "cpu" else copy.deepcopy(built(name, tiny))
    torch.manual_seed(0)
    dtype = torch.float32 if tiny or name in FLOAT32 else torch.bfloat16
    model = case.model.to(dtype).to(device)

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() and tensor.ndim > 1 else None)

    return Case(model.train(), {key: moved(t) for key, t in case.batch.items()}, case.blocks)
