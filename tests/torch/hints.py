"""Whether the budget that a refusal names is kept at the first try, for random networks.

python -m tests.torch.hints FIRST LAST
"""

from __future__ import annotations

import json
import random
import re
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from checkmate import InfeasibleBudgetError, PlanNotFoundError
from checkmate.torch.steps.coordinator import coordinator

TRIES = 3


class Network(nn.Module):
    """Residual blocks of random sizes; the loss inside or outside, and a graph break in some."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.width = rng.choice((16, 33, 64))
        self.blocks = nn.ModuleList(self._block(rng) for _ in range(rng.randint(1, 5)))
        self.head = nn.Linear(self.width, rng.choice((4, 100, 700)))
        self.inside = rng.random() < 0.5
        self.broken = rng.random() < 0.3

    def _block(self, rng: random.Random) -> nn.Module:
        hidden = rng.choice((self.width, 4 * self.width))
        layers = nn.LayerNorm(self.width), nn.Linear(self.width, hidden), nn.GELU(), nn.Linear(hidden, self.width)
        return nn.Sequential(*layers, nn.Dropout(rng.choice((0.0, 0.1))))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if self.broken:
            torch._dynamo.graph_break()
        for block in self.blocks[1:]:
            x = x + block(x)
        z = self.head(x)
        return F.cross_entropy(z, y) if self.inside else z


def train(network: Network, x: torch.Tensor, y: torch.Tensor, budget: str) -> int:
    """Three steps within a budget; returns the planned peak of the last."""
    torch._dynamo.reset()
    coordinator().forget_steps()
    run = torch.compile(network, backend="checkmate", options={"budget": budget, "time_limit_s": 1.0})
    for _ in range(3):
        network.zero_grad()
        z = run(x, y)
        (z if network.inside else F.cross_entropy(z, y)).backward()
    assert coordinator().result is not None
    return coordinator().result.peak_bytes


def follow(seed: int) -> dict[str, Any]:
    """Ask for a budget that may be too small, and then for that which each refusal names."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    network = Network(rng)
    x = torch.randn(rng.choice((32, 257, 1024)), network.width)
    y = torch.randint(4, (len(x),))
    keep_all = train(network, x, y, "100%")
    budget = rng.choice((f"{int(keep_all * rng.uniform(0.1, 0.7))}B", f"{rng.randint(1, 40)}%"))
    hints: list[str] = []
    for _ in range(TRIES):
        try:
            train(network, x, y, budget)
        except (InfeasibleBudgetError, PlanNotFoundError) as error:
            found = re.search(r'raise the budget to at least (\S+?)(?:,| \()|a budget of "(100%)"', error.hint)
            budget = "no budget is named" if found is None else found[1] or found[2]
            hints.append(budget)
        else:
            break
    return {"seed": seed, "hints": hints}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for seed in range(int(sys.argv[1]), int(sys.argv[2])):
        sys.stdout.write(f"{json.dumps(follow(seed))}\n")
