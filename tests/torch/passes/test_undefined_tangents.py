"""Gradients of outputs that the loss does not use are neither computed nor stored, and the others keep their bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import fx

from checkmate import Plan, simulate
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch.joint.capture import capture_joint
from checkmate.torch.measure.estimates import estimated_costs
from checkmate.torch.passes.gradients import without_tangents

Function = Callable[..., tuple[torch.Tensor, torch.Tensor]]
FUNCTIONS: dict[str, Function] = {}
"""Functions of a batch and three weights with two results, by name."""


def function(fn: Function) -> Function:
    FUNCTIONS[fn.__name__] = fn
    return fn


@function
def residual(x: torch.Tensor, u: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = torch.relu(x @ u) + x
    return h @ v, (h.sin() @ w).exp()


@function
def cat(x: torch.Tensor, u: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x @ u
    return torch.cat([h.tanh(), x @ v], 1).exp(), F.gelu(h) @ w


@function
def transposed_sum(x: torch.Tensor, u: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = x @ u
    return (h.t() * v[:, :1]).exp(), h.sin() @ w


@function
def one_op_of_two_results(
    x: torch.Tensor, u: torch.Tensor, v: torch.Tensor, w: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The backward of the split is a concatenation of a gradient and zeros."""
    first, second = (x @ u).split(16, 1)
    return first.exp() @ v[:16], second.sin() @ w[16:]


@dataclass(frozen=True, slots=True)
class Traced:
    """A joint module of a function, with its arguments."""

    joint: fx.GraphModule
    arguments: list[torch.Tensor]

    def without(self, undefined: int) -> fx.GraphModule:
        return without_tangents(self.joint, {undefined})

    def peak_bytes(self, module: fx.GraphModule) -> int:
        graph = capture_joint(module, 2, estimated_costs).graph
        return simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).peak_bytes


def traced(name: str) -> Traced:
    torch.manual_seed(0)
    arguments = [torch.randn(8, 32), *(torch.randn(32, 32).requires_grad_() for _ in range(3))]
    found: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Any, **rest: Any) -> Any:
        found.append(joint)
        return default_partition(joint, inputs, **rest)

    aot_function(FUNCTIONS[name], fw_compiler=lambda module, _: make_boxed_func(module), partition_fn=partition)(*arguments)
    return Traced(found[0], arguments)


CASES = [(name, undefined) for name in FUNCTIONS for undefined in (0, 1)]


@pytest.mark.parametrize(("name", "undefined"), CASES)
def test_defined_gradients_keep_their_bits(name: str, undefined: int) -> None:
    """They are those that autograd computes of the other output alone; that of a weight that it does not read is None."""
    step = traced(name)
    results = FUNCTIONS[name](*step.arguments)
    tangents = [torch.randn_like(r) for r in results]
    weights = step.arguments[1:]
    expected = torch.autograd.grad(results[1 - undefined], weights, tangents[1 - undefined], allow_unused=True)
    tangents[undefined].fill_(torch.nan)  # it is not read
    results_again = step.without(undefined)(*step.arguments, *tangents)
    outputs, gradients = results_again[:2], results_again[2:]
    assert all(torch.equal(a, b) for a, b in zip(outputs, results, strict=True))
    assert gradients[0] is None
    for mine, theirs in zip(gradients[1:], expected, strict=True):
        assert (mine is None) == (theirs is None)
        assert mine is None or torch.equal(mine, theirs)


@pytest.mark.parametrize(("name", "undefined"), CASES)
def test_nothing_is_left_that_only_undefined_gradients_feed(name: str, undefined: int) -> None:
    """What reads tangents reads the defined one, and what only the undefined gradient needed is no op of the captured graph."""
    module = traced(name).without(undefined)
    tangents = [n for n in module.graph.nodes if is_tangent(n)]
    assert not tangents[undefined].users
    assert tangents[1 - undefined].users
    graph = capture_joint(module, 2, estimated_costs).graph
    read = {v for op in graph.ops for v in op.inputs}
    assert all(graph.values[v].kept or v in read for op in graph.ops if len(op.outputs) == 1 for v in op.outputs)


@pytest.mark.parametrize(("name", "undefined"), CASES)
def test_it_takes_less_memory(name: str, undefined: int) -> None:
    """Neither the gradient nor what is computed from it alone is stored, and its tangent is no value."""
    step = traced(name)
    module = step.without(undefined)
    sizes = [sum(v.size_bytes for v in capture_joint(m, 2, estimated_costs).graph.values) for m in (step.joint, module)]
    assert sizes[1] < sizes[0]
    assert step.peak_bytes(module) <= step.peak_bytes(step.joint)


def test_the_joint_module_is_not_changed() -> None:
    """Another step may define the gradient."""
    step = traced("residual")
    before = str(step.joint.graph)
    step.without(0)
    assert str(step.joint.graph) == before


def test_without_any_gradient_there_is_none() -> None:
    """Every gradient is None."""
    step = traced("residual")
    results = without_tangents(step.joint, {0, 1})(*step.arguments, None, None)
    assert list(results[2:]) == [None] * 4
