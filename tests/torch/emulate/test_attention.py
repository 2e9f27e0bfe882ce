"""Attention as the device would run it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import checkmate
from checkmate.cost import load_device
from checkmate.doctor.steps import deterministic
from checkmate.torch.emulate.attention import select_kernel


class Attention(nn.Module):
    """Attention alone, with a mask or dropout."""

    def __init__(self, dropout: float = 0.0, masked: bool = False, width: int = 64) -> None:
        super().__init__()
        self.inside = nn.Linear(width, 3 * width)
        self.dropout, self.masked = dropout, masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.inside(x).chunk(3, -1))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() if self.masked else None
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, mask, self.dropout if self.training else 0.0, is_causal=not self.masked
        )
        return out.transpose(1, 2).flatten(2)


def kinds(device: str, dtype: torch.dtype, **options: object) -> set[str]:
    model, x = Attention(**options).to(dtype), torch.randn(2, 33, 64, dtype=dtype)  # type: ignore[arg-type]
    graph = checkmate.torch.capture(model, lambda p, y: p.mean() * y, example=(x, torch.ones((), dtype=dtype)), device=device)
    return {op.kind.split(".")[1] for op in graph.ops if "attention" in op.kind or "softmax" in op.kind}


@pytest.mark.parametrize(
    ("device", "dtype", "options", "kernel"),
    [
        ("A100", torch.bfloat16, {}, "flash"),
        ("A100", torch.bfloat16, {"dropout": 0.1}, "flash"),
        ("A100", torch.float32, {}, "efficient"),
        ("A100", torch.bfloat16, {"masked": True}, "efficient"),
        ("T4", torch.float16, {}, "efficient"),
        ("H100", torch.bfloat16, {}, "cudnn"),
    ],
)
def test_attention_is_the_devices(device: str, dtype: torch.dtype, options: dict[str, object], kernel: str) -> None:
    """A processor's attention makes the whole matrix of weights with dropout; what a device saves is what counts."""
    name = f"_scaled_dot_product_{kernel}_attention"
    assert kinds(device, dtype, **options) == {name, f"{name}_backward"}


def test_attention_of_deterministic_algorithms_is_not_cudnns() -> None:
    """`check_cudnn_deterministic` refuses it, unless a warning is enough."""
    half = torch.empty(2, 4, 8, 16, device="meta", dtype=torch.bfloat16)
    found = dict[bool, str]()
    for warn_only in (False, True):
        with deterministic(warn_only=warn_only):
            found[warn_only] = select_kernel(load_device("H100"), half, half, half, None, 0.0, False)
    assert found == {False: "flash", True: "cudnn"}


def test_attention_without_a_kernel_makes_its_weights() -> None:
    """Where no kernel can run, so it is on the device."""
    q = torch.empty(2, 4, 8, 6, device="meta")
    assert select_kernel(load_device("A100"), q, q, q, None, 0.0, False) == "math"
    assert select_kernel(load_device("A100"), q[0], q[0], q[0], None, 0.0, False) == "math"
    half = torch.empty(2, 4, 8, 16, device="meta", dtype=torch.bfloat16)
    assert select_kernel(load_device("T4"), half, half, half, None, 0.0, False) == "math"
