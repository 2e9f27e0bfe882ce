"""Ranks that share a store."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from checkmate.torch.distributed import consensus as ranks_module
from checkmate.torch.distributed.consensus import Ranks


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Ranks]]:
    """Ranks that meet at one store."""
    store = dist.HashStore()
    monkeypatch.setattr(ranks_module, "job_store", lambda: store)
    return lambda count: [Ranks(rank, count) for rank in range(count)]
