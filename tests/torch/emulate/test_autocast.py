"""Mixed precision: on the device at hand to the bit, on one that is not there by its own rules."""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import checkmate
from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import OptionError
from checkmate.torch._compat.dispatch import autocast_kernels
from checkmate.torch.emulate.autocast import (
    BANNED,
    FP32_APPEND_DTYPE,
    FP32_SET_OPT_DTYPE,
    LOWER_PRECISION_FP,
    PROMOTE,
    cuda_autocast_rules,
)
from tests.torch.networks import input_of, mlp

pytestmark = pytest.mark.usefixtures("nothing_else")

HEADER = Path(torch.__path__[0]) / "include" / "ATen" / "autocast_mode.h"
HALF = torch.bfloat16


class Block(nn.Module):
    """An attention, a norm and a classifier: ops of every rule."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        query, key, value = self.into(self.norm(x)).unflatten(-1, (3, 4, 16)).movedim(2, 0).transpose(2, 3)
        seen = F.scaled_dot_product_attention(query, key, value, mask)
        return self.out(x + seen.transpose(1, 2).flatten(2))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 32, 64), torch.randint(0, 10, (8, 32))


def cross_entropy(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(prediction.flatten(0, 1), target.flatten())


def types_of(device: str, autocast: torch.dtype | None, model: nn.Module | None = None) -> Counter[tuple[str, int]]:
    """Op and bytes of each of its outputs, of a step for a device."""
    graph = checkmate.torch.capture(model or Block(), cross_entropy, example=batch(), device=device, autocast=autocast)
    return Counter((op.kind, graph.values[v].size_bytes) for op in graph.ops for v in op.outputs)


def rules(text: str) -> dict[str, set[str]]:
    """The lists of PyTorch's own header."""
    found = re.finditer(r"#define AT_FORALL_(\w+)\(_\)((?:.*\\\n)*.*\n)", text)
    entry = re.compile(r"_\((\w+)(?:, (\w+))?\)")
    return {m[1]: {op + (f".{overload}" if overload else "") for op, overload in entry.findall(m[2])} for m in found}


def test_the_rules_are_those_of_the_torch_at_hand() -> None:
    """Its header comes with it: a release that moves an op to another list fails here."""
    named = re.compile(r"imname|\.names")  # 2.11 has overloads for named dimensions
    listed = {kind: {op for op in ops if not named.search(op)} for kind, ops in rules(HEADER.read_text()).items()}
    cudnn = {"cudnn_convolution", "cudnn_convolution_transpose"}
    assert listed["LOWER_PRECISION_FP"] | cudnn == LOWER_PRECISION_FP
    assert listed["PROMOTE"] == PROMOTE
    assert listed["FP32_SET_OPT_DTYPE"] == FP32_SET_OPT_DTYPE
    known = LOWER_PRECISION_FP | PROMOTE | FP32_SET_OPT_DTYPE | FP32_APPEND_DTYPE.keys() | BANNED
    others = autocast_kernels("CUDA") - known - {"_cudnn_rnn", "linalg_matrix_sqrth"}  # registered elsewhere
    assert {op for op in others if not named.search(op)} == listed["FP32"]


@pytest.mark.parametrize(
    ("run", "on_cuda"),
    [
        (lambda half, full: F.linear(full, full), HALF),
        (lambda half, full: F.softmax(half, -1), torch.float32),
        (lambda half, full: F.softmax(half, -1, dtype=HALF), HALF),
        (lambda half, full: F.layer_norm(half, (8,)), torch.float32),
        (lambda half, full: half.sum(), torch.float32),
        (lambda half, full: half.exp(), torch.float32),
        (lambda half, full: half.norm(), torch.float32),
        (lambda half, full: F.gelu(half), HALF),
        (lambda half, full: torch.addcmul(half, half, half), HALF),
        (lambda half, full: torch.addcmul(half, half, full), torch.float32),
        (lambda half, full: F.pad(half[None], (1, 1), mode="reflect"), HALF),
        (lambda half, full: F.linear(full.double(), full.double()), torch.float64),
        (lambda half, full: F.mse_loss(half, half), torch.float32),
    ],
)
def test_types_follow_the_rules_of_cuda_and_then_those_of_the_processor_again(run: Any, on_cuda: torch.dtype) -> None:
    """Through composite ops, and with derivatives."""
    full = torch.randn(8, 8, requires_grad=True)
    with torch.autocast("cpu", HALF):
        half = F.linear(full, full)
        before = run(half, full).dtype
        with cuda_autocast_rules():
            there = run(half, full)
        assert there.dtype == on_cuda
        assert run(half, full).dtype == before
    there.sum().backward()
    assert full.grad is not None and full.grad.dtype == torch.float32


def test_what_is_unsafe_on_cuda_is_refused() -> None:
    """As there."""
    share = torch.rand(4)
    with cuda_autocast_rules(), torch.autocast("cpu", HALF), pytest.raises(RuntimeError, match="unsafe under autocast"):
        F.binary_cross_entropy(share, share)


