"""Constants of PyTorch that sizes are counted by, compared with the torch that is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import fx

from checkmate import Value
from checkmate.torch.graph.rng import rng_state_bytes
from checkmate.torch.graph.storages import CUDA_ALIGNMENT_BYTES, SCALAR_TANGENT_BYTES, is_scalar_tangent

HEADER = Path(torch.__path__[0]) / "include" / "c10" / "core" / "AllocatorConfig.h"


@pytest.mark.skipif(not HEADER.exists(), reason="this torch has the constant in another header")
def test_the_alignment_is_that_of_the_torch_at_hand() -> None:
    """Every size on a CUDA device is rounded by it."""
    found = re.search(r"constexpr size_t kMinBlockSize = (\d+);", HEADER.read_text())
    assert found is not None and int(found[1]) == CUDA_ALIGNMENT_BYTES


def test_the_tangent_of_any_scalar_is_one() -> None:
    """No type of torch has larger elements."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert max(dtype.itemsize for dtype in dtypes) == SCALAR_TANGENT_BYTES


def test_the_state_of_the_generator_is_what_is_held() -> None:
    """A recomputed random op holds it from its first to its last computation."""
    node = fx.Graph().placeholder("x")
    node.meta["val"] = torch.ones(2)
    assert rng_state_bytes(node) == torch.get_rng_state().nbytes == 5056


def test_the_loss_is_a_scalar_where_the_allocator_rounds() -> None:
    """On a CUDA device the gradient of a loss takes a block."""
    assert is_scalar_tangent(Value("tangent", CUDA_ALIGNMENT_BYTES, kept=True))
    assert not is_scalar_tangent(Value("tangent", CUDA_ALIGNMENT_BYTES + 1, kept=True))
    assert not is_scalar_tangent(Value("tangent", CUDA_ALIGNMENT_BYTES))
