"""Train on scikit-learn's digits within half the memory that keeping all activations needs.

Needs `pip install "checkmate-remat[demo]"`. Run it with `python examples/digits.py`; plan its graph with
`checkmate capture examples/digits.py:build`.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import checkmate.torch

BATCH = 256


def load() -> tuple[Tensor, Tensor]:
    pixels, classes = load_digits(return_X_y=True)
    return torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(classes)


def build() -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor]]:
    """The model, its loss and one example of (input, target)."""
    torch.manual_seed(0)
    width, layers = 32, []
    for inputs in (1, width, width, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1)]
    x, y = load()
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * width, 10))
    return model, nn.CrossEntropyLoss(), (x[:BATCH], y[:BATCH])


def main() -> None:
    model, loss, example = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = checkmate.torch.compile(model, loss, optimizer, example=example, budget="50%")
    print(f"planned peak {checkmate.format_bytes(step.result.peak_bytes)}, {step.result.overhead:.3f}x the cost")
    x, y = load()
    for epoch in range(5):
        for start in range(0, len(y) - BATCH + 1, BATCH):
            _, value = step(x[start : start + BATCH], y[start : start + BATCH])
        print(f"epoch {epoch + 1}: loss {float(value):.3f}")


if __name__ == "__main__":
    main()
