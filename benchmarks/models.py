"""Models of the PyTorch benchmarks: random weights, a step of 0.2 to 2 seconds on one core, the loss as output."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class Case:
    """A model that returns its loss, a batch, and the blocks that per-block checkpointing would wrap."""

    model: nn.Module
    batch: dict[str, torch.Tensor]
    blocks: tuple[nn.Module, ...]


class Loss(nn.Module):
    """Cross entropy of what a model predicts; where ``whole``, the logits are returned beside it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.whole = False

    def returned(self, loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """What the step gets."""
        return (loss, logits) if self.whole else loss


class TokenLoss(Loss):
    """Cross entropy of a language model's logits; ``shift`` predicts the next token."""

    def __init__(self, net: nn.Module, shift: bool) -> None:
        super().__init__(net)
        self.shift = shift

    def forward(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        logits = self.net(input_ids=ids, attention_mask=mask).logits
        if self.shift:
            ids = F.pad(ids[:, 1:], (0, 1), value=-100)
        return self.returned(F.cross_entropy(logits.view(-1, logits.shape[-1]), ids.reshape(-1)), logits)


class ImageLoss(Loss):
    """Cross entropy of an image model's logits."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        output = self.net(x)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        return self.returned(F.cross_entropy(logits, y), logits)


class HiddenSum(nn.Module):
    """The loss of pytorch#197838: the sum of the last hidden state."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.net(input_ids=ids, use_cache=False).last_hidden_state.sum()


def conv_block(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions with BatchNorm and ReLU."""
    layers: list[nn.Module] = []
    for i in (inputs, outputs):
        layers += [nn.Conv2d(i, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """U-Net of Ronneberger et al. (2015), four levels deep, with BatchNorm."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), classes: int = 4, pool: Any = F.max_pool2d) -> None:
        super().__init__()
        self.pool = pool
        self.down = nn.ModuleList(conv_block(i, o) for i, o in zip((3, *widths), widths, strict=False))
        self.mid = conv_block(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths))
        self.merge = nn.ModuleList(conv_block(2 * w, w) for w in reversed(widths))
        self.out = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = self.pool(x, 2)
        x = self.mid(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skipped), strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.out(x)


def _ids(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def _images(batch: int, size: int, classes: int, *target: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return {"x": torch.randn(batch, 3, size, size, generator=g), "y": torch.randint(0, classes, (batch, *target), generator=g)}


def _instances(net: nn.Module, *kinds: str) -> Iterator[nn.Module]:
    return (m for m in net.modules() if type(m).__name__ in kinds)


def gpt2(layers: int = 12, width: int = 256, vocabulary: int = 4096, batch: int = 8, length: int = 256, **others: Any) -> Case:
    """GPT-2: 12 layers, width 256, 8 sequences of 256 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": layers, "n_embd": width, "n_head": 8, "n_positions": 256, "vocab_size": vocabulary, **others}
    without = {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(**sizes, **without, bos_token_id=0, eos_token_id=0)
    net = GPT2LMHeadModel(config)
    return Case(TokenLoss(net, shift=True).train(), {"ids": _ids(vocabulary, batch, length)}, tuple(net.transformer.h))


def gpt2_small() -> Case:
    """GPT-2 small as it is configured by default, 124 million parameters, dropout 0.1; 4 sequences of 256 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    net = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return Case(TokenLoss(net, shift=True).train(), {"ids": _ids(50257, 4, 256)}, tuple(net.transformer.h))


def transformer(layers: int, width: int, heads: int, hidden: int, **others: Any) -> dict[str, Any]:
    """Sizes of a network, as configurations of transformers name them."""
    named = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": hidden}
    return named | others


BERT = transformer(6, 256, 8, 1024, vocab_size=4096)


def bert(batch: int = 8, length: int = 128, sizes: Any = BERT) -> Case:
    """BERT: 6 layers, width 256, dropout 0.1, 8 sequences of 128 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    net = BertForMaskedLM(BertConfig(**sizes))
    ids = _ids(net.config.vocab_size, batch, length)
    return Case(TokenLoss(net, shift=False).train(), {"ids": ids, "mask": torch.ones_like(ids)}, tuple(net.bert.encoder.layer))


LLAMA = transformer(6, 256, 8, 768, num_key_value_heads=4, vocab_size=4096)


def llama(batch: int = 4, length: int = 256, sizes: Any = LLAMA) -> Case:
    """Llama: 6 layers, width 256, grouped-query attention, 4 sequences of 256 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    net = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    return Case(TokenLoss(net, shift=True).train(), {"ids": _ids(net.config.vocab_size, batch, length)}, tuple(net.model.layers))


VIT = transformer(12, 384, 6, 1536, image_size=96)


def vit(batch: int = 16, sizes: Any = VIT) -> Case:
    """ViT small: 12 layers, width 384, 16 images of 96 x 96."""
    from transformers import ViTConfig, ViTForImageClassification

    net = ViTForImageClassification(ViTConfig(**sizes, num_labels=1000))
    return Case(ImageLoss(net).train(), _images(batch, net.config.image_size, 1000), tuple(_instances(net, "ViTLayer")))


def resnet50(batch: int = 16, size: int = 64, **sizes: Any) -> Case:
    """ResNet-50 on 16 images of 64 x 64."""
    from transformers import ResNetConfig, ResNetForImageClassification

    net = ResNetForImageClassification(ResNetConfig(num_labels=1000, **sizes))
    blocks = _instances(net, "ResNetBottleNeckLayer")
    return Case(ImageLoss(net).train(), _images(batch, size, 1000), tuple(blocks))


def mobilenet_v2() -> Case:
    """MobileNetV2 on 16 images of 96 x 96, without its last dropout."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    net = MobileNetV2ForImageClassification(MobileNetV2Config(num_labels=1000, image_size=96, classifier_dropout_prob=0.0))
    blocks = _instances(net, "MobileNetV2Stem", "MobileNetV2InvertedResidual")
    return Case(ImageLoss(net).train(), _images(16, 96, 1000), tuple(blocks))


def unet(batch: int = 4, size: int = 128, loss: Any = ImageLoss, **options: Any) -> Case:
    """U-Net on 4 images of 128 x 128."""
    net = UNet(**options)
    return Case(loss(net).train(), _images(batch, size, 4, size, size), (*net.down, net.mid, *net.merge))


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "resnet50": resnet50,
    "mobilenet_v2": mobilenet_v2,
    "unet": unet,
    "llama": llama,
}


WHOLE = "_whole"


def build(name: str) -> Case:
    """A model by name, the same each time, on one thread.

    Beside `MODELS` there are ``gpt2_small``, ``gpt2_whole`` and others that return their logits too, ``resnet50_32`` with 32
    images, ``llama_4``, a model of pytorch#197838 with 16 layers, and ``layers_32``, a small Llama of 32 layers.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if name.startswith("llama_"):
        s = int(name.removeprefix("llama_"))
        return _hidden_llama(layers=4 * s, tokens=128 * s)
    if name.startswith("layers_"):
        return _hidden_llama(layers=int(name.removeprefix("layers_")), tokens=128)
    if name == "gpt2_small":
        return gpt2_small()
    if name == "resnet50_32":
        return resnet50(32)
    case = MODELS[name.removesuffix(WHOLE)]()
    if name.endswith(WHOLE):
        assert isinstance(case.model, Loss)
        case.model.whole = True
    return case


def _hidden_llama(*, layers: int, tokens: int) -> Case:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(hidden_size=256, intermediate_size=688, num_attention_heads=8, vocab_size=1000, num_hidden_layers=layers)
    net = LlamaModel(config)
    return Case(HiddenSum(net).train(), {"ids": _ids(1000, 2, tokens)}, tuple(net.layers))
