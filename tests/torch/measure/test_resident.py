"""Looking at the tensors of a process keeps nothing alive."""

from __future__ import annotations

import gc
import weakref

import torch

import checkmate.torch  # noqa: F401 - registers the backend
from checkmate.torch.compilation.coordinator import COORDINATOR


def step(net: torch.nn.Module, x: torch.Tensor) -> None:
    torch.compile(net, backend="checkmate", options={"budget": "1GiB"})(x).sum().backward()


def test_a_loop_does_not_hold_its_first_batch():
    """What a look at the process finds is not kept."""
    net = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4)
    first = weakref.ref(x.untyped_storage())
    step(net, x)
    x = torch.zeros(2, 4)
    gc.collect()
    assert first() is None
    assert COORDINATOR.step_bytes
