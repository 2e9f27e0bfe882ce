"""What the PyTorch tests share: one thread, and a clean Dynamo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from checkmate.torch.compilation.coordinator import COORDINATOR


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch._dynamo.reset()
    COORDINATOR.forget_splits()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
