"""Ranks that share a store."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from checkmate.torch.distributed import consensus as ranks_module
from checkmate.torch.distributed.consensus import Ranks


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Ranks]]:
    """Ranks that meet at one store."""
    store = dist.HashStore()
    monkeypatch.setattr(ranks_module, "job_store", lambda: store)
    return lambda count, **options: [Ranks(rank, count, **options) for rank in range(count)]
