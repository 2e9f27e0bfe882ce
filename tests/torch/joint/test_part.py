"""A captured graph says which of its values belong to which argument and result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from functorch.compile import aot_function, default_partition, make_boxed_func
from torch import fx

from checkmate.torch.joint.capture import Capture, capture_joint, captured_graph
from checkmate.torch.measure.estimates import estimated_costs
from checkmate.torch.passes.gradients import without_tangents


@pytest.fixture(scope="module")
def joint() -> fx.GraphModule:
    """The joint module of a layer with a transposed weight; its input is an argument, and a weight that nothing reads."""

    def layer(x: torch.Tensor, w: torch.Tensor, unused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = (x @ w.t()).sin()
        return h.sum(), h.exp()

    found: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Any, **rest: Any) -> Any:
        found.append(joint)
        return default_partition(joint, inputs, **rest)

    arguments = [torch.randn(4, 8), torch.randn(8, 8, requires_grad=True), torch.randn(3, requires_grad=True)]
    aot_function(layer, fw_compiler=lambda module, _: make_boxed_func(module), partition_fn=partition)(*arguments)
    return found[0]


@pytest.fixture(scope="module")
def capture(joint: fx.GraphModule) -> Capture:
    return capture_joint(joint, 2, estimated_costs)


def kinds(capture: Capture, ops: tuple[int, ...]) -> list[str]:
    return [capture.graph.ops[o].kind for o in ops]


def test_readers_of_an_input_read_it_directly(capture: Capture) -> None:
    """The forward and the backward of the product read the batch; the weight is read through its transpose alone."""
    part = captured_graph(capture)
    batch, weight, unused = part.readers
    assert kinds(capture, batch)[0] == "aten.mm.default"
    assert kinds(capture, weight) == ["aten.t.default"]
    assert unused == ()


def test_views_of_an_input_are_values_without_bytes(capture: Capture) -> None:
    """Their storage is the input's; in a step another graph may have made it."""
    part = captured_graph(capture)
    assert set(part.views.values()) <= {0, 1}
    assert 1 in part.views.values()
    for v in part.views:
        assert capture.graph.values[v].size_bytes == 0
        assert capture.graph.values[v].base is None


def test_results_and_gradients_are_the_values_of_the_boundary(capture: Capture) -> None:
    """The boundary reads what the forward returns and writes the gradients of it."""
    part = captured_graph(capture)
    start = capture.graph.ops[part.boundary]
    assert set(part.returned) == set(start.inputs)
    assert part.tangents == start.outputs
    gradients = [v for v in part.gradients if v is not None]
    assert part.gradients[0] is None
    assert all(capture.graph.values[v].kept for v in gradients)
    assert all(capture.graph.producer[v] > part.boundary for v in gradients)


def test_an_undefined_gradient_has_no_value(joint: fx.GraphModule) -> None:
    """Nothing is allocated for it."""
    part = captured_graph(capture_joint(without_tangents(joint, {1}), 2, estimated_costs))
    assert part.tangents[0] is not None
    assert part.tangents[1] is None
