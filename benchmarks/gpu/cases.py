"""The eight models of the pack with random weights, at two sizes; all but `dit` and the experts of `mixtral` are of transformers.

At full size they are meant to take 10 to 40 GiB keeping everything and less than a second a step on an H100; the tiny ones
run on a CPU in milliseconds. Every op has a deterministic kernel, so that bits can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import Case, ImageLoss, Loss, TokenLoss, UNet
from torch import Tensor, nn


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
        self.gate, self.up = (nn.Parameter(torch.randn(shape) * width**-0.5) for _ in range(2))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

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


def _language(net: Any, batch: int, length: int, blocks: Any, *, shift: bool = True) -> Case:
    ids = torch.randint(0, net.config.vocab_size, (batch, length))
    return Case(TokenLoss(net, shift=shift), {"ids": ids}, tuple(blocks))


def _images(model: nn.Module, batch: int, size: int, classes: int, *target: int, blocks: Any) -> Case:
    images = {"x": torch.randn(batch, 3, size, size), "y": torch.randint(0, classes, (batch, *target))}
    return Case(model, images, tuple(blocks))


def gpt2(tiny: bool) -> Case:
    """GPT-2 small: 12 layers of width 768, 16 sequences of 1024 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    batch, length = (2, 32) if tiny else (16, 1024)
    sizes = {"vocab_size": 256, "n_positions": 32, "n_embd": 32, "n_head": 2, "n_layer": 1} if tiny else {}
    without = {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    net = GPT2LMHeadModel(GPT2Config(**sizes, **without, activation_function="gelu", bos_token_id=0, eos_token_id=0))
    return _language(net, batch, length, net.transformer.h)


TINY = {"vocab_size": 256, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 2}


def llama_1b(tiny: bool) -> Case:
    """The shapes of Llama 3.2 1B but for its vocabulary of 32,000: 16 layers of width 2048, 4 sequences of 2048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    batch, length = (2, 32) if tiny else (4, 2048)
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "intermediate_size": 8192, "num_hidden_layers": 16}
    heads = 1 if tiny else 8
    net = LlamaForCausalLM(LlamaConfig(**(TINY if tiny else sizes), num_key_value_heads=heads, use_cache=False))
    return _language(net, batch, length, net.model.layers)


def bert(tiny: bool) -> Case:
    """BERT large with dropout 0.1: 24 layers of width 1024, 16 sequences of 512 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    batch, length = (2, 32) if tiny else (16, 512)
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096, "num_hidden_layers": 24}
    net = BertForMaskedLM(BertConfig(**(TINY if tiny else sizes), attention_probs_dropout_prob=0.0))
    return _language(net, batch, length, net.bert.encoder.layer, shift=False)


def vit_l(tiny: bool) -> Case:
    """ViT-L/16: 24 layers of width 1024, 64 images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    batch, size, patch, width, heads, depth = (2, 16, 4, 32, 2, 2) if tiny else (64, 224, 16, 1024, 16, 24)
    config = ViTConfig(
        image_size=size, patch_size=patch, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width,
        num_hidden_layers=depth, num_labels=1000,
    )  # fmt: skip
    net = ViTForImageClassification(config)
    return _images(ImageLoss(net), batch, size, 1000, blocks=_of_kind(net, "ViTLayer"))


def resnet50(tiny: bool) -> Case:
    """ResNet-50 in float32 on 128 images of 224 x 224; it pools by means: the gradient of a maximum is not deterministic."""
    from transformers import ResNetConfig, ResNetForImageClassification

    batch, size = (2, 32) if tiny else (128, 224)
    sizes = {"embedding_size": 4, "hidden_sizes": [16, 32], "depths": [1, 1]} if tiny else {}
    net = ResNetForImageClassification(ResNetConfig(num_labels=1000, **sizes))
    net.resnet.embedder.pooler = nn.AvgPool2d(3, 2, 1)
    return _images(ImageLoss(net), batch, size, 1000, blocks=_of_kind(net, "ResNetBottleNeckLayer"))


def _of_kind(net: nn.Module, kind: str) -> list[nn.Module]:
    return [m for m in net.modules() if type(m).__name__ == kind]


def unet(tiny: bool) -> Case:
    """U-Net in float32, four levels that halve by means, on 16 images of 512 x 512."""
    batch, size, widths = (2, 16, (4, 8)) if tiny else (16, 512, (64, 128, 256, 512))
    net = UNet(widths, pool=F.avg_pool2d)
    return _images(PixelLoss(net), batch, size, 4, size, size, blocks=(*net.down, net.mid, *net.merge))


def dit(tiny: bool) -> Case:
    """DiT-L/2: 24 layers of width 1024, 64 latents of 4 x 32 x 32."""
    batch, size, width, heads, depth = (2, 8, 32, 2, 2) if tiny else (64, 32, 1024, 16, 24)
    model = Diffusion(size, width, heads, depth)
    latents, noise = torch.randn(2, batch, 4, size, size)
    return Case(model, {"latents": latents, "noise": noise, "time": torch.rand(batch)}, tuple(model.layers))


def mixtral(tiny: bool) -> Case:
    """A Mixtral of 8 layers of width 1024 with 8 experts each, 8 sequences of 1024 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    batch, length, width, hidden, experts = (2, 32, 32, 64, 4) if tiny else (8, 1024, 1024, 3584, 8)
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 1, "num_hidden_layers": 8}
    heads = 1 if tiny else 4
    net = LlamaForCausalLM(LlamaConfig(**(TINY if tiny else sizes), num_key_value_heads=heads, use_cache=False))
    for layer in net.model.layers:
        layer.mlp = Experts(width, hidden, experts)
    return _language(net, batch, length, net.model.layers)


MODELS: dict[str, Callable[[bool], Case]] = {
    model.__name__: model for model in (gpt2, llama_1b, bert, vit_l, resnet50, unet, dit, mixtral)
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

    return Case(model.train(), {key: moved(t) for key, t in case.batch.items()}, case.blocks)
