"""What the PyTorch tests share: one thread, a clean Dynamo, and no import of what no test of the run needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.guards

from checkmate.torch._compat.dispatch import top_mode
from checkmate.torch.steps.coordinator import Coordinator, coordinator
from checkmate.torch.steps.known_steps import KnownSteps

# Dynamo measures the latency of every new guard once, for its log, and empties the caches of the processor before: 0.03 s.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """All tests of PyTorch's op database are slow, and to list its ops takes 3 s in every process."""
    if collection_path.name == "test_op_database.py" and config.getoption("markexpr") == "not slow":
        return True
    return None


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process seems to hold what a step is given and nothing else: budgets in bytes are then those of its graph alone."""
    monkeypatch.setattr(Coordinator, "outside_bytes", lambda *_: 0)
    monkeypatch.setattr(KnownSteps, "_look", lambda *_: None)


@pytest.fixture
def seeming_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let functions of `torch.cuda` be those of a test, where there is no GPU."""

    def seem(**functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)

    return seem


@pytest.fixture
def seeming_pins(seeming_gpu: Callable[..., None]) -> dict[int, int]:
    """Bytes of each piece of memory that is pinned, by its address, where there is no GPU."""
    pinned: dict[int, int] = {}
    cudart = SimpleNamespace(
        cudaHostRegister=lambda where, size, flags: pinned.update({where: size}) or "success",
        cudaHostUnregister=pinned.pop,
    )
    seeming_gpu(cudart=lambda: cudart, check_error=lambda status: None)
    return pinned


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
    coordinator().forget_steps()
    assert top_mode() is None, "a watch of eager code was left on"
