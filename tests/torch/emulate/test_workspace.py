"""Workspace on a CUDA device as its model has it, compared with the headers of the torch that is installed."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from checkmate.torch.emulate.workspace import EFFICIENT_TILES, modelled_workspace_bytes

FOLDER = Path(torch.__path__[0]) / "include/ATen/native/transformers/cuda/mem_eff_attention"
needs_headers = pytest.mark.skipif(not FOLDER.exists(), reason="this torch comes without the headers of its kernels")


@needs_headers
def test_tiles_of_the_efficient_backward_are_those_of_the_torch_at_hand() -> None:
    """Another tile stages other bytes."""
    kernel = r"cb\(AttentionBackwardKernel<cutlass::arch::Sm(\d+), [\w:]+, true, \w+, \w+, (\d+), (\d+), (\d+)"
    found = re.findall(kernel, (FOLDER / "kernels" / "cutlassB.h").read_text())
    assert {tuple(map(int, tile)) for version, *tile in found if int(version) >= 70} == set(EFFICIENT_TILES)


@needs_headers
def test_the_formula_of_the_efficient_backward_is_that_of_the_torch_at_hand() -> None:
    """What is staged, and in how many elements, is in the header of the kernel."""
    text = " ".join((FOLDER / "kernel_backward.h").read_text().split())
    for line in (
        "kEnableSplitKeys = kMinSm >= 70;",
        "kOutputInRF = kIsHalf && kMaxK <= kBlockSizeI;",
        "kNeedsAccumGradQ = kEnableSplitKeys || !cutlass::platform::is_same<output_accum_t, output_t>::value;",
        "kNeedsAccumGradK = !kOutputInRF && !cutlass::platform::is_same<output_accum_t, output_t>::value;",
        "int32_t lock; int32_t counter; int32_t pad[2];",
        "return num_splits_key * kBlockSizeJ * align_up(head_dim, kBlockSizeI);",
        "return num_splits_key * kBlockSizeJ * align_up(head_dim_value, kBlockSizeI);",
        "return num_blocks * num_cols * sizeof(GradQTempStorage) / sizeof(output_accum_t);",
        "return num_batches * num_heads * workspace_strideBH() * sizeof(float);",
    ):
        assert line in text, line


@pytest.mark.parametrize(
    ("dtype", "head_dim", "elements"),
    [
        (torch.float32, 64, 16 * (64 * 64 + 4)),  # the query's gradient alone
        (torch.bfloat16, 64, 16 * (64 * 64 + 4)),  # key and value in registers
        (torch.bfloat16, 80, 16 * 2 * (64 * 64 + 4) + 16 * 64 * 2 * 128),  # 64 x 64 x 128, not in registers
        (torch.bfloat16, 256, 16 * 4 * (64 * 64 + 4) + 16 * 64 * 2 * 256),
    ],
)
def test_workspace_of_the_efficient_backward(dtype: torch.dtype, head_dim: int, elements: int) -> None:
    """By hand, for 1024 queries and keys in 2 x 3 heads."""
    graph = fx.Graph()
    with FakeTensorMode():
        tensor = torch.empty(2, 3, 1024, head_dim, dtype=dtype)
    nodes = [graph.placeholder(name) for name in ("out_grad", "query", "key", "value")]
    for node in nodes:
        node.meta["val"] = tensor
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    node = graph.call_function(op, tuple(nodes))
    assert modelled_workspace_bytes(node) == 4 * math.prod((2, 3)) * (1024 + elements)
