"""State that a test of compiled steps begins with: nothing in flight, and no memory held."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from checkmate.torch.steps.coordinator import coordinator


@pytest.fixture
def nothing_in_flight() -> None:
    gc.collect()  # what an error of the test before still holds
    assert coordinator().held_bytes() == 0


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    coordinator().forget_steps()
    yield
    gc.collect()
    assert coordinator().held_bytes() == 0
