"""Channels last, written into a joint graph: other layouts inside, the same numbers and the same strides outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate.torch._compat.dispatch import FakeTensorMode
from checkmate.torch.passes.channels_last import with_channels_last
from tests.torch.networks import Unet, batch

_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class Then(nn.Module):
    """A convolution and what is read of it."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.convolution(x))


MODELS = {
    "unet": Unet(),
    "by position": Then(lambda x: x.as_strided((2, 7), (8, 1))),
    "as if it lay flat": Then(lambda x: x.view(2, -1)[:, :40]),
}


def joint(model: nn.Module, x: torch.Tensor) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """Loss, output and gradients of a model in one graph, and its inputs."""
    names = [name for name, _ in model.named_parameters()]

    def step(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output = functional_call(model, dict(zip(names, tensors[1:], strict=True)), (tensors[0],))
        loss = output.square().mean()
        return loss, output, *torch.autograd.grad(loss, tensors[1:])

    inputs = [x, *(p.detach().clone().requires_grad_() for p in model.parameters())]
    return make_fx(step, tracing_mode="fake")(*inputs), inputs


def images(layout: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    """Two small ones."""
    return torch.randn(2, 3, 16, 16).to(memory_format=layout)


class Watch(fx.Interpreter):
    """Runs a graph and compares the strides of what every op makes with those that it says."""

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, torch.Tensor):
            said = n.meta["val"]
            assert all(a == b for a, b, size in zip(value.stride(), said.stride(), value.shape, strict=True) if size > 1), n
        return value


def group_norm_is_traced_as_it_runs() -> bool:
    x, norm = images(torch.channels_last), nn.GroupNorm(1, 3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        traced = norm(mode.from_tensor(x))
    return traced.stride() == norm(x).stride()


@pytest.mark.parametrize("name", MODELS)
def test_the_same_numbers_in_the_same_strides(name: str) -> None:
    """Every convolution reads its activations with channels last, and a caller sees nothing of it."""
    if name == "unet" and not group_norm_is_traced_as_it_runs():
        pytest.skip("PyTorch 2.14 traces a GroupNorm of channels last with other strides than its kernel returns")
    torch.manual_seed(0)
    gm, inputs = joint(MODELS[name], batch(4) if name == "unet" else images())
    before = str(gm.graph)
    laid_out = with_channels_last(gm.graph)
    laid_out.lint()
    assert str(gm.graph) == before
    for a, b in zip(fx.Interpreter(gm).run(*inputs), Watch(fx.GraphModule(gm, laid_out)).run(*inputs), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b)
    for target in _CONVOLUTIONS:
        for node in laid_out.find_nodes(op="call_function", target=target):
            activations = node.args[: 1 + _CONVOLUTIONS.index(target)]
            assert all(a.meta["val"].is_contiguous(memory_format=torch.channels_last) for a in activations)


def test_what_lies_so_already_is_not_copied() -> None:
    """A user's own `memory_format` is all that is needed."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)
    gm, _ = joint(model, images(torch.channels_last))
    convolutions = with_channels_last(gm.graph).find_nodes(op="call_function", target=_CONVOLUTIONS[0])
    assert [n.args[0].target for n in convolutions] == ["arg0_1", torch.ops.aten.relu.default]


def test_heavy_weights_leave_it_as_it_is() -> None:
    """A weight is copied into channels last at every use."""
    gm, _ = joint(nn.Sequential(nn.Conv2d(64, 64, 3)), torch.randn(1, 64, 4, 4))
    assert with_channels_last(gm.graph) is gm.graph


def test_weights_of_one_pixel_and_small_ones_weigh_nothing() -> None:
    """The first lie in both layouts at once; a copy of a few numbers takes as long as one of none."""
    gm, _ = joint(nn.Sequential(nn.Conv2d(64, 256, 1), nn.Conv2d(256, 2, 3)), torch.randn(1, 64, 4, 4))
    assert with_channels_last(gm.graph) is not gm.graph


def test_strides_that_cannot_be_kept_leave_it_as_it_is() -> None:
    """A view that goes out has strides that no plain copy has."""
    gm, _ = joint(Then(lambda x: x.transpose(1, 2)), images())
    assert with_channels_last(gm.graph) is gm.graph
