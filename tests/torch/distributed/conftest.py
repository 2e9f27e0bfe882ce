"""Ranks that share a store."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from checkmate.torch.distributed.consensus import Ranks


@pytest.fixture
def store() -> dist.Store:
    """The store at which the ranks meet."""
    return dist.HashStore()


@pytest.fixture
def job(store: dist.Store) -> Callable[..., list[Ranks]]:
    """Ranks that meet at one store."""
    return lambda count, **options: [Ranks(rank, count, lambda: store, **options) for rank in range(count)]
