"""Models as pip installs them, each with a training step in the call that its own documentation shows.

A step is the body of a training loop up to the backward of its loss. It assigns to the variables of the loop, so that outputs and
loss of the step before are held until the new ones are assigned. Weights are random, since nothing is downloaded; sizes are such
that activations outweigh the weights. It is long because it is a list: a function of a few lines for each model.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Compiled = Sequence[Callable[..., Any]]


class Loop:
    """Variables of a training loop.

    Attributes:
        outputs: What the model returned.
        loss: The loss.
    """

    outputs: Any = None
    loss: Any = None


@dataclass(frozen=True)
class Case:
    """Modules and their training steps.

    Attributes:
        modules: The modules, each of which is compiled.
        step: Body of the loop, given the compiled modules and the variables: all but the last backward and the update.
        data: Tensors that a step is given.
        outside: Whether the loss is computed outside of the compiled modules.
    """

    modules: Sequence[nn.Module]
    step: Callable[[Compiled, Loop], None]
    data: Sequence[Any]
    outside: bool = False


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


def image(*shape: int) -> torch.Tensor:
    """A random batch of images."""
    return torch.randn(*shape)


# Decoders of transformers: `model(input_ids, labels=...)`, with the cache that is on by default.


def _decoder(kind: str, head: str = "ForCausalLM", *, shape: tuple[int, int] = (8, 128), **config: Any) -> Case:
    import transformers

    cfg = getattr(transformers, f"{kind}Config")(vocab_size=512, **config)
    ids = tokens(512, *shape)
    return documented(getattr(transformers, f"{kind}{head}")(cfg), input_ids=ids, labels=ids)


_LLAMA = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
_KV = {**_LLAMA, "num_key_value_heads": 2}
_ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def gpt2() -> Case:
    return _decoder("GPT2", "LMHeadModel", n_embd=64, n_layer=3, n_head=4, n_positions=128, **_ENDS)


def gpt2_outside() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=3, n_head=4, n_positions=128, **_ENDS))
    ids = tokens(512, 8, 128)
    return with_loss(model, lambda out: F.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), input_ids=ids)


def gpt_neo() -> Case:
    return _decoder(
        "GPTNeo",
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=128,
        window_size=32,
        **_ENDS,
    )


def gpt_neox() -> Case:
    return _decoder("GPTNeoX", **_LLAMA, **_ENDS)


def opt() -> Case:
    return _decoder(
        "OPT", hidden_size=64, ffn_dim=128, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=64, **_ENDS
    )


def bloom() -> Case:
    return _decoder("Bloom", hidden_size=64, n_layer=3, n_head=4, **_ENDS)


def llama() -> Case:
    return _decoder("Llama", **_KV)


def llama_outside() -> Case:
    from transformers import LlamaConfig, LlamaModel

    model = LlamaModel(LlamaConfig(vocab_size=512, **_KV))
    return with_loss(model, lambda out: out.last_hidden_state.square().mean(), input_ids=tokens(512, 8, 128))


def mistral() -> Case:
    return _decoder("Mistral", **_KV, sliding_window=64)


def qwen3() -> Case:
    return _decoder("Qwen3", **_KV, head_dim=16)


def gemma2() -> Case:
    return _decoder("Gemma2", **_KV, head_dim=16)


def phi() -> Case:
    return _decoder("Phi", **_LLAMA)


def falcon() -> Case:
    return _decoder("Falcon", hidden_size=64, num_hidden_layers=3, num_attention_heads=4, **_ENDS)


def mamba() -> Case:
    return _decoder("Mamba", shape=(8, 32), hidden_size=64, num_hidden_layers=2, state_size=8, **_ENDS)


def mixtral() -> Case:
    return _decoder("Mixtral", **{**_KV, "num_hidden_layers": 2}, num_local_experts=4, num_experts_per_tok=2)


def qwen2_moe() -> Case:
    return _decoder(
        "Qwen2Moe",
        **{**_KV, "num_hidden_layers": 2},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    )


def olmoe() -> Case:
    return _decoder("Olmoe", **{**_KV, "num_hidden_layers": 2}, num_experts=4, num_experts_per_tok=2)


# Encoders of transformers.


def _encoder(kind: str, head: str, *, shape: tuple[int, int] = (8, 128), labels: str = "tokens", **config: Any) -> Case:
    import transformers

    cfg = getattr(transformers, f"{kind}Config")(vocab_size=512, **config)
    ids = tokens(512, *shape)
    target = ids if labels == "tokens" else torch.randint(2, (shape[0],) if labels == "classes" else shape)
    model = getattr(transformers, f"{kind}{head}")(cfg)
    return documented(model, input_ids=ids, attention_mask=torch.ones_like(ids), labels=target)


def bert() -> Case:
    return _encoder("Bert", "ForMaskedLM", **_LLAMA)


def bert_outside() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    ids = tokens(512, 8, 128)
    return with_loss(
        BertForMaskedLM(BertConfig(vocab_size=512, **_LLAMA)),
        lambda out: F.cross_entropy(out.logits.flatten(0, 1), ids.flatten()),
        input_ids=ids,
    )


def roberta() -> Case:
    return _encoder("Roberta", "ForSequenceClassification", labels="classes", max_position_embeddings=160, **_LLAMA)


def distilbert() -> Case:
    return _encoder("DistilBert", "ForTokenClassification", labels="each", dim=64, hidden_dim=128, n_layers=3, n_heads=4)


def albert() -> Case:
    return _encoder("Albert", "ForMaskedLM", embedding_size=32, **_LLAMA)


def electra() -> Case:
    return _encoder("Electra", "ForPreTraining", labels="each", embedding_size=64, **_LLAMA)


def deberta_v2() -> Case:
    return _encoder(
        "DebertaV2", "ForSequenceClassification", labels="classes", relative_attention=True, pos_att_type=["p2c", "c2p"], **_LLAMA
    )


def modernbert() -> Case:
    return _encoder("ModernBert", "ForMaskedLM", **_LLAMA, **_ENDS, cls_token_id=0, sep_token_id=1)


def xlnet() -> Case:
    return _encoder("XLNet", "ForSequenceClassification", labels="classes", d_model=64, n_layer=3, n_head=4, d_inner=128)


def longformer() -> Case:
    return _encoder(
        "Longformer", "ForMaskedLM", attention_window=[32, 32], max_position_embeddings=160, **{**_LLAMA, "num_hidden_layers": 2}
    )


def fnet() -> Case:
    return _encoder_without_mask("FNet", "ForMaskedLM", hidden_size=64, num_hidden_layers=3, intermediate_size=128)


def _encoder_without_mask(kind: str, head: str, **config: Any) -> Case:
    case = _encoder(kind, head, **config)
    ids, _, labels = case.data
    return documented(case.modules[0], input_ids=ids, labels=labels)


# Encoder-decoder models of transformers.


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return documented(T5ForConditionalGeneration(config), input_ids=tokens(512, 8, 96), labels=tokens(512, 8, 64))


_BART = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}


def bart() -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    return documented(
        BartForConditionalGeneration(BartConfig(vocab_size=512, **_BART)), input_ids=tokens(512, 8, 96), labels=tokens(512, 8, 64)
    )


def marian() -> Case:
    from transformers import MarianConfig, MarianMTModel

    config = MarianConfig(vocab_size=512, pad_token_id=511, decoder_start_token_id=511, **_BART)
    return documented(MarianMTModel(config), input_ids=tokens(511, 8, 96), labels=tokens(511, 8, 64))


def switch_transformer() -> Case:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    config = SwitchTransformersConfig(
        vocab_size=512,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=4,
        decoder_start_token_id=0,
    )
    return documented(SwitchTransformersForConditionalGeneration(config), input_ids=tokens(512, 8, 64), labels=tokens(512, 8, 32))


# Vision models of transformers: `model(pixel_values, labels=...)`.


def _vision(kind: str, head: str = "ForImageClassification", *, size: int = 64, labels: Any = None, **config: Any) -> Case:
    import transformers

    model = getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**config))
    return documented(model, pixel_values=image(8, 3, size, size), labels=torch.randint(2, (8,)) if labels is None else labels)


def vit() -> Case:
    return _vision("ViT", image_size=64, patch_size=8, **_LLAMA)


def deit() -> Case:
    return _vision("DeiT", image_size=64, patch_size=8, **_LLAMA)


def swin() -> Case:
    return _vision("Swin", image_size=64, patch_size=4, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4)


def convnext() -> Case:
    return _vision("ConvNext", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], size=96)


def segformer() -> Case:
    return _vision(
        "Segformer",
        "ForSemanticSegmentation",
        labels=torch.randint(4, (8, 64, 64)),
        num_labels=4,
        hidden_sizes=[16, 32, 40, 64],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
        decoder_hidden_size=32,
    )


def resnet_transformers() -> Case:
    return _vision("ResNet", embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], layer_type="basic", size=96)


def mobilevit() -> Case:
    return _vision(
        "MobileViT",
        size=64,
        image_size=64,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 32, 64],
        num_attention_heads=2,
    )


def dinov2() -> Case:
    return _vision("Dinov2", image_size=64, patch_size=8, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)


def beit() -> Case:
    return _vision("Beit", image_size=64, patch_size=8, **_LLAMA)


def vit_mae() -> Case:
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    config = ViTMAEConfig(
        image_size=64,
        patch_size=8,
        decoder_hidden_size=32,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=64,
        **_LLAMA,
    )
    return documented(ViTMAEForPreTraining(config), pixel_values=image(8, 3, 64, 64))


def _boxes(images: int) -> list[dict[str, torch.Tensor]]:
    return [{"class_labels": torch.randint(4, (3,)), "boxes": torch.rand(3, 4) * 0.4 + 0.2} for _ in range(images)]


def detr() -> Case:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_queries=100,
        num_labels=4,
        **{**_BART, "encoder_layers": 4, "decoder_layers": 4},
    )
    return documented(DetrForObjectDetection(config), pixel_values=image(4, 3, 128, 128), labels=_boxes(4))


def yolos() -> Case:
    from transformers import YolosConfig, YolosForObjectDetection

    config = YolosConfig(image_size=[64, 96], patch_size=8, num_detection_tokens=20, num_labels=4, **_LLAMA)
    return documented(YolosForObjectDetection(config), pixel_values=image(8, 3, 64, 96), labels=_boxes(8))


def dpt() -> Case:
    from transformers import DPTConfig, DPTForSemanticSegmentation

    config = DPTConfig(
        image_size=64,
        patch_size=8,
        num_labels=4,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16, 24, 32, 48],
        fusion_hidden_size=32,
        **{**_LLAMA, "num_hidden_layers": 4},
    )
    return documented(DPTForSemanticSegmentation(config), pixel_values=image(4, 3, 64, 64), labels=torch.randint(4, (4, 64, 64)))


def videomae() -> Case:
    from transformers import VideoMAEConfig, VideoMAEForVideoClassification

    config = VideoMAEConfig(image_size=32, patch_size=8, num_frames=8, **_LLAMA)
    return documented(VideoMAEForVideoClassification(config), pixel_values=image(4, 8, 3, 32, 32), labels=torch.randint(2, (4,)))


# Audio models of transformers.

_WAVE = {
    "vocab_size": 32,
    **_LLAMA,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}


def wav2vec2() -> Case:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    return documented(Wav2Vec2ForCTC(Wav2Vec2Config(**_WAVE)), input_values=image(4, 8000), labels=torch.randint(1, 32, (4, 10)))


def hubert() -> Case:
    from transformers import HubertConfig, HubertForCTC

    return documented(HubertForCTC(HubertConfig(**_WAVE)), input_values=image(4, 8000), labels=torch.randint(1, 32, (4, 10)))


def whisper() -> Case:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=512,
        num_mel_bins=16,
        max_source_positions=64,
        max_target_positions=64,
        decoder_start_token_id=1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **_BART,
    )
    return documented(WhisperForConditionalGeneration(config), input_features=image(8, 16, 128), labels=tokens(512, 8, 48))


def audio_spectrogram_transformer() -> Case:
    from transformers import ASTConfig, ASTForAudioClassification

    config = ASTConfig(max_length=128, num_mel_bins=32, patch_size=8, frequency_stride=8, time_stride=8, **_LLAMA)
    return documented(ASTForAudioClassification(config), input_values=image(8, 128, 32), labels=torch.randint(2, (8,)))


# Multimodal models of transformers.

_TEXT = {"vocab_size": 512, "max_position_embeddings": 64, **_LLAMA, **_ENDS}
_IMAGE = {"image_size": 64, "patch_size": 8, **_LLAMA}


def clip() -> Case:
    from transformers import CLIPConfig, CLIPModel

    config = CLIPConfig(text_config=_TEXT, vision_config=_IMAGE, projection_dim=32)
    return documented(CLIPModel(config), input_ids=tokens(512, 8, 32), pixel_values=image(8, 3, 64, 64), return_loss=True)


def siglip() -> Case:
    from transformers import SiglipConfig, SiglipModel

    config = SiglipConfig(text_config={**_TEXT, "projection_size": 64}, vision_config=_IMAGE)
    return documented(SiglipModel(config), input_ids=tokens(512, 8, 64), pixel_values=image(8, 3, 64, 64), return_loss=True)


def blip() -> Case:
    from transformers import BlipConfig, BlipForConditionalGeneration

    text = {**_TEXT, "encoder_hidden_size": 64, "sep_token_id": 1}
    ids = tokens(512, 8, 32)
    return documented(
        BlipForConditionalGeneration(BlipConfig(text_config=text, vision_config=_IMAGE, projection_dim=32)),
        pixel_values=image(8, 3, 64, 64),
        input_ids=ids,
        labels=ids,
    )


def vilt() -> Case:
    from transformers import ViltConfig, ViltForQuestionAnswering

    config = ViltConfig(
        vocab_size=512, image_size=64, patch_size=8, max_position_embeddings=40, max_image_length=64, num_labels=8, **_LLAMA
    )
    ids = tokens(512, 4, 32)
    return documented(ViltForQuestionAnswering(config), input_ids=ids, pixel_values=image(4, 3, 64, 64), labels=torch.rand(4, 8))


def llava() -> Case:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**_IMAGE),
        text_config=LlamaConfig(vocab_size=512, **_KV),
        image_token_index=511,
        image_seq_length=64,
        vision_feature_layer=-1,
    )
    ids = torch.cat([torch.full((4, 64), 511), tokens(511, 4, 64)], 1)
    return documented(
        LlavaForConditionalGeneration(config),
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        pixel_values=image(4, 3, 64, 64),
        labels=ids,
    )


def image_captioning() -> Case:
    from transformers import GPT2Config, VisionEncoderDecoderConfig, VisionEncoderDecoderModel, ViTConfig

    decoder = GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=128, add_cross_attention=True, **_ENDS)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(**_IMAGE), decoder)
    config.decoder_start_token_id, config.pad_token_id = 0, 2
    return documented(VisionEncoderDecoderModel(config), pixel_values=image(8, 3, 64, 64), labels=tokens(512, 8, 48))


# timm: the loss is outside of the model.


def _timm(name: str, size: int = 64, images: int = 4, **config: Any) -> Case:
    import timm

    target = torch.randint(10, (images,))
    model = timm.create_model(name, num_classes=10, **config)
    return with_loss(model, lambda logits: F.cross_entropy(logits, target), image(images, 3, size, size), given=[target])


def timm_resnet18() -> Case:
    return _timm("resnet18", size=224)


def timm_vit_tiny() -> Case:
    return _timm("vit_tiny_patch16_224", size=224, depth=4)


def timm_regnety() -> Case:
    return _timm("regnety_002", size=224)


def timm_efficientnet() -> Case:
    return _timm("efficientnet_b0", size=128)


def timm_convnext() -> Case:
    return _timm("convnext_atto", size=128)


def timm_mobilenetv3() -> Case:
    return _timm("mobilenetv3_small_100", size=160)


# diffusers: noise is predicted, the loss is outside.


def unet2d() -> Case:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=32,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )
    noise = image(4, 3, 32, 32)
    return with_loss(
        model, lambda out: F.mse_loss(out.sample, noise), image(4, 3, 32, 32), torch.randint(1000, (4,)), given=[noise]
    )


def unet2d_condition() -> Case:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=32,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    noise, text = image(4, 4, 32, 32), image(4, 16, 32)
    return with_loss(
        model,
        lambda out: F.mse_loss(out.sample, noise),
        image(4, 4, 32, 32),
        torch.randint(1000, (4,)),
        given=[noise],
        encoder_hidden_states=text,
    )


def dit() -> Case:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=16, num_embeds_ada_norm=10
    )
    noise = image(8, 4, 16, 16)
    return with_loss(
        model,
        lambda out: F.mse_loss(out.sample, noise),
        image(8, 4, 16, 16),
        given=[noise],
        timestep=torch.randint(1000, (8,)),
        class_labels=torch.randint(10, (8,)),
    )


def autoencoder_kl() -> Case:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    pixels = image(4, 3, 32, 32)
    return with_loss(model, lambda out: F.mse_loss(out.sample, pixels), pixels)


# PEFT.


def lora_llama() -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    ids = tokens(512, 8, 128)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, **_KV))
    return documented(
        get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)), input_ids=ids, labels=ids
    )


def lora_bert() -> Case:
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertForSequenceClassification

    model = BertForSequenceClassification(BertConfig(vocab_size=512, **_LLAMA))
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]))
    return documented(adapted, input_ids=tokens(512, 8, 128), labels=torch.randint(2, (8,)))


# Other libraries and plain torch.


def retinanet() -> Case:
    from torchvision.models import resnet18
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor

    model = RetinaNet(_resnet_fpn_extractor(resnet18(), 5), num_classes=4, min_size=96, max_size=128)
    images = [torch.rand(3, 96, 128) for _ in range(2)]
    corner = torch.rand(3, 2) * 40
    targets = [{"boxes": torch.cat([corner, corner + 40], 1), "labels": torch.randint(4, (3,))} for _ in images]
    return with_loss(model, lambda losses: sum(losses.values()), images, targets)


def fcn_resnet() -> Case:
    from torchvision.models.segmentation import lraspp_mobilenet_v3_large

    target = torch.randint(4, (4, 96, 96))
    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=4)
    return with_loss(model, lambda out: F.cross_entropy(out["out"], target), image(4, 3, 96, 96), given=[target])


class LanguageModel(nn.Module):
    """The word language model of PyTorch's examples: an embedding, an LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.rnn = nn.LSTM(64, 64, num_layers=2, batch_first=True)
        wide = [nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU()) for _ in range(4)]
        self.head = nn.Sequential(nn.Linear(64, 256), *wide, nn.Linear(256, 256))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of each position."""
        return self.head(self.rnn(self.embedding(ids))[0])


def lstm() -> Case:
    ids = tokens(256, 32, 32)
    return with_loss(LanguageModel(), lambda out: F.cross_entropy(out.flatten(0, 1), ids.flatten()), ids)


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


def packed_gru() -> Case:
    target = torch.randint(4, (32,))
    lengths = torch.randint(8, 33, (32,))
    return with_loss(PackedGRU(), lambda out: F.cross_entropy(out, target), tokens(256, 32, 32), lengths, given=[target])


def nn_transformer() -> Case:
    model = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
    target = image(8, 64, 64)
    return with_loss(model, lambda out: F.mse_loss(out, target), image(8, 96, 64), image(8, 64, 64), given=[target])


def mambapy_lm() -> Case:
    from mambapy.mamba import Mamba, MambaConfig

    x = image(4, 64, 32)
    return with_loss(Mamba(MambaConfig(d_model=32, n_layers=2)), lambda out: F.mse_loss(out, x), x)


def gcn() -> Case:
    from torch_geometric.nn.models import GCN

    edges, target = torch.randint(2000, (2, 10000)), torch.randint(4, (2000,))
    return with_loss(
        GCN(32, 64, 3, out_channels=4, dropout=0.5),
        lambda out: F.cross_entropy(out, target),
        image(2000, 32),
        edges,
        given=[target],
    )


def gat() -> Case:
    from torch_geometric.nn.models import GAT

    edges, target = torch.randint(1000, (2, 5000)), torch.randint(4, (1000,))
    return with_loss(
        GAT(32, 64, 3, out_channels=4, heads=4),
        lambda out: F.cross_entropy(out, target),
        image(1000, 32),
        edges,
        given=[target],
    )


def dcgan() -> Case:
    """The DCGAN of PyTorch's examples: both networks are compiled, and each has a step."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(32, 64, 4, 1, 0, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(True),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 64, 4, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(64, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
    )
    real, noise = image(32, 3, 32, 32), image(32, 32, 1, 1)
    ones, zeros = torch.ones(32, 1, 1, 1), torch.zeros(32, 1, 1, 1)
    criterion = nn.BCELoss()

    update = torch.optim.SGD(discriminator.parameters(), lr=1e-3)

    def step(compiled: Compiled, loop: Loop) -> None:
        g, d = compiled
        update.zero_grad()
        criterion(d(real), ones).backward()
        loop.outputs = g(noise)
        criterion(d(loop.outputs.detach()), zeros).backward()
        update.step()
        loop.loss = criterion(d(loop.outputs), ones)

    return Case([generator.train(), discriminator.train()], step, [real, noise, ones, zeros], outside=True)


