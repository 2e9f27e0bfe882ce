"""Looking for the modules that run keeps nothing alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

import checkmate.torch  # noqa: F401 - registers the backend
from checkmate.torch.compilation.coordinator import COORDINATOR


def step(net: torch.nn.Module, x: torch.Tensor) -> None:
    torch.compile(net, backend="checkmate", options={"budget": "1GiB"})(x).sum().backward()


def test_a_loop_does_not_hold_its_first_batch():
    """Each frame above a compilation was asked for its variables, and kept them until it returned (until Python 3.12)."""
    net = torch.nn.Linear(4, 4)
    x = torch.ones(2, 4)
    first = weakref.ref(x.untyped_storage())
    step(net, x)
    x = torch.zeros(2, 4)
    gc.collect()
    assert first() is None
    assert COORDINATOR.step_bytes


def test_variables_that_a_caller_has_asked_for_stay():
    """`locals` returns the dict that the frame keeps."""
    net, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    mine: dict[str, Any] = locals()
    step(net, x)
    assert mine["x"] is x
    assert mine["net"] is net
