"""What is saved and what is computed again, where the user can find it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import checkmate
from checkmate import OptionError
from checkmate.torch import explain
from tests.torch.networks import Transformer, input_of
from tests.torch.steps import ROOMY, Forgetful


def test_what_torch_compiled_is_refused_with_a_hint() -> None:
    """It has no graph and no plan to show; the hint names what has."""
    model = torch.compile(nn.Linear(2, 2), backend="checkmate", options={"budget": "1MiB"})
    with pytest.raises(OptionError, match="OptimizedModule cannot be explained") as caught:
        explain(model)  # type: ignore[arg-type]
    assert "checkmate.torch.compile(model, loss" in caught.value.hint


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_saved_byte_has_a_module_and_a_line(whole: bool) -> None:
    """Names as in the model; with everything forgotten, less is saved and more is computed again."""
    model, x = Transformer(), input_of("attention", 256)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    kept, forgotten = (
        explain(
            checkmate.torch.compile(model, nn.functional.mse_loss, optimizer, example=(x, x.view(-1, 16, 32)), whole=whole, **o)
        )
        for o in ({}, {"budget": ROOMY, "solver": Forgetful()})
    )
    largest = kept.saved[0]
    assert largest.size_bytes >= kept.saved[-1].size_bytes > 0
    assert any(s.source.startswith("layers.0.self_attn, networks.py:") for s in kept.saved)
    assert not any("cell_contents" in s.source for s in kept.saved)
    assert not kept.remats
    assert sum(s.size_bytes for s in forgotten.saved) < sum(s.size_bytes for s in kept.saved)
    assert sum(r.times for r in forgotten.remats) > 20
    assert "saved for the backward: " in str(forgotten)
    assert kept.tangent_bytes == 0


def test_saved_bytes_of_a_small_network_are_those_one_counts_by_hand() -> None:
    """A GELU reads its input, and the second layer's weight gradient reads what the GELU made."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.ones(32, 8)
    step = checkmate.torch.compile(model, lambda y, _: y.sum(), example=(x, x))
    assert [s.size_bytes for s in explain(step).saved] == [32 * 16 * 4, 32 * 16 * 4]
    assert explain(step.graph, step.plan) == explain(step)
