"""Memory of a step is split where the backward begins, and is the account of `simulate` on both sides."""

from __future__ import annotations

import pytest

from checkmate import Graph, Op, Plan, Value, simulate
from checkmate.core.graph import BOUNDARY
from checkmate.frontend.step_memory import StepMemory

RESIDENT = 1000


@pytest.fixture
def graph() -> Graph:
    """Two layers, a loss, the boundary, and their backward, which reads both activations and leaves two gradients."""
    ops = (
        Op("layer1", (), (0,), cost=1, workspace_bytes=64),
        Op("layer2", (0,), (1,), cost=1),
        Op("loss", (1,), (2,), cost=1, phase="loss"),
        Op("start", (2,), (3,), cost=0, recomputable=False, phase="backward", kind=BOUNDARY),
        Op("backward2", (3, 1), (4, 5), cost=1, phase="backward"),
        Op("backward1", (4, 0), (6,), cost=1, phase="backward"),
    )
    sizes = [("h1", 32), ("h2", 16), ("loss", 4), ("tangent", 4), ("g1", 32), ("w2.grad", 8), ("w1.grad", 24)]
    kept = {"loss", "w2.grad", "w1.grad"}
    return Graph(ops, tuple(Value(name, size, kept=name in kept) for name, size in sizes), resident_bytes=RESIDENT)


def test_memory_is_split_at_the_boundary(graph: Graph) -> None:
    """Worked by hand, above the resident bytes."""
    memory = StepMemory.of(graph, Plan.from_order(graph, range(6)))
    assert memory.forward_peak_bytes == 32 + 64  # the first layer with its workspace
    assert memory.saved_bytes == 32 + 16 + 4  # activations and loss; the tangent comes with the backward
    assert memory.backward_peak_bytes == 32 + 4 + 32 + 8 + 24  # the first layer's backward: h1, loss, g1 and both gradients
    assert memory.gradient_bytes == 8 + 24
    assert memory.peak_bytes == 100


def test_recomputing_moves_memory_across_the_boundary(graph: Graph) -> None:
    """An activation that is computed again in the backward is not saved by the forward."""
    plan = Plan.from_order(graph, [0, 1, 2, 3, 0, 1, 4, 5])
    memory = StepMemory.of(graph, plan)
    assert memory.saved_bytes == 4
    assert RESIDENT + memory.peak_bytes == simulate(graph, plan).peak_bytes


@pytest.mark.parametrize(("transient", "left"), [(0, 32), (8, 24), (100, 0)])
def test_transient_gradients_are_not_left(graph: Graph, transient: int, left: int) -> None:
    """Gradients that are sharded while the backward runs are gone when it is over."""
    assert StepMemory.of(graph, Plan.from_order(graph, range(6)), transient).gradient_bytes == left


def test_the_graph_of_a_whole_step_has_no_such_split() -> None:
    """The error names the graph."""
    whole = Graph.from_dag(cost=[1], size_bytes=[4], edges=[], kept=[0], name="whole")
    with pytest.raises(ValueError, match="'whole' has no boundary"):
        StepMemory.of(whole, Plan.from_order(whole, [0]))
