"""What tensors of the process a look at a CPU finds."""

from __future__ import annotations

import pytest
import torch

from checkmate.torch.measure import device_memory as measuring
from checkmate.torch.measure.device_memory import LookDue, device_memory

CPU = torch.device("cpu")


def test_a_gradient_that_python_has_not_read_counts() -> None:
    """C++ alone holds it: the gradients of another model, which Python had not asked for, were found in some steps only."""
    weight = torch.ones(1 << 16, requires_grad=True)
    before = device_memory(CPU).total_bytes
    weight.sum().backward()
    assert device_memory(CPU).total_bytes - before == weight.nbytes


def test_the_count_of_memory_is_read_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process that has compiled much it takes half a millisecond; what grows is found three steps later at most."""
    reads = list[int]()
    monkeypatch.setattr(measuring, "allocated_bytes", lambda: reads.append(look.steps) or 10**6 * (look.steps > 30))
    look, due = LookDue(), list[int]()
    for _ in range(40):
        if look:
            due.append(look.steps)
            look.looked(0)
    assert due == [1, 2, 32]
    assert sorted({*reads}) == [*range(1, 9), *range(12, 41, 4)]
