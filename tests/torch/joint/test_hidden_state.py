"""Custom ops whose results depend on more than their inputs: found by running them, and computed again where that is right."""

from __future__ import annotations

import itertools
import logging
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from checkmate.torch.joint import hidden_state
from tests.torch.steps import ROOMY, Forgetful, compiled, observe, recomputes

COUNT: Counter[str] = Counter()
NUMBERS = itertools.count(1)


def custom(name: str, compute: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A custom op of one tensor, whose gradient is that of its result."""

    def run(x: torch.Tensor) -> torch.Tensor:
        COUNT[name] += 1
        return compute(x)

    op = torch.library.custom_op(f"checkmate_hidden::{name}", run, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, gradient: gradient.clone())
    return op


def scratch(x: torch.Tensor) -> torch.Tensor:
    """A result of which half is never written, as attention returns a state that is used with dropout only."""
    made = torch.empty_like(x)
    made[: len(x) // 2] = x[: len(x) // 2]
    return made


def failing(x: torch.Tensor) -> torch.Tensor:
    """An op that refuses the numbers that it is measured with."""
    if bool((x > 0).all()):
        raise RuntimeError("only negative numbers")
    return x.clone()


NOISY = custom("noisy", lambda x: x + torch.rand_like(x))
PLAIN = custom("plain", lambda x: x.sin())
COUNTING = custom("counting", lambda x: x * next(NUMBERS))
PYTHON = custom("python", lambda x: x + random.random())
SCRATCH = custom("scratch", scratch)
FAILING = custom("failing", failing)


class Net(nn.Module):
    """Four layers, each behind an op."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(self.op(x)).sin())
            x = nn.functional.dropout(x, 0.1)
        return x.square().mean()


@pytest.fixture(autouse=True)
def unknown() -> None:
    """As in a new process."""
    hidden_state._KNOWN.clear()


def graph_of(op: Any, **options: Any) -> checkmate.Graph:
    return checkmate.torch.capture(
        nn.Linear(8, 8), lambda p, y: op(p).mean() * y, example=(torch.ones(4, 8), torch.ones(())), **options
    )


def op_of(graph: checkmate.Graph) -> Any:
    return next(op for op in graph.ops if "checkmate_hidden" in op.kind)


def test_hidden_random_numbers_are_replayed() -> None:
    """Attention with dropout is such an op: computed again with other numbers it gives wrong gradients, and nothing is said."""
    torch.manual_seed(0)
    model, x = Net(NOISY), torch.randn(32, 16)
    eager = observe(model, lambda: model(x))
    run, planned = compiled(lambda: model(x), budget=ROOMY, solver=Forgetful())
    assert not observe(model, run).differs(eager)
    assert recomputes(planned)
    ops = [op for op in planned[-1][0].graph.ops if "noisy" in op.kind]
    assert len(ops) == len(model.layers)
    assert all(op.recomputable and op.replay_bytes for op in ops)


@pytest.mark.slow
def test_hidden_random_numbers_are_replayed_in_compiled_code() -> None:
    """Inductor sees the same graph."""
    torch.manual_seed(0)
    model, x = Net(NOISY), torch.randn(2048, 16)
    found = []
    for budget in ("100%", "40%"):
        torch._dynamo.reset()
        run, planned = compiled(lambda: model(x), budget=budget, compiler="inductor", inductor_options={"fallback_random": True})
        found.append(observe(model, run))
    assert not found[0].differs(found[1])
    assert recomputes(planned)


def test_hidden_random_numbers_are_replayed_in_a_whole_step() -> None:
    """Its graph is traced in another way."""

    def losses(budget: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = Net(NOISY), torch.randn(512, 16)
        step = checkmate.torch.compile(
            model, None, torch.optim.SGD(model.parameters(), 0.1), example=(x,), budget=budget, time_limit_s=1
        )
        torch.manual_seed(1)
        found = [step(x)[1].clone() for _ in range(2)]
        return [*found, *(p.detach().clone() for p in model.parameters()), torch.get_rng_state()]

    assert all(map(torch.equal, losses("100%"), losses("55%")))


@pytest.mark.parametrize(("op", "name"), [(COUNTING, "counting"), (PYTHON, "python")])
def test_an_op_with_a_state_of_its_own_runs_once(op: Any, name: str) -> None:
    """A counter, or a generator that PyTorch does not know, cannot be replayed."""
    model, x = Net(op), torch.randn(32, 16)
    run, planned = compiled(lambda: model(x), budget=ROOMY, solver=Forgetful())
    run().backward()
    COUNT.clear()
    run().backward()
    assert recomputes(planned)
    assert COUNT[name] == len(model.layers)


@pytest.mark.parametrize("op", [PLAIN, SCRATCH])
def test_an_op_that_repeats_its_results_may_be_computed_again(op: Any) -> None:
    """Memory that an op never writes is no state: its content is nothing that anyone reads."""
    assert op_of(graph_of(op)).recomputable


def test_an_op_that_does_not_run_alone_runs_once(caplog: pytest.LogCaptureFixture) -> None:
    """What nothing is known of is not relied upon, and that is said."""
    with caplog.at_level(logging.WARNING, "checkmate.torch"):
        assert not op_of(graph_of(FAILING)).recomputable
    assert "never computed again" in caplog.text


def test_where_nothing_may_run_custom_ops_run_once() -> None:
    """Estimated costs promise that nothing runs."""
    COUNT.clear()
    assert not op_of(graph_of(PLAIN, costs="estimated")).recomputable
    assert not COUNT


def test_each_op_is_tried_once_in_a_process() -> None:
    """Costs are stored and what an op is like is not: code of the same name may be other code in the next process."""
    graph_of(PLAIN)
    COUNT.clear()
    graph_of(PLAIN)
    assert not COUNT
    hidden_state._KNOWN.clear()
    graph_of(PLAIN)
    assert COUNT["plain"] == 2


def test_looking_changes_no_setting_and_no_generator() -> None:
    """The op runs while the user's function is compiled."""
    states = []
    for op in (PLAIN, NOISY):
        torch.manual_seed(5)
        graph_of(op)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
