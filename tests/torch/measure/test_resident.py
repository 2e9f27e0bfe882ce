"""Looking at the tensors of a process keeps nothing alive; memory that is free."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import torch

import checkmate.torch  # noqa: F401 - registers the backend
from checkmate.torch.measure import resident
from checkmate.torch.steps.coordinator import coordinator


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
    assert coordinator().step_bytes


def test_the_cache_of_files_is_no_memory_that_a_container_has_used(tmp_path: Path):
    """The kernel fills it up to the container's limit, and gives it back where a process asks for memory."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("990\n")
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 700\nactive_file 50\n")
    assert resident.left_in_container_bytes(tmp_path) == 710
    (tmp_path / "memory.max").write_text("max\n")
    assert resident.left_in_container_bytes(tmp_path) > resident.free_bytes(torch.device("cpu"))
