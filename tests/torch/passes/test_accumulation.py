"""Nodes that add gradients to existing ones are those of the inputs that are named, and allocate nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import fx

from checkmate import Plan, simulate
from checkmate.torch.joint.capture import capture_joint
from checkmate.torch.measure.estimates import estimated_costs
from checkmate.torch.passes.gradients import ACCUMULATE, accumulated_inputs, accumulating


@pytest.fixture(scope="module")
def joint() -> fx.GraphModule:
    """Of a function whose third input has the gradient of its output, and whose fourth has none."""
    found: list[fx.GraphModule] = []

    def keep(module: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        found.append(module)
        return default_partition(module, inputs, **kwargs)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return (x @ w).tanh() @ w + b + c.detach()

    inputs = [torch.ones(16, 16, requires_grad=True) for _ in range(4)]
    boxed = make_boxed_func
    aot_function(function, lambda m, _: boxed(m), lambda m, _: boxed(m), partition_fn=keep)(*inputs)
    return found[0]


@pytest.mark.parametrize("positions", [set[int](), {1}, {0, 1, 2, 3}])
def test_the_inputs_that_are_named_and_have_a_gradient_are_accumulated(joint: fx.GraphModule, positions: set[int]) -> None:
    """Whatever was accumulated before, and the given module is unchanged."""
    before = str(joint.graph)
    for given in (joint, accumulating(joint, 1, {0, 2})):
        module = accumulating(given, 1, positions)
        assert accumulated_inputs(module) == positions - {3}
        outputs = list(module.graph.output_node().args[0])  # type: ignore[arg-type]
        for k, gradient in enumerate(outputs[1:]):
            assert (gradient is not None and gradient.target is ACCUMULATE) == (k in positions - {3})
    assert str(joint.graph) == before
    without = accumulating(accumulating(joint, 1, positions), 1, set())
    assert str(without.graph) == str(accumulating(joint, 1, set()).graph)


def test_a_gradient_that_is_added_is_freed(joint: fx.GraphModule) -> None:
    """The graph holds none of the gradients at its end."""
    left = []
    for positions in (set[int](), {0, 1}):
        graph = capture_joint(accumulating(joint, 1, positions), 1, estimated_costs).graph
        left.append(int(simulate(graph, Plan.from_order(graph, range(len(graph.ops)))).bytes[-1]))
        added = [op for op in graph.ops if op.kind == "checkmate.accumulate"]
        assert len(added) == len(positions)
        assert all(not op.recomputable and op.phase == "backward" for op in added)
    assert left[0] - left[1] == 2 * 16 * 16 * 4