def test_copies_are_in_the_step_of_a_device_that_is_not_there() -> None:
    """Parameters are cast at each use, the loss and the norm read float32, attention runs in half precision."""
    mixed = types_of("A100", HALF)
    weight_copies = {("aten._to_copy.default", 192 * 64 * 2), ("aten._to_copy.default", 1536)}
    assert weight_copies <= mixed.keys()  # 10 x 64 x 2 bytes, rounded up to 512
    assert ("aten._to_copy.default", 8 * 32 * 10 * 4) in mixed  # what the loss reads
    assert ("aten.native_layer_norm.default", 8 * 32 * 64 * 4) in mixed
    assert any("flash" in kind for kind, _ in mixed)
    assert not any("flash" in kind for kind, _ in types_of("A100", None))


@pytest.mark.parametrize("where", ["around", "inside", "option"])
def test_a_region_counts_wherever_it_is(where: str) -> None:
    """Around the call, in the model by the name of its input's device, or as an option: the same step."""

    class Inside(Block):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            with torch.autocast(x.device.type, HALF):
                return super().forward(x, mask)

    def loss(p: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(p.float(), y)

    def captured(model: nn.Module, **options: Any) -> checkmate.Graph:
        return checkmate.torch.capture(model, loss, example=batch(), device="H100", **options)

    expected = captured(Block(), autocast=HALF)
    if where == "option":
        with torch.device("meta"):
            model, example = Block(), batch()
        found = checkmate.torch.capture(model, loss, example=example, device="H100", autocast=HALF)
    elif where == "inside":
        found = captured(Inside())
    else:
        with torch.autocast("cpu", HALF):
            found = captured(Block())
    assert [op.kind for op in found.ops if op.phase == "forward"] == [op.kind for op in expected.ops if op.phase == "forward"]
    assert found.resident_bytes == expected.resident_bytes


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.filterwarnings("ignore:CUDA is not available", "ignore:User provided device_type of 'cuda'")
def test_a_region_that_is_off_is_off_there_too(outer: bool) -> None:
    """Some models switch autocast off for a part, by the name of a device; alone that is nothing, in a region it is something."""

    class Exact(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", enabled=False):
                return super().forward(x)

    x = torch.randn(4, 8)

    def captured() -> checkmate.Graph:
        dtype = HALF if outer else None
        return checkmate.torch.capture(Exact(8, 8), F.mse_loss, example=(x, x), device="A100", autocast=dtype)

    if outer:
        with pytest.raises(OptionError, match="does nothing here"):
            captured()
    else:
        assert captured().ops


@pytest.mark.filterwarnings("ignore:CUDA is not available", "ignore:User provided device_type of 'cuda'")
def test_a_region_for_cuda_where_there_is_none_is_refused() -> None:
    """It is silently off, so that its bytes would be wrong."""

    class Mixed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", HALF):
                return super().forward(x)

    x = torch.randn(4, 8)
    with pytest.raises(OptionError, match="autocast\\('cuda'\\), which does nothing here"):
        checkmate.torch.capture(Mixed(8, 8), F.mse_loss, example=(x, x), device="A100")


def test_fits_knows_mixed_precision() -> None:
    """Less is kept, and parameters with their state take what they took."""
    x = torch.randn(512, 64)
    asked: dict[str, Any] = {"example": (x, x), "device": "A100", "optimizer": "adamw", "time_limit_s": 2.0}
    full, mixed = (checkmate.torch.fits(mlp(depth=6, dropout=0.0), F.mse_loss, autocast=dtype, **asked) for dtype in (None, HALF))
    assert mixed.parameter_bytes == full.parameter_bytes and mixed.state_bytes == full.state_bytes
    assert mixed.keep_all_bytes < full.keep_all_bytes


@pytest.mark.parametrize("whole", [True, False])
def test_a_step_under_autocast_has_the_bits_of_a_region_written_by_hand(whole: bool) -> None:
    """Under a budget, with dropout and an optimizer."""
    x, y = input_of("dropout"), torch.zeros(len(input_of("dropout")), 64)
    first = mlp()
    second = copy.deepcopy(first)

    class Region(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", HALF):
                return F.mse_loss(self.inner(x), y)

    roomy = checkmate.torch.compile(Region(second), None, sgd(second), example={"x": x, "y": y}, whole=whole)
    asked: dict[str, Any] = {"example": (x, y), "whole": whole, "autocast": HALF}
    graph = checkmate.torch.capture(first, F.mse_loss, optimizer=sgd(first), **asked)
    room = keep_all_bytes(graph) - graph.resident_bytes
    budget = graph.resident_bytes + room * 4 // 5
    tight = checkmate.torch.compile(first, F.mse_loss, sgd(first), budget=budget, time_limit_s=3.0, **asked)
    assert len(tight.plan.order) > len(tight.graph.ops)
    for _ in range(2):
        torch.manual_seed(3)
        _, expected = roomy(x=x, y=y)
        torch.manual_seed(3)
        prediction, found = tight(x, y)
        assert torch.equal(expected, found) and prediction.dtype == HALF
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(p.dtype == torch.float32 for p in first.parameters())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_types_that_cannot_be_are_refused() -> None:
    """Before anything is traced."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(OptionError, match="not a type of half precision"):
        checkmate.torch.capture(model, F.mse_loss, example=(x, x), autocast=torch.float32)
    with pytest.raises(OptionError, match="needs a scaled loss"):
        checkmate.torch.compile(model, F.mse_loss, sgd(model), example=(x, x), autocast=torch.float16)
