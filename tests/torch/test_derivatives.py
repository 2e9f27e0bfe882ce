"""Losses with derivatives inside: of inputs, of gradients and for each sample, in whole steps and in plain loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import checkmate.torch
from checkmate.torch import GraphBreakError, measure_peak
from tests.torch.steps import dynamo_settings
from tests.torch.test_whole_step import same, trained

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="Dynamo does not trace requires_grad_ in earlier versions")

ROWS = 1024


class Loss(nn.Module):
    """A network, and a loss that takes derivatives of it."""

    def __init__(self, of: Callable[..., torch.Tensor], inputs: int, outputs: int = 1) -> None:
        super().__init__()
        sizes = [inputs, *[32] * 5]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
        self.net, self.of = nn.Sequential(*layers, nn.Linear(32, outputs)), of

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        return self.of(self.net, *batch)


def gradient(y: torch.Tensor, x: Any) -> Any:
    found = torch.autograd.grad(y.sum(), x, create_graph=True)
    return found if isinstance(x, list) else found[0]


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def differential_equation(order: int) -> Callable[..., torch.Tensor]:
    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = leaf(x)
        u = net(x)
        for _ in range(order):
            u = gradient(u, x).sum(1, keepdim=True)
        return u.square().mean()

    return loss


def energy_and_forces(net: nn.Module, at: torch.Tensor, forces: torch.Tensor) -> torch.Tensor:
    at = leaf(at)
    energy = net(at).sum()
    return energy.square() + (gradient(energy, at) + forces).square().mean()


def messages(net: nn.Module, at: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    at = leaf(at)
    message = net((at[source] - at[target]).square())
    energy = torch.zeros(len(at), 1).index_add(0, target, message).tanh().sum()
    return gradient(energy, at).square().mean()


def critic(net: nn.Module, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    share = torch.rand(len(real), 1)
    between = leaf(share * real + (1 - share) * fake)
    penalty = (gradient(net(between), between).norm(2, dim=1) - 1).square().mean()
    return net(fake).mean() - net(real).mean() + 10 * penalty


def two_inner_steps(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weights = dict(net.named_parameters())
    for _ in range(2):
        inner = (torch.func.functional_call(net, weights, (x,)) - y).square().mean()
        moves = gradient(inner, [*weights.values()])
        weights = {name: w - 0.1 * move for (name, w), move in zip(weights.items(), moves, strict=True)}
    return (torch.func.functional_call(net, weights, (x.flip(0),)) - y).square().mean()


def gradient_penalty(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Its gradient has products of the Hessian with a vector."""
    loss = (net(x) - y).square().mean()
    return loss + sum(g.square().sum() for g in gradient(loss, [*net.parameters()]))


def sampler(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    for t in range(4):
        x = x - 0.1 * net(torch.cat([x, torch.full((len(x), 1), float(t))], 1))
    return x.square().mean()


def score_matching(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = leaf(x)
    score = net(x)
    divergence = sum(gradient(score[:, i], x)[:, i] for i in range(4))
    return (divergence + 0.5 * score.square().sum(1)).mean()


def per_sample(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    def loss(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(net, weights, (x,)) - y).square().mean()

    weights = dict(net.named_parameters())
    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)
    norms = sum(g.flatten(1).square().sum(1) for g in gradients.values())
    return loss(weights, x, y) + 0.01 * norms.mean()


def fixed_point(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The gradient of a fixed point, by the series of its inverse Jacobian."""
    with torch.no_grad():
        z = x
        for _ in range(6):
            z = torch.tanh(net(z) + x)
    z = leaf(z)
    f = torch.tanh(net(z) + x)
    v = f
    for _ in range(3):
        v = f + torch.autograd.grad(f, z, v, create_graph=True)[0]
    return v.square().mean()


def batch(*columns: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(ROWS, n) for n in columns]


def edges() -> list[torch.Tensor]:
    return [*batch(3)[:1], *torch.randint(ROWS, (2, 4 * ROWS))]


PROGRAMS: dict[str, tuple[Callable[..., torch.Tensor], int, int, list[torch.Tensor]]] = {
    "order_2": (differential_equation(2), 2, 1, batch(2)),
    "order_3": (differential_equation(3), 2, 1, batch(2)),
    "forces": (energy_and_forces, 3, 1, batch(3, 3)),
    "messages": (messages, 3, 1, edges()),
    "critic": (critic, 8, 1, batch(8, 8)),
    "two_inner_steps": (two_inner_steps, 4, 1, batch(4, 1)),
    "gradient_penalty": (gradient_penalty, 4, 1, batch(4, 1)),
    "sampler": (sampler, 9, 8, batch(8)),
    "score_matching": (score_matching, 4, 4, batch(4)),
    "per_sample": (per_sample, 4, 1, batch(4, 1)),
    "fixed_point": (fixed_point, 8, 8, batch(8)),
}
FAST = ("forces", "messages")


def program(name: str) -> tuple[nn.Module, list[torch.Tensor]]:
    of, inputs, outputs, batch = PROGRAMS[name]
    torch.manual_seed(0)
    return Loss(of, inputs, outputs), batch


def eagerly(model: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: list[torch.Tensor]) -> tuple[Any, Any]:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return None, loss.detach()


@pytest.mark.parametrize("share", ["60%", pytest.param("40%", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in PROGRAMS])
def test_a_whole_step_with_derivatives_inside(name: str, share: str) -> None:
    """All derivatives are one graph: bits of eager mode, and the bytes of the plan."""
    model, batch = program(name)
    twin = copy.deepcopy(model)
    mine, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    step = checkmate.torch.compile(
        model, None, mine, example=batch, budget=share, costs="estimated", chunking="off", time_limit_s=3
    )
    assert step.whole
    expected = trained(lambda: eagerly(twin, theirs, batch), twin, theirs)
    assert same(trained(lambda: step(*batch), model, mine), expected)
    assert step.result.peak_bytes <= step.result.budget_bytes
    assert measure_peak(lambda: step(*batch)) <= step.result.peak_bytes - step.graph.resident_bytes


def test_a_plain_loop_with_derivatives_inside() -> None:
    model, batch = program("forces")
    twin = copy.deepcopy(model)
    mine, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
    options = {"budget": "60%", "costs": "estimated", "chunking": "off", "time_limit_s": 3}
    compiled = torch.compile(model, backend="checkmate", options=options)
    expected = trained(lambda: eagerly(twin, theirs, batch), twin, theirs)
    with dynamo_settings(trace_autograd_ops=True):
        assert same(trained(lambda: eagerly(compiled, mine, batch), model, mine), expected)


def test_what_dynamo_cannot_trace_is_told() -> None:
    """A function is traced without Dynamo (`tests/torch/step/test_function.py`)."""

    def laplacian(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        found = torch.func.vmap(torch.func.hessian(lambda at: net(at).squeeze()))(x)
        return found.diagonal(dim1=1, dim2=2).sum(1).square().mean()

    model = Loss(laplacian, 2)
    with pytest.raises(GraphBreakError, match=r"(?s)one graph: .*hint: .*checkmate\.torch\.compile\(function, example"):
        checkmate.torch.compile(model, None, torch.optim.AdamW(model.parameters()), example=batch(2), budget="60%")
