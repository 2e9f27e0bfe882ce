"""A budget that a refusal names works at the first try; `hints.py` follows more of them."""

from __future__ import annotations

import pytest

from tests.torch.hints import follow

# Dynamo asks a tensor between two graphs for its gradient, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.slow), 52])
def test_a_hint_is_followed_once(seed: int) -> None:
    """The second network has a step whose smallest plan is below the floor of one of its graphs, were its outputs held."""
    assert len(follow(seed)["hints"]) == 1
