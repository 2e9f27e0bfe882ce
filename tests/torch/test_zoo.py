"""Architectures people use: within the budget, as planned, and the same to the last bit."""

from __future__ import annotations

import pytest

from tests.torch.zoo import ZOO, check

QUICK = ("gpt2",)
"""Those that run every time."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ZOO])
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_keeps_every_promise(name: str) -> None:
    """At 70 % and at the smallest budget: loss, gradients, buffers and random state, the peak and its plan."""
    for point in check(name):
        assert point.differs == []
        assert point.holds
