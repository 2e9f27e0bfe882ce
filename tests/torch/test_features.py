"""Every feature of a training step gives the same bits when all that can be computed again is."""

from __future__ import annotations

import pytest
import torch

from tests.torch.features import FEATURES, OPEN
from tests.torch.networks import input_of
from tests.torch.steps import ROOMY, Forgetful, compiled, observe, recomputes

# Dynamo asks a tensor between two graphs for its gradient, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


QUICK = (
    "random_permutation", "odd_dropouts", "batch_norm_cumulative", "mutated_buffers", "tied_embedding", "none_gradients",
    "channels_last", "custom_op_that_mutates", "selective_checkpoint", "random_inside_a_higher_order_op", "overlapping_views",
)  # fmt: skip
"""One of each kind, which run every time."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FEATURES])
def test_recomputing_everything_equals_keeping_everything(name: str) -> None:
    """The reference is the same backend keeping everything: loss, gradients, buffers and random state."""
    torch.manual_seed(0)
    model, forward = FEATURES[name]()
    x = input_of("dropout")

    def loss() -> torch.Tensor:
        return forward(x).square().mean()

    fullgraph = name not in OPEN
    reference = observe(model, compiled(loss, fullgraph=fullgraph)[0])
    torch._dynamo.reset()
    run, planned = compiled(loss, fullgraph=fullgraph, budget=ROOMY, solver=Forgetful())
    assert reference.differs(observe(model, run)) == []
    assert sum(recomputes([each]) for each in planned) > 5