def contrastive() -> Case:
    """SimCLR: the compiled encoder runs twice in a step, on two views of the same images."""
    encoder = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 64),
        nn.ReLU(),
        nn.Linear(64, 32),
    )
    first, second, target = image(16, 3, 32, 32), image(16, 3, 32, 32), torch.arange(16)

    def step(compiled: Compiled, loop: Loop) -> None:
        one, two = compiled[0](first), compiled[0](second)
        similarity = F.normalize(one, dim=1) @ F.normalize(two, dim=1).T
        loop.outputs, loop.loss = (one, two), F.cross_entropy(similarity / 0.1, target)

    return Case([encoder.train()], step, [first, second, target], outside=True)


def _declare_torchvision_ops() -> None:
    """Let torchvision be imported where only its build for CUDA can be installed: its operators are declared, not there."""
    boxes = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    for op in ("nms", "qnms"):
        with contextlib.suppress(RuntimeError):
            torch.library.define(f"torchvision::{op}", boxes)


if importlib.util.find_spec("torchvision") and not torch.cuda.is_available():
    _declare_torchvision_ops()


MODELS: dict[str, Callable[[], Case]] = {
    f.__name__: f
    for f in (
        gpt2, gpt2_outside, gpt_neo, gpt_neox, opt, bloom, llama, llama_outside, mistral, qwen3, gemma2, phi, falcon, mamba,
        mixtral, qwen2_moe, olmoe,
        bert, bert_outside, roberta, distilbert, albert, electra, deberta_v2, modernbert, xlnet, longformer, fnet,
        t5, bart, marian, switch_transformer,
        vit, deit, swin, convnext, segformer, resnet_transformers, mobilevit, dinov2, beit, vit_mae, detr, yolos, dpt, videomae,
        wav2vec2, hubert, whisper, audio_spectrogram_transformer,
        clip, siglip, blip, vilt, llava, image_captioning,
        timm_resnet18, timm_vit_tiny, timm_regnety, timm_efficientnet, timm_convnext, timm_mobilenetv3,
        unet2d, unet2d_condition, dit, autoencoder_kl,
        lora_llama, lora_bert,
        retinanet, fcn_resnet, lstm, packed_gru, nn_transformer, mambapy_lm, gcn, gat, dcgan, contrastive,
    )
}  # fmt: skip
