"""Architectures people use: within the budget, as planned, and the same to the last bit."""

from __future__ import annotations

import pytest

import checkmate.torch
from tests.torch.zoo import ZOO, check

pytestmark = pytest.mark.usefixtures("nothing_else")

QUICK = ("gpt2",)
"""Those that run every time."""

BREAK = {
    "segformer": "output_capturing",  # transformers takes a lock in the forward
    "wav2vec2": "requires_grad",  # sets `requires_grad` in the forward
    "hubert": "requires_grad",
}
"""Those whose forward Dynamo cannot trace as one graph, and what its reason names."""


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in ZOO if n not in BREAK])
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_keeps_every_promise(name: str) -> None:
    """At 70 % and at the smallest budget: loss, gradients, buffers and random state, the peak and its plan."""
    for point in check(name, time_limit_s=0.7 if name in QUICK else 5.0):
        assert point.differs == []
        assert point.holds


@pytest.mark.slow
@pytest.mark.parametrize("name", BREAK)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_one_graph_is_refused_with_the_reason(name: str) -> None:
    """`torch.compile` plans their parts; `checkmate.torch.compile` says where they break."""
    with pytest.raises(checkmate.torch.GraphBreakError, match=BREAK[name]) as refused:
        check(name)
    assert "backend='checkmate'" in str(refused.value)
