"""Models of transformers as they are, in the call of their documentation. `benchmarks/torch_stock.py` runs many more."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from checkmate.torch import measure_peak
from checkmate.torch.steps.coordinator import coordinator

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers and Dynamo warn of is not ours
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def gpt2() -> tuple[nn.Module, dict[str, Any]]:
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    ids = torch.randint(256, (8, 64))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def wav2vec2() -> tuple[nn.Module, dict[str, Any]]:
    """Several graphs: masks by numpy. Layers that are dropped at random would make every step another one."""
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        layerdrop=0.0,
        **SMALL,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 8, 4),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    return transformers.Wav2Vec2ForCTC(config), {"input_values": torch.randn(4, 4000), "labels": torch.randint(1, 32, (4, 6))}


def detr() -> tuple[nn.Module, dict[str, Any]]:
    """A matching of boxes by scipy between the forward and the loss."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        num_queries=60,
        num_labels=4,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
    )
    boxes = [{"class_labels": torch.randint(4, (3,)), "boxes": torch.rand(3, 4) * 0.4 + 0.2} for _ in range(2)]
    return transformers.DetrForObjectDetection(config), {"pixel_values": torch.randn(2, 3, 128, 128), "labels": boxes}


@pytest.mark.parametrize(
    ("build", "share"),
    [
        pytest.param(gpt2, "70%", marks=pytest.mark.slow),  # tests/torch/chunking/test_steps_of_scripts.py trains it every time
        pytest.param(wav2vec2, "70%", marks=pytest.mark.slow),
        pytest.param(detr, "90%", marks=pytest.mark.slow),  # most of its memory is the stem of the backbone
    ],
)
def test_a_stock_model_keeps_its_budget(build: Callable[[], tuple[nn.Module, dict[str, Any]]], share: str) -> None:
    """`model(**batch).loss.backward()`, the outputs held until the next step has its own."""
    found = []
    for budget in ("100%", share):
        torch._dynamo.reset()
        coordinator().forget_steps()
        for seed in (torch.manual_seed, numpy.random.seed, random.seed):
            seed(0)
        model, batch = build()
        run = torch.compile(model.train(), backend="checkmate", options={"budget": budget, "time_limit_s": 2})
        data = [t for t in torch.utils._pytree.tree_leaves(batch) if isinstance(t, torch.Tensor)]
        losses, outputs = [], []

        def step(run: Any = run, batch: Any = batch, losses: Any = losses, outputs: Any = outputs) -> None:
            outputs[:] = [run(**batch)]
            outputs[0].loss.backward()
            losses.append(outputs[0].loss.detach())

        for i in range(4):
            model.zero_grad(set_to_none=True)
            if i < 2:  # a warning that is given once breaks the graph of the first step alone
                step()
                continue
            outputs.clear()  # the profiler does not see a tensor freed whose allocation it has not seen
            peak = measure_peak(step)
            # On the CPU what no graph reads, such as a layer that was dropped, is not known.
            used = [p for p in model.parameters() if p.grad is not None]
            resident = sum({t.data_ptr(): t.nbytes for t in (*used, *model.buffers(), *data)}.values())
            assert coordinator().step is not None
            assert peak + resident <= coordinator().step.result.budget_bytes
        found.append([*losses, *(p.grad for p in model.parameters()), torch.get_rng_state()])
    assert all(a is None if b is None else torch.equal(a, b) for a, b in zip(*found, strict=True))
