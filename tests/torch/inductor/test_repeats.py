"""Layers that are equal op for op are compiled once, and nothing else changes: no bit, no byte."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from checkmate.torch._compat.inductor import DONATED
from checkmate.torch.inductor import generate as inductor_compile
from checkmate.torch.inductor.repeats import outline_repeats, takes_subgraphs
from tests.torch.inductor.conftest import inductor_settings
from tests.torch.inductor.test_compile import given_room, peak_of, planned_loss
from tests.torch.networks import Transformer
from tests.torch.steps import observe, recomputes

LAYERS = 4


def deep_transformer() -> tuple[nn.Module, torch.Tensor]:
    """Layers of attention with dropout, and a batch."""
    torch.manual_seed(0)
    return Transformer(layers=LAYERS), torch.randn(8, 512)


def residual_blocks(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Blocks that are equal, the first and the last of which are read elsewhere as well."""
    first = None
    for w in weights:
        y = torch.relu(x @ w) * torch.sigmoid(x).sum(0, keepdim=True)
        for function in (torch.tanh, torch.cos, torch.sin, torch.exp, torch.atan, torch.abs, torch.log1p, torch.erf):
            y = function(y).t()
        x = torch.tanh((x - y) @ w)
        first = x if first is None else first
    return torch.sin(x * first)


def traced(function: Any, *inputs: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def calls(module: fx.GraphModule) -> list[fx.Node]:
    """The calls of subgraphs, in order."""
    return [n for n in module.graph.nodes if str(n.target) == "invoke_subgraph"]


def donated_to(module: fx.GraphModule, call: fx.Node) -> list[fx.Node]:
    """The arguments that a call may overwrite."""
    subgraph = getattr(module, str(call.args[0].target))  # type: ignore[union-attr]
    return [call.args[2:][i] for i in subgraph.meta[DONATED]]  # type: ignore[misc]


def test_equal_blocks_are_calls_of_a_few_subgraphs() -> None:
    inputs = [torch.randn(16, 16) for _ in range(17)]
    module = traced(residual_blocks, *inputs)
    outlined = outline_repeats(module)
    compiled = sum(len(m.graph.nodes) for m in outlined.modules() if isinstance(m, fx.GraphModule))
    assert compiled < len(module.graph.nodes) / 2
    assert torch.equal(outlined(*inputs), module(*inputs))


def test_a_graph_without_repeats_stays_as_it_is() -> None:
    inputs = [torch.randn(16, 16) for _ in range(2)]
    module = traced(residual_blocks, *inputs)
    assert outline_repeats(module) is module


def test_ops_with_effects_stay_where_they_are() -> None:
    """An input that is overwritten between equal blocks."""

    def step(x: torch.Tensor, count: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        for at in range(0, len(weights), 4):
            x = residual_blocks(x, *weights[at : at + 4])
            count.add_(1)
        return x

    inputs = [torch.randn(16, 16), torch.zeros(()), *(torch.randn(16, 16) / 16 for _ in range(32))]
    module = traced(step, *inputs)
    outlined = outline_repeats(module)
    assert calls(outlined)
    assert [str(n.target) for n in outlined.graph.nodes].count("aten.add_.Tensor") == 8
    expected, counted = module(inputs[0], torch.zeros(()), *inputs[2:]), torch.zeros(())
    assert torch.equal(outlined(inputs[0], counted, *inputs[2:]), expected)
    assert counted == 8


def test_only_tensors_that_no_one_reads_later_are_donated() -> None:
    """Weights are inputs of the graph, and the first block's result is read at the end."""
    module = traced(residual_blocks, *[torch.randn(16, 16) for _ in range(17)])
    outlined = outline_repeats(module)
    nodes = list(outlined.graph.nodes)
    for call in calls(outlined):
        for given in donated_to(outlined, call):
            assert given.op != "placeholder"
            assert all(nodes.index(user) <= nodes.index(call) for user in given.users)


def test_two_inputs_of_one_storage_are_not_donated() -> None:
    """A saved tensor and its transpose are two inputs of a backward."""

    def step(x: torch.Tensor, *saved: torch.Tensor) -> torch.Tensor:
        for one, other in zip(saved[::2], saved[1::2], strict=True):
            y = torch.relu(one) @ other
            for function in (torch.tanh, torch.cos, torch.sin, torch.exp, torch.atan, torch.abs, torch.log1p, torch.erf):
                y = function(y).t()
            x = (x - y) @ other + one * other
        return x

    module = traced(step, *[torch.randn(16, 16) for _ in range(17)])
    _, *given = (n for n in module.graph.nodes if n.op == "placeholder")
    for one, other in zip(given[::2], given[1::2], strict=True):
        other.meta["val"] = one.meta["val"].t().t()
    outlined = outline_repeats(module, frozenset(range(1, 17)))
    nodes = list(outlined.graph.nodes)
    inputs = [n for n in nodes if n.op == "placeholder"][1:]
    twins = {a.name: b for a, b in zip(inputs, [inputs[i ^ 1] for i in range(16)], strict=True)}
    assert calls(outlined)
    for call in calls(outlined):
        for twin in (twins[n.name] for n in donated_to(outlined, call) if n.name in twins):
            assert all(nodes.index(user) < nodes.index(call) for user in twin.users)


def test_equal_layers_are_compiled_once() -> None:
    model, x = deep_transformer()
    run, _ = planned_loss(model, x, None)
    with inductor_settings(fx_graph_cache=False):
        code = "\n".join(run_and_get_code(lambda: run().backward())[1])
    defined = set(re.findall(r"def (repeated_\d+)\(args\)", code))
    called = re.findall(r"= (repeated_\d+)\(", code)
    assert defined
    assert len(called) >= 2 * (LAYERS - 2)
    bodies = re.findall(r"def repeated_\d+\(args\):\n(?:    .*\n|\n)+", code)
    assert bodies
    checked = re.compile(r"assert_size_stride\((?:repeated_\d+_)?primals_|'input'\)")
    assert not any(map(checked.search, bodies))  # the caller has checked what it was given itself
    assert checked.search(code)


@pytest.mark.parametrize("share", [pytest.param(s, marks=pytest.mark.slow) for s in (None, 0.7, 0.65)])
def test_no_bit_and_no_byte_depends_on_it(share: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = deep_transformer()
    run, planned = planned_loss(model, x, None)
    expected, peak, light = observe(model, run), peak_of(run, model), recomputes(planned)
    budget = None if share is None else given_room(planned, share * peak)
    run, planned = planned_loss(model, x, budget)
    outlined = observe(model, run), peak_of(run, model)
    order = planned[-1][1].plan
    assert (recomputes(planned) > light) == (share is not None)
    monkeypatch.setattr(inductor_compile, "outline_repeats", lambda module, donated: module)
    run, planned = planned_loss(model, x, None, plan=order)
    assert expected.differs(outlined[0]) == []
    assert expected.differs(observe(model, run)) == []
    assert peak_of(run, model) == outlined[1]


def test_max_autotune_sees_one_graph() -> None:
    """Its templates fuse ops before a matrix product, which a subgraph would keep apart."""
    assert takes_subgraphs()
    with inductor_settings(torch._inductor.list_mode_options("max-autotune-no-cudagraphs")):
        assert not takes_subgraphs()
