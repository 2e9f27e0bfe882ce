"""Steps that are functions: several losses, backwards and optimizers in one graph, with the derivatives that they take."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import checkmate.torch
from checkmate import OptionError, simulate
from checkmate.core.plan import Compute
from checkmate.torch import GraphBreakError, measure_peak

X, Y = torch.randn(512, 4), torch.randn(512, 1)
Made = tuple[Callable[..., Any], list[nn.Module], list[torch.optim.Optimizer]]


def network(inputs: int = 4, outputs: int = 1, *more: nn.Module) -> nn.Sequential:
    layers = (layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh()))
    return nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), *layers, *more, nn.Linear(32, outputs))


def wasserstein() -> Made:
    """Critic with its penalty, then generator, with clipped gradients and a moving average of the weights."""
    made, critic = network(4, 4, nn.BatchNorm1d(32)), network(4, 1, nn.Dropout(0.3))
    average = copy.deepcopy(made)
    of_made, of_critic = torch.optim.AdamW(made.parameters()), torch.optim.Adam(critic.parameters(), foreach=True)

    def step(real: torch.Tensor, noise: torch.Tensor) -> Any:
        for p in critic.parameters():
            p.requires_grad_(True)
        of_critic.zero_grad()
        fake = made(noise.expand(-1, 4)).detach()
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(2, 1) - 1).square().mean()
        loss.backward()
        of_critic.step()
        for p in critic.parameters():
            p.requires_grad_(False)
        of_made.zero_grad()
        second = -critic(made(noise.expand(-1, 4))).mean()
        second.backward()
        nn.utils.clip_grad_norm_(made.parameters(), 0.1)
        of_made.step()
        of_made.zero_grad()
        with torch.no_grad():
            for mine, its in zip(average.parameters(), made.parameters(), strict=True):
                mine.mul_(0.9).add_(its, alpha=0.1)
        return loss.detach(), {"second": second.detach()}

    return step, [made, critic, average], [of_made, of_critic]


def learning_to_learn() -> Made:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = dict(net.named_parameters())
        for _ in range(2):
            inner = (torch.func.functional_call(net, weights, (x,)) - y).square().mean()
            moves = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
            weights = {name: w - 0.1 * move for (name, w), move in zip(weights.items(), moves, strict=True)}
        loss = (torch.func.functional_call(net, weights, (x.flip(0),)) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, [net], [optimizer]


def three_updates() -> Made:
    """Each forward reads the weights that the update before has written."""
    net = network()
    optimizer = torch.optim.Adam(net.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        losses = []
        for _ in range(3):
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    return step, [net], [optimizer]


def hessians() -> Made:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found = torch.func.vmap(torch.func.hessian(lambda at: net(at).squeeze()))(x)
        loss = (found.diagonal(dim1=1, dim2=2).sum(1, keepdim=True) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, [net], [optimizer]


def private() -> Made:
    """Clipped gradients of each sample, with noise, which no backward writes to ``.grad``; and a checkpointed loss."""
    net = network(4, 1, nn.Dropout(0.1))
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loss_of(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (torch.func.functional_call(net, weights, (x,)) - y).square().mean()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        known: Any = checkpoint(lambda at: net(at).square().mean(), x, use_reentrant=False)
        known.backward()
        weights = {name: p.detach() for name, p in net.named_parameters()}
        each = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0), randomness="different")(weights, x[:16], y[:16])
        norms = sum(g.flatten(1).square().sum(1) for g in each.values()).sqrt()
        for name, p in net.named_parameters():
            p.grad += torch.einsum("n,n...->...", 1 / norms.clamp(min=1), each[name])
            p.grad += 0.01 * torch.randn_like(p)
        optimizer.step()
        optimizer.zero_grad()
        return norms

    return step, [net], [optimizer]


def two_networks() -> Made:
    """Updates of two optimizers in a row, which one call of either could take for its own."""
    nets = [network(), network()]
    optimizers = [torch.optim.AdamW(n.parameters(), rate, foreach=True) for n, rate in zip(nets, (1e-2, 1e-3), strict=True)]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (nets[0](x) * nets[1](x) - y).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step, [*nets], [*optimizers]


PROGRAMS = (wasserstein, learning_to_learn, three_updates, hessians, private, two_networks)
FAST = (wasserstein, three_updates, two_networks)


def made(program: Callable[[], Made]) -> Made:
    torch.manual_seed(0)
    return program()


def compiled(step: Callable[..., Any], budget: str = "100%", costs: Any = "estimated") -> checkmate.torch.Step:
    return checkmate.torch.compile(step, example=(X, Y), budget=budget, costs=costs, chunking="off", time_limit_s=2)


def left_by(run: Callable[..., Any], modules: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """Everything that three steps from a fixed seed leave."""
    torch.manual_seed(5)
    found = [run(X, Y) for _ in range(3)]
    found += [m.state_dict() for m in modules] + [sorted(o.state_dict()["state"].items()) for o in optimizers]
    return pytree.tree_leaves([found, torch.get_rng_state()])


@pytest.mark.parametrize("share", ["60%", pytest.param("45%", marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in PROGRAMS])
def test_a_function_is_one_step(program: Callable[[], Made], share: str) -> None:
    """Bits of eager mode, which runs the function, and the bytes of the plan; nothing changes before the first call."""
    step, modules, optimizers = made(program)
    expected = left_by(step, modules, optimizers)
    step, modules, optimizers = made(program)
    before = copy.deepcopy([m.state_dict() for m in modules])
    planned = compiled(step, share, "measured" if share == "45%" else "estimated")  # estimated workspace is an upper bound
    after = [m.state_dict() for m in modules]
    assert all(map(torch.equal, pytree.tree_leaves(before), pytree.tree_leaves(after)))
    assert not any(o.state for o in optimizers)
    found = left_by(planned, modules, optimizers)
    assert len(found) == len(expected)
    assert all(map(lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, found, expected))
    assert planned.whole
    assert planned.result.peak_bytes <= planned.result.budget_bytes
    measured = measure_peak(lambda: planned(X, Y))
    graph, plan = planned.graph, planned.result.plan
    at_peak = plan.steps[simulate(graph, plan).peak_step]
    spare = graph.ops[at_peak.op].workspace_bytes if share == "60%" and isinstance(at_peak, Compute) else 0
    assert measured <= planned.result.peak_bytes - graph.resident_bytes <= 1.001 * measured + spare


def losses_of(net: nn.Module, *, more: Callable[[torch.Tensor], Any] = lambda loss: None) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (net(x) - y).square().mean()
        loss.backward()
        more(loss)
        return loss.detach()

    return step


def test_gradients_stay_without_an_optimizer() -> None:
    """The optimizer may step after the function."""
    net = network()
    twin = copy.deepcopy(net)
    losses_of(twin)(X, Y)
    step = compiled(losses_of(net))
    step(X, Y)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.equal(p.grad, q.grad)
    with pytest.raises(OptionError, match="gradients of an earlier backward"):
        step(X, Y)


def test_a_change_of_what_it_reads_is_traced(caplog: pytest.LogCaptureFixture) -> None:
    """A graph has the modes of modules and the numbers of its trace; learning rates are read at each step."""
    net, scale = network(4, 1, nn.Dropout()), 2.0
    twin = copy.deepcopy(net)
    optimizers = [torch.optim.SGD(n.parameters(), 0.1) for n in (net, twin)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers]

    def step(x: torch.Tensor, y: torch.Tensor, net: nn.Module = net, optimizer: Any = optimizers[0]) -> torch.Tensor:
        loss = scale * (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    planned = compiled(step)
    for k in range(4):
        if k == 2:
            net.eval(), twin.eval()
        scale = 3.0 if k == 3 else scale
        torch.manual_seed(k)
        found = planned(X, Y)
        torch.manual_seed(k)
        assert torch.equal(found, step(X, Y, twin, optimizers[1]))
        for schedule in schedules:
            schedule.step()
    assert len([r for r in caplog.records if r.levelno == logging.WARNING and "compiled again" in r.message]) == 2


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.net = 0, network()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(x)


def refused(kind: str) -> Callable[..., Any]:
    net = Counting() if kind == "counter" else network()
    adam, lbfgs = torch.optim.Adam(net.parameters()), torch.optim.LBFGS(net.parameters())
    schedule, scaler = torch.optim.lr_scheduler.StepLR(adam, 1), torch.amp.GradScaler("cpu")
    more: dict[str, Callable[[torch.Tensor], Any]] = {
        "branch": lambda loss: loss * 2 if loss > 1 else loss,
        "mask": lambda loss: X[loss > X],
        "scheduler": lambda loss: (adam.step(), schedule.step()),
        "scaler": lambda loss: scaler.step(adam),
        "numpy": lambda loss: loss.detach().numpy(),
        "lbfgs": lambda loss: lbfgs.step(lambda: loss),
        "counter": lambda loss: None,
    }
    return losses_of(net, more=more[kind])


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("branch", r"_local_scalar_dense.*test_function\.py:\d+: `\"branch\""),
        ("mask", r"aten\.index.*`\"mask\""),
        ("scheduler", "options of Adam, as a scheduler"),
        ("scaler", "test_function.py"),
        ("numpy", r"numpy\(\) is not supported.*`\"numpy\""),
        ("lbfgs", "LBFGS was not found"),
        ("counter", "'net', or a number in it"),
    ],
)
def test_what_has_no_graph_is_named(kind: str, named: str) -> None:
    with pytest.raises((GraphBreakError, OptionError), match=rf"(?s){named}.*hint"):
        compiled(refused(kind))


def test_arguments_for_a_model_are_refused() -> None:
    step = losses_of(network())
    with pytest.raises(OptionError, match="a function is the whole step"):
        checkmate.torch.compile(step, nn.functional.mse_loss, example=(X, Y))
    with pytest.raises(OptionError, match="clip_norm is for a model"):
        checkmate.torch.compile(step, example=(X, Y), clip_norm=1.0)
    with pytest.raises(OptionError, match="checkpoints is for a model"):
        checkmate.torch.compile(step, example=(X, Y), checkpoints="respected")
    with pytest.raises(OptionError, match="optimizer is for a model"):
        checkmate.torch.fits(step, example=(X, Y), device="H100", optimizer="adam")
    with pytest.raises(OptionError, match="plain_loop is for a model"):
        checkmate.torch.capture(step, example=(X, Y), costs="estimated", plain_loop=True)
    with pytest.raises(OptionError, match="missing a required argument"):
        checkmate.torch.compile(step, example=(X,))


def test_the_graph_of_a_function() -> None:
    graph = checkmate.torch.capture(losses_of(network()), example=(X, Y), costs="estimated")
    assert graph.name == "step"
    assert {op.phase for op in graph.ops} == {"forward", "backward"}
    assert any("test_function.py" in op.source for op in graph.ops)


def on_meta() -> tuple[Callable[..., Any], tuple[torch.Tensor, torch.Tensor]]:
    with torch.device("meta"):
        return two_networks()[0], (torch.empty(512, 4), torch.empty(512, 1))


@pytest.mark.parametrize("meta", [False, True])
def test_a_function_is_forecast_for_a_device_that_is_not_there(meta: bool) -> None:
    """With parameters and optimizer state of all that it reads, as `compile` finds them here."""
    step, example = on_meta() if meta else (two_networks()[0], (X, Y))
    answer = checkmate.torch.fits(step, example=example, device="CPU", time_limit_s=3)
    weights = sum(p.nbytes for _ in range(2) for p in network().parameters())
    assert (answer.parameter_bytes, answer.state_bytes) == (weights, 2 * weights + 4 * 2 * len([*network().parameters()]))
    assert answer.whole
    here = compiled(two_networks()[0])
    peak = here.result.peak_bytes - here.graph.resident_bytes
    assert abs(answer.keep_all_bytes - answer.graph.resident_bytes - peak) <= 0.05 * peak


@pytest.mark.usefixtures("nothing_else")
def test_frozen_weights_of_a_function_stay_on_the_host() -> None:
    net = network().requires_grad_(False)
    head = nn.Linear(1, 1)

    def step_of(head: nn.Linear) -> Callable[..., Any]:
        optimizer = torch.optim.SGD(head.parameters(), 0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = (head(net(x)) - y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    x, y = X[:4], Y[:4]
    expected = [step_of(twin)(x, y) for twin in [copy.deepcopy(head)] for _ in range(1)]
    frozen = sum(p.nbytes for p in net.parameters())
    planned = checkmate.torch.compile(step_of(head), example=(x, y), budget=frozen, host="1GiB", time_limit_s=3)
    assert planned.plan.host is not None and planned.result.peak_bytes <= frozen
    assert torch.equal(planned(x, y), expected[0])


@pytest.mark.slow
def test_a_function_under_inductor() -> None:
    """To rounding, within the bytes of the plan."""
    step, *_ = made(two_networks)
    expected = [step(X, Y) for _ in range(3)]
    step, *_ = made(two_networks)
    planned = checkmate.torch.compile(step, example=(X, Y), budget="70%", compiler="inductor", time_limit_s=3)
    torch.testing.assert_close([planned(X, Y) for _ in range(3)], expected, rtol=1e-4, atol=1e-5)
    assert planned.graph.resident_bytes + measure_peak(lambda: planned(X, Y)) <= planned.result.budget_bytes
