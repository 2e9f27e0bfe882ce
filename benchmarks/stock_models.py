"""Models as pip installs them, each with a training step in the call that its own documentation shows.

A step is the body of a training loop up to the backward of its loss. It assigns to the variables of the loop, so that outputs and
loss of the step before are held until the new ones are assigned. Weights are random, since nothing is downloaded; sizes are such
that activations outweigh the weights.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Compiled = Sequence[Callable[..., Any]]


class Loop:
    """Variables of a training loop: what the model returned, and the loss."""

    outputs: Any = None
    loss: Any = None


@dataclass(frozen=True)
class Case:
    """Modules, each of which is compiled, and their training steps."""

    modules: Sequence[nn.Module]
    step: Callable[[Compiled, Loop], None]  # body of the loop: all but the last backward and the update
    data: Sequence[Any]  # tensors that a step is given
    outside: bool = False  # whether the loss is computed outside of the compiled modules


def documented(model: nn.Module, **batch: Any) -> Case:
    """``model(**batch).loss.backward()``: the model computes its loss."""

    def step(compiled: Compiled, loop: Loop) -> None:
        loop.outputs = compiled[0](**batch)
        loop.loss = loop.outputs.loss

    return Case([model.train()], step, list(batch.values()))


def with_loss(model: nn.Module, loss: Callable[[Any], Any], *data: Any, given: Sequence[Any] = (), **named: Any) -> Case:
    """``loss(model(*data)).backward()``: the loss is outside of the compiled model."""

    def step(compiled: Compiled, loop: Loop) -> None:
        loop.outputs = compiled[0](*data, **named)
        loop.loss = loss(loop.outputs)

    return Case([model.train()], step, [*data, *named.values(), *given], outside=True)


def tokens(vocabulary: int, *shape: int) -> torch.Tensor:
    """Random ids."""
    return torch.randint(3, vocabulary, shape)


def images(*shape: int) -> torch.Tensor:
    """A random batch of images."""
    return torch.randn(*shape)


def hugging(kind: str, head: str, batch: Callable[[], dict[str, Any]], **config: Any) -> Callable[[], Case]:
    """A model of transformers in the call that computes its loss."""

    def case() -> Case:
        import transformers

        model = getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**config))
        return documented(model, **batch())

    return case


def text(*shape: int, labels: str = "tokens", mask: bool = True) -> Callable[[], dict[str, Any]]:
    """A batch of token ids, with labels for each token, each of two classes, or one for each text."""

    def batch() -> dict[str, Any]:
        ids = tokens(512, *shape)
        target = ids if labels == "tokens" else torch.randint(2, shape[:1] if labels == "classes" else shape)
        return {"input_ids": ids, **({"attention_mask": torch.ones_like(ids)} if mask else {}), "labels": target}

    return batch


def pictures(size: int = 64, count: int = 8, **labels: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """A batch of square images, with two classes if no other labels are given."""
    target = labels.get("labels", lambda: torch.randint(2, (count,)))
    return lambda: {"pixel_values": images(count, 3, size, size), "labels": target()}


def two_texts(vocabulary: int, first: int, second: int) -> Callable[[], dict[str, Any]]:
    """Token ids of texts, and of others that a decoder writes."""
    return lambda: {"input_ids": tokens(vocabulary, 8, first), "labels": tokens(vocabulary, 8, second)}


def wave() -> dict[str, Any]:
    """Sound, and letters."""
    return {"input_values": images(4, 8000), "labels": torch.randint(1, 32, (4, 10))}


def boxes(count: int) -> list[dict[str, torch.Tensor]]:
    """Three objects in each image."""
    return [{"class_labels": torch.randint(4, (3,)), "boxes": torch.rand(3, 4) * 0.4 + 0.2} for _ in range(count)]


LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
KV = {**LLAMA, "num_key_value_heads": 2}
TWO = {**KV, "num_hidden_layers": 2}
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
GPT2 = {"vocab_size": 512, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, **ENDS}
BART = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
WAVE = {"vocab_size": 32, **LLAMA, "conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4)}
WAVE |= {"num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
TEXT = {"vocab_size": 512, "max_position_embeddings": 64, **LLAMA, **ENDS}
IMAGE = {"image_size": 64, "patch_size": 8, **LLAMA}
STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}

decoder = functools.partial(hugging, head="ForCausalLM", batch=text(8, 128, mask=False), vocab_size=512)
encoder = functools.partial(hugging, vocab_size=512)
classifier = functools.partial(hugging, head="ForImageClassification")
MASKED, TEXTS, EACH = text(8, 128), text(8, 128, labels="classes"), text(8, 128, labels="each")

MODELS: dict[str, Callable[[], Case]] = {
    # Decoders of transformers: `model(input_ids, labels=...)`, with the cache that is on by default.
    "gpt2": hugging("GPT2", "LMHeadModel", text(8, 128, mask=False), **GPT2),
    "gpt_neo": decoder(
        "GPTNeo", hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]],
        max_position_embeddings=128, window_size=32, **ENDS,
    ),
    "gpt_neox": decoder("GPTNeoX", **LLAMA, **ENDS),
    "opt": decoder(
        "OPT", hidden_size=64, ffn_dim=128, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=64, **ENDS
    ),
    "bloom": decoder("Bloom", hidden_size=64, n_layer=3, n_head=4, **ENDS),
    "llama": decoder("Llama", **KV),
    "mistral": decoder("Mistral", **KV, sliding_window=64),
    "qwen3": decoder("Qwen3", **KV, head_dim=16),
    "gemma2": decoder("Gemma2", **KV, head_dim=16),
    "phi": decoder("Phi", **LLAMA),
    "falcon": decoder("Falcon", hidden_size=64, num_hidden_layers=3, num_attention_heads=4, **ENDS),
    "mamba": decoder("Mamba", batch=text(8, 32, mask=False), hidden_size=64, num_hidden_layers=2, state_size=8, **ENDS),
    "mixtral": decoder("Mixtral", **TWO, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": decoder(
        "Qwen2Moe", **TWO, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64
    ),
    "olmoe": decoder("Olmoe", **TWO, num_experts=4, num_experts_per_tok=2),
    # Encoders of transformers.
    "bert": encoder("Bert", "ForMaskedLM", MASKED, **LLAMA),
    "roberta": encoder("Roberta", "ForSequenceClassification", TEXTS, max_position_embeddings=160, **LLAMA),
    "distilbert": encoder("DistilBert", "ForTokenClassification", EACH, dim=64, hidden_dim=128, n_layers=3, n_heads=4),
    "albert": encoder("Albert", "ForMaskedLM", MASKED, embedding_size=32, **LLAMA),
    "electra": encoder("Electra", "ForPreTraining", EACH, embedding_size=64, **LLAMA),
    "deberta_v2": encoder(
        "DebertaV2", "ForSequenceClassification", TEXTS, relative_attention=True, pos_att_type=["p2c", "c2p"], **LLAMA
    ),
    "modernbert": encoder("ModernBert", "ForMaskedLM", MASKED, **LLAMA, **ENDS, cls_token_id=0, sep_token_id=1),
    "xlnet": encoder("XLNet", "ForSequenceClassification", TEXTS, d_model=64, n_layer=3, n_head=4, d_inner=128),
    "longformer": encoder(
        "Longformer", "ForMaskedLM", MASKED, attention_window=[32, 32], max_position_embeddings=160,
        **{**LLAMA, "num_hidden_layers": 2},
    ),
    "fnet": encoder(
        "FNet", "ForMaskedLM", text(8, 128, mask=False), hidden_size=64, num_hidden_layers=3, intermediate_size=128
    ),
    # Encoder-decoder models of transformers.
    "t5": encoder("T5", "ForConditionalGeneration", two_texts(512, 96, 64), **T5),
    "bart": encoder("Bart", "ForConditionalGeneration", two_texts(512, 96, 64), **BART),
    "marian": hugging(
        "Marian", "MTModel", two_texts(511, 96, 64), vocab_size=512, pad_token_id=511, decoder_start_token_id=511, **BART
    ),
    "switch_transformer": encoder(
        "SwitchTransformers", "ForConditionalGeneration", two_texts(512, 64, 32), num_decoder_layers=2, num_experts=4, **T5
    ),
    # Vision models of transformers: `model(pixel_values, labels=...)`.
    "vit": classifier("ViT", batch=pictures(), **IMAGE),
    "deit": classifier("DeiT", batch=pictures(), **IMAGE),
    "swin": classifier(
        "Swin", batch=pictures(), image_size=64, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4
    ),
    "convnext": classifier("ConvNext", batch=pictures(96), **STAGES),
    "segformer": hugging(
        "Segformer", "ForSemanticSegmentation", pictures(labels=lambda: torch.randint(4, (8, 64, 64))), num_labels=4,
        hidden_sizes=[16, 32, 40, 64], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 4, 4], decoder_hidden_size=32,
    ),
    "resnet_transformers": classifier("ResNet", batch=pictures(96), embedding_size=16, layer_type="basic", **STAGES),
    "mobilevit": classifier(
        "MobileViT", batch=pictures(), image_size=64, hidden_sizes=[16, 24, 32], neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
        num_attention_heads=2,
    ),
    "dinov2": classifier(
        "Dinov2", batch=pictures(), image_size=64, patch_size=8, hidden_size=64, num_hidden_layers=3, num_attention_heads=4
    ),
    "beit": classifier("Beit", batch=pictures(), **IMAGE),
    "vit_mae": hugging(
        "ViTMAE", "ForPreTraining", lambda: {"pixel_values": images(8, 3, 64, 64)}, decoder_hidden_size=32,
        decoder_num_hidden_layers=2, decoder_num_attention_heads=4, decoder_intermediate_size=64, **IMAGE,
    ),
    "yolos": hugging(
        "Yolos", "ForObjectDetection", lambda: {"pixel_values": images(8, 3, 64, 96), "labels": boxes(8)}, image_size=[64, 96],
        patch_size=8, num_detection_tokens=20, num_labels=4, **LLAMA,
    ),
    "dpt": hugging(
        "DPT", "ForSemanticSegmentation", pictures(count=4, labels=lambda: torch.randint(4, (4, 64, 64))), num_labels=4,
        backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[16, 24, 32, 48], fusion_hidden_size=32,
        **{**IMAGE, "num_hidden_layers": 4},
    ),
    "videomae": hugging(
        "VideoMAE", "ForVideoClassification",
        lambda: {"pixel_values": images(4, 8, 3, 32, 32), "labels": torch.randint(2, (4,))},
        **{**IMAGE, "image_size": 32}, num_frames=8,
    ),
    # Audio models of transformers.
    "wav2vec2": hugging("Wav2Vec2", "ForCTC", wave, **WAVE),
    "hubert": hugging("Hubert", "ForCTC", wave, **WAVE),
    "whisper": encoder(
        "Whisper", "ForConditionalGeneration", lambda: {"input_features": images(8, 16, 128), "labels": tokens(512, 8, 48)},
        num_mel_bins=16, max_source_positions=64, max_target_positions=64, decoder_start_token_id=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, suppress_tokens=None, begin_suppress_tokens=None, **BART,
    ),
    "audio_spectrogram_transformer": hugging(
        "AST", "ForAudioClassification", lambda: {"input_values": images(8, 128, 32), "labels": torch.randint(2, (8,))},
        max_length=128, num_mel_bins=32, patch_size=8, frequency_stride=8, time_stride=8, **LLAMA,
    ),
    # Multimodal models of transformers.
    "clip": hugging(
        "CLIP", "Model", lambda: {"input_ids": tokens(512, 8, 32), "pixel_values": images(8, 3, 64, 64), "return_loss": True},
        text_config=TEXT, vision_config=IMAGE, projection_dim=32,
    ),
    "siglip": hugging(
        "Siglip", "Model", lambda: {"input_ids": tokens(512, 8, 64), "pixel_values": images(8, 3, 64, 64), "return_loss": True},
        text_config={**TEXT, "projection_size": 64}, vision_config=IMAGE,
    ),
    "blip": hugging(
        "Blip", "ForConditionalGeneration", lambda: {"pixel_values": images(8, 3, 64, 64), **text(8, 32, mask=False)()},
        text_config={**TEXT, "encoder_hidden_size": 64, "sep_token_id": 1}, vision_config=IMAGE, projection_dim=32,
    ),
    "vilt": encoder(
        "Vilt", "ForQuestionAnswering",
        lambda: {"input_ids": tokens(512, 4, 32), "pixel_values": images(4, 3, 64, 64), "labels": torch.rand(4, 8)},
        max_position_embeddings=40, max_image_length=64, num_labels=8, **IMAGE,
    ),
}  # fmt: skip


def model(case: Callable[[], Case]) -> Callable[[], Case]:
    """Decorator of a model that the table above has no form for."""
    MODELS[case.__name__] = case
    return case


@model
def gpt2_outside() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = tokens(512, 8, 128)
    net = GPT2LMHeadModel(GPT2Config(**GPT2))
    return with_loss(net, lambda out: F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), input_ids=ids)


@model
def detr() -> Case:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    settings = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone}
    config = DetrConfig(**settings, num_queries=100, num_labels=4, **{**BART, "encoder_layers": 4, "decoder_layers": 4})
    return documented(DetrForObjectDetection(config), pixel_values=images(4, 3, 128, 128), labels=boxes(4))


@model
def llava() -> Case:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    vision, language = CLIPVisionConfig(**IMAGE), LlamaConfig(vocab_size=512, **KV)
    settings = {"image_token_index": 511, "image_seq_length": 64, "vision_feature_layer": -1}
    net = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=language, **settings))
    ids = torch.cat([torch.full((4, 64), 511), tokens(511, 4, 64)], 1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    return documented(net, **batch, pixel_values=images(4, 3, 64, 64))


@model
def image_captioning() -> Case:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    writer = GPT2Config(**{**GPT2, "n_layer": 2}, add_cross_attention=True)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**IMAGE), writer)
    config.decoder_start_token_id, config.pad_token_id = 0, 2
    return documented(VisionEncoderDecoderModel(config), pixel_values=images(8, 3, 64, 64), labels=tokens(512, 8, 48))


# timm: the loss is outside of the model.


def timm_case(name: str, size: int, **config: Any) -> Case:
    """A model of timm."""
    import timm

    target = torch.randint(10, (4,))
    net = timm.create_model(name, num_classes=10, **config)
    return with_loss(net, lambda logits: F.cross_entropy(logits, target), images(4, 3, size, size), given=[target])


MODELS |= {
    "timm_resnet18": lambda: timm_case("resnet18", 224),
    "timm_vit_tiny": lambda: timm_case("vit_tiny_patch16_224", 224, depth=4),
    "timm_regnety": lambda: timm_case("regnety_002", 224),
    "timm_efficientnet": lambda: timm_case("efficientnet_b0", 128),
    "timm_convnext": lambda: timm_case("convnext_atto", 128),
    "timm_mobilenetv3": lambda: timm_case("mobilenetv3_small_100", 160),
}


# diffusers: noise is predicted, the loss is outside.

SMALL_UNET = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}


def denoiser(net: nn.Module, shape: tuple[int, ...], *data: Any, **named: Any) -> Case:
    """A model of diffusers, which predicts noise."""
    noise = images(*shape)
    return with_loss(net, lambda out: F.mse_loss(out.sample, noise), images(*shape), *data, given=[noise], **named)


@model
def unet2d() -> Case:
    from diffusers import UNet2DModel

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    net = UNet2DModel(sample_size=32, down_block_types=down, up_block_types=up, attention_head_dim=8, **SMALL_UNET)
    return denoiser(net, (4, 3, 32, 32), torch.randint(1000, (4,)))


@model
def unet2d_condition() -> Case:
    from diffusers import UNet2DConditionModel

    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    sizes = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "attention_head_dim": 4}
    net = UNet2DConditionModel(down_block_types=down, up_block_types=up, **sizes, **SMALL_UNET)
    return denoiser(net, (4, 4, 32, 32), torch.randint(1000, (4,)), encoder_hidden_states=images(4, 16, 32))


@model
def dit() -> Case:
    from diffusers import DiTTransformer2DModel

    sizes = {"num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "num_layers": 3, "sample_size": 16}
    net = DiTTransformer2DModel(num_embeds_ada_norm=10, **sizes)
    return denoiser(net, (8, 4, 16, 16), timestep=torch.randint(1000, (8,)), class_labels=torch.randint(10, (8,)))


@model
def autoencoder_kl() -> Case:
    from diffusers import AutoencoderKL

    down, up = ("DownEncoderBlock2D",) * 2, ("UpDecoderBlock2D",) * 2
    net = AutoencoderKL(block_out_channels=(16, 32), norm_num_groups=8, down_block_types=down, up_block_types=up)
    pixels = images(4, 3, 32, 32)
    return with_loss(net, lambda out: F.mse_loss(out.sample, pixels), pixels)


# PEFT.


@model
def lora_llama() -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    net = LlamaForCausalLM(LlamaConfig(vocab_size=512, **KV))
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return documented(get_peft_model(net, adapters), **text(8, 128, mask=False)())


# Other libraries and plain torch.


@model
def retinanet() -> Case:
    from torchvision.models import resnet18
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor

    net = RetinaNet(_resnet_fpn_extractor(resnet18(), 5), num_classes=4, min_size=96, max_size=128)
    rooms = [torch.rand(3, 96, 128) for _ in range(2)]
    corner = torch.rand(3, 2) * 40
    targets = [{"boxes": torch.cat([corner, corner + 40], 1), "labels": torch.randint(4, (3,))} for _ in rooms]
    return with_loss(net, lambda losses: sum(losses.values()), rooms, targets)


class PackedGRU(nn.Module):
    """A sentence classifier over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.mix = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(8)))
        self.rnn = nn.GRU(64, 32, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits of the classes."""
        packed = nn.utils.rnn.pack_padded_sequence(self.mix(self.embedding(ids)), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.rnn(packed)
        return self.head(last[0])


@model
def packed_gru() -> Case:
    target = torch.randint(4, (32,))
    lengths = torch.randint(8, 33, (32,))
    return with_loss(PackedGRU(), lambda out: F.cross_entropy(out, target), tokens(256, 32, 32), lengths, given=[target])


@model
def gcn() -> Case:
    from torch_geometric.nn.models import GCN

    edges, target = torch.randint(2000, (2, 10000)), torch.randint(4, (2000,))
    net = GCN(32, 64, 3, out_channels=4, dropout=0.5)
    return with_loss(net, lambda out: F.cross_entropy(out, target), images(2000, 32), edges, given=[target])


def _declare_torchvision_ops() -> None:
    """Let torchvision be imported where only its build for CUDA can be installed: its operators are declared, not there."""
    boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for op in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            torch.library.define(f"torchvision::{op}", boxes)


if importlib.util.find_spec("torchvision") and not torch.cuda.is_available():
    _declare_torchvision_ops()
