"""Shows that the PyTorch front end works with its extra alone; run as `python -I .ci/smoke_torch.py`."""

from __future__ import annotations

import torch
from torch import nn

import checkmate.torch


def main() -> None:
    """A step within 65 % of the memory has the loss and the gradients of the step that keeps everything, to the bit."""
    x, found = torch.ones(256, 32), []
    for budget in (None, "65%"):
        torch.manual_seed(0)
        model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU())])
        step = checkmate.torch.compile(
            model, nn.functional.mse_loss, example=(x, x), budget=budget, costs="estimated", time_limit_s=10
        )
        _, loss = step(x, x)
        peak = step.graph.resident_bytes + checkmate.torch.measure_peak(lambda step=step: step(x, x))
        found.append((peak, [loss, *(p.grad for p in model.parameters())]))
    (whole, expected), (less, given) = found
    assert less < whole, found
    assert all(map(torch.equal, expected, given))
    print(f"checkmate.torch works with PyTorch {torch.__version__}: {whole} bytes, planned {less}")


if __name__ == "__main__":
    main()
