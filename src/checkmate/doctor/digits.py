"""The training of the demo: a residual network on scikit-learn's digits, with a plan and keeping everything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from checkmate.doctor.training import Batch, Example, Trained, residual_network, trained
from checkmate.solvers.baselines.keep_all import KeepAll

BATCH = 128


@dataclass(frozen=True, kw_only=True)
class DigitsTraining:
    """Both finished trainings, with the accuracy of the plan and of keeping everything on digits that neither has seen."""

    planned: Trained
    keep_all: Trained
    accuracy: tuple[float, float]


def network(width: int = 64, blocks: int = 5) -> nn.Module:
    """The network, with parameters initialized from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return residual_network(1, width, blocks)


def data() -> tuple[Batch, Batch]:
    """Training and test digits: images ``[n, 1, 8, 8]`` and their classes ``[n]``."""
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    classes = torch.tensor(targets)
    shuffled = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    train, test = shuffled[:1437], shuffled[1437:]
    return (images[train], classes[train]), (images[test], classes[test])


def batches(data: Batch, epochs: int) -> Iterator[Batch]:
    """Batches of equal size, in an order determined by a seed."""
    x, y = data
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(y), generator=generator).split(BATCH):
            if len(chosen) == BATCH:
                yield x[chosen], y[chosen]


def train(
    budget: str, *, time_limit_s: float, say: Callable[[str], None], model: nn.Module | None = None, epochs: int = 3
) -> DigitsTraining:
    """Train two copies of the network on the same batches, on one thread: within the budget, and keeping everything."""
    seen, unseen = data()
    model, threads = network() if model is None else model, torch.get_num_threads()
    torch.set_num_threads(1)

    def finished(doing: str, **options: Any) -> tuple[Trained, float]:
        mine = copy.deepcopy(model)
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.01, momentum=0.9)
        example = Example(mine, nn.CrossEntropyLoss(), (seen[0][:BATCH], seen[1][:BATCH]))
        say(doing)
        # The first step compiles the backward pass, the second has the optimizer's state.
        made = trained(example, optimizer, batches(seen, epochs), measured=2, time_limit_s=time_limit_s, **options)
        mine.eval()
        with torch.no_grad():
            return made, float((mine(unseen[0]).argmax(1) == unseen[1]).float().mean())

    try:
        with torch.random.fork_rng(devices=[]):
            keep_all, whole = finished("training with everything kept", budget="100%", solver=KeepAll())
            planned, accuracy = finished(f"training within a budget of {budget}", budget=budget)
    finally:
        torch.set_num_threads(threads)
    return DigitsTraining(planned=planned, keep_all=keep_all, accuracy=(accuracy, whole))
