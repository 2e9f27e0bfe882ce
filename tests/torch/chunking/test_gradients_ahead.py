"""Gradients that the forward computes piece by piece, and the backward scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_joint_simple

import checkmate.torch
from checkmate.core.errors import InfeasibleBudgetError
from checkmate.torch import measure_peak
from checkmate.torch.chunking.region_groups import region_groups
from checkmate.torch.chunking.unit_tangent import is_linear
from checkmate.torch.passes.losses import pick_before_reducing

pytestmark = pytest.mark.usefixtures("nothing_else")

TOKENS, WIDTH, VOCABULARY = 256, 64, 4096
cross_entropy = nn.functional.cross_entropy


class Head(nn.Module):
    """A layer, and a head whose logits are by far the largest tensor; the loss is inside."""

    def __init__(self, loss: Callable[[torch.Tensor, torch.Tensor], Any] = cross_entropy) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.loss(self.head(self.body(x)), y)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(TOKENS, WIDTH, generator=generator), torch.randint(VOCABULARY, (TOKENS,), generator=generator)


@pytest.fixture
def always_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of these small ops do not decide."""
    monkeypatch.setattr(
        "checkmate.torch.chunking.choose.region_groups",
        lambda *given, **options: [k for k in region_groups(*given, **options) if k.assumes_unit_tangent],
    )


def budget_of(model: nn.Module) -> int:
    """Half of the memory that a model needs without chunks."""
    with pytest.raises(InfeasibleBudgetError) as refused:
        checkmate.torch.compile(model, example=batch(), budget=1, chunking="off")
    torch.compiler.reset()
    return int(0.5 * refused.value.floor_bytes)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="checkmate", options={"budget": budget_of(model), "chunking": "auto"})


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad(set_to_none=True)
    return found


def assert_close(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for g, e in zip(got, expected, strict=True):
        assert (g - e).norm() < 4e-6 * e.norm()  # sums of some hundred numbers, rounded to one part in 2**24 each


@pytest.mark.usefixtures("always_ahead")
def test_the_tangent_scales_the_gradients() -> None:
    model = Head()
    run = compiled(model)
    model(*batch()).backward()
    plain = gradients(model)
    run(*batch()).backward()
    once = gradients(model)
    assert_close(once, plain)
    for factor in (1 / 4, 65536.0):  # powers of two change no bit of a significand
        (run(*batch()) * factor).backward()
        assert all(torch.equal(g, factor * e) for g, e in zip(gradients(model), once, strict=True))
    (run(*batch()) / 3).backward()
    assert_close(gradients(model), [g / 3 for g in plain])


@pytest.mark.usefixtures("always_ahead")
def test_a_graph_that_is_retained_goes_back_twice() -> None:
    model = Head()
    run = compiled(model)
    loss = run(*batch())
    loss.backward(torch.tensor(0.5), retain_graph=True)
    half = gradients(model)
    loss.backward(torch.tensor(2.0))
    assert all(torch.equal(g, 4 * e) for g, e in zip(gradients(model), half, strict=True))


@pytest.mark.usefixtures("always_ahead")
def test_gradients_accumulate() -> None:
    model = Head()
    run = compiled(model)
    for _ in range(3):
        (run(*batch()) / 3).backward()
    summed = gradients(model)
    model(*batch()).backward()
    assert_close(summed, gradients(model))


@pytest.mark.usefixtures("always_ahead")
def test_the_measured_peak_is_the_planned_one() -> None:
    model = Head()
    step = checkmate.torch.compile(model, example=batch(), budget=budget_of(model), chunking="auto")
    assert any("gradients ahead" in remark for remark in step.result.remarks)
    given = batch()
    step(*given)
    model.zero_grad(set_to_none=True)
    assert measure_peak(lambda: step(*given)) == step.result.peak_bytes - step.graph.resident_bytes


class Clipped(torch.autograd.Function):
    """The identity, whose backward clips the gradient: it is not linear in the tangent."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.clamp(-1e-6, 1e-6)


def clipped(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(Clipped.apply(logits), y)


def weighted(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (cross_entropy(logits, y, reduction="none") * (y % 3)).sum() / TOKENS


def soft_capped(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(30 * torch.tanh(logits / 30), y)


def smoothed(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, y, label_smoothing=0.1)


@pytest.mark.usefixtures("always_ahead")
@pytest.mark.parametrize("loss", [weighted, *(pytest.param(loss, marks=pytest.mark.slow) for loss in (soft_capped, smoothed))])
def test_other_losses(loss: Callable[..., Any]) -> None:
    model = Head(loss)
    run = compiled(model)
    (5 * model(*batch())).backward()
    expected = gradients(model)
    (5 * run(*batch())).backward()
    assert_close(gradients(model), expected)


def kinds(function: Callable[..., Any], *inputs: torch.Tensor) -> list[bool]:
    """For each kind of regions of a function of (x, weight, labels), in the most pieces, whether its gradients are ahead."""
    joint = aot_export_joint_simple(function, inputs, trace_joint=True)
    pick_before_reducing(joint.graph)
    return [kind.assumes_unit_tangent for kind in region_groups(joint.graph) if kind.most_pieces]


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    x, weight = (torch.randn(n, WIDTH, dtype=dtype, requires_grad=True) for n in (TOKENS, VOCABULARY))
    return [x, weight, torch.randint(VOCABULARY, (TOKENS,))]


def one_loss(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor]:
    return (cross_entropy(x @ weight.t(), y),)


def two_losses(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x @ weight.t()
    return cross_entropy(logits, y), logits.square().mean()


def test_both_ways_are_offered() -> None:
    assert sorted(kinds(one_loss, *inputs(torch.float32))) == [False, True]


def test_a_gradient_that_is_clipped_on_its_way_waits() -> None:
    assert kinds(lambda x, w, y: (clipped(x @ w.t(), y),), *inputs(torch.float32)) == [False]


def test_two_losses_of_the_same_logits_wait_for_their_tangents() -> None:
    assert kinds(two_losses, *inputs(torch.float32)) == [False]


def test_half_precision_waits_for_the_scale_of_the_loss() -> None:
    """With a tangent of one small gradients would be lost."""
    assert kinds(one_loss, *inputs(torch.float16)) == [False]
    assert sorted(kinds(one_loss, *inputs(torch.bfloat16))) == [False, True]


@pytest.mark.parametrize(("filled", "linear"), [(0.0, True), (1.0, False)])
def test_a_choice_between_a_gradient_and_zeros_is_linear(filled: float, linear: bool) -> None:
    """Inductor decomposes the gradient of a loss that ignores some targets into one."""
    graph = fx.Graph()
    mask, gradient = (graph.placeholder(name) for name in ("mask", "gradient"))
    zeros = graph.call_function(torch.ops.aten.full.default, ([4], filled))
    chosen = graph.call_function(torch.ops.aten.where.self, (mask, gradient, zeros))
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(4)
    assert is_linear(chosen, {gradient}) is linear
    assert not is_linear(chosen, {mask, gradient})
