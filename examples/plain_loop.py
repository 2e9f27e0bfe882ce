"""A plain training loop under a budget: one line compiles the model, and the rest is unchanged."""

from __future__ import annotations

import torch
from torch import nn

from checkmate.torch import measure_peak

BATCHES = 5


class Block(nn.Module):
    """A layer with its own class: `torch.compile` skips calls of modules that `torch.nn` defines if hooks surround them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Classifier(nn.Module):
    """A transformer that returns its loss: the compiled graph includes the loss, and no prediction has to be held."""

    def __init__(self, width: int = 64, layers: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), y)


def batches(count: int = BATCHES) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same batches each time."""
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(32, 64, 64, generator=generator), torch.randint(10, (32,), generator=generator)) for _ in range(count)]


def train(budget: str | None) -> tuple[list[float], int]:
    """Losses, and the peak of the last step above the memory in use when it began."""
    torch.manual_seed(0)
    model = Classifier()
    if budget is not None:
        model.compile(backend="checkmate", options={"budget": budget, "time_limit_s": 1})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, peak = [], 0
    for x, y in batches():

        def step(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
            loss = model(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

        peak = measure_peak(step) if len(losses) == BATCHES - 1 else step()
    return losses, peak or 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    plain, planned = train(None), train("50%")
    print("losses", *[f"{loss:.6f}" for loss in planned[0]])
    print(f"peak   {plain[1] / 2**20:.1f} MiB, within the budget {planned[1] / 2**20:.1f} MiB")
    assert planned[0] == plain[0], "every loss is the same"
    assert planned[1] < 0.7 * plain[1], "and the peak is lower"
