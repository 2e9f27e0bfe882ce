"""What tensors of the process a look at a CPU finds."""

from __future__ import annotations

import torch

from checkmate.torch.measure.device_memory import device_memory

CPU = torch.device("cpu")


def test_a_gradient_that_python_has_not_read_counts() -> None:
    """C++ alone holds it: the gradients of another model, which Python had not asked for, were found in some steps only."""
    weight = torch.ones(1 << 16, requires_grad=True)
    before = device_memory(CPU).total_bytes
    weight.sum().backward()
    assert device_memory(CPU).total_bytes - before == weight.nbytes
