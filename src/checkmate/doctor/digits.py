"""The training of the demo: a residual network on scikit-learn's digits, with a plan and keeping everything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from checkmate.doctor.training import Batch, Example, Training, equal_bits, residual_network
from checkmate.solvers.baselines.keep_all import KeepAll

BATCH = 128


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Both finished trainings, each with one measured step."""

    planned: Training
    keep_all: Training
    measured_bytes: tuple[int, int]  # of the plan and of keeping everything
    accuracy: tuple[float, float]
    identical: bool  # whether all losses, parameters, buffers and the random state are bitwise equal
    time_ratio: float  # of the planned steps to the same steps keeping everything


def network(width: int = 64, blocks: int = 5) -> nn.Module:
    """The network, with parameters initialized from a seed."""
    with torch.random.fork_rng():
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


def batches(data: Batch, epochs: int, size: int = BATCH) -> Iterator[Batch]:
    """Batches of equal size, in an order determined by a seed."""
    x, y = data
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        order = torch.randperm(len(y), generator=generator)
        for start in range(0, len(y) - size + 1, size):
            chosen = order[start : start + size]
            yield x[chosen], y[chosen]


def train(
    budget: str, *, time_limit_s: float, say: Callable[[str], None], model: nn.Module | None = None, epochs: int = 3
) -> Trained:
    """Train two copies of the network on the same batches, interleaved: one within the budget, the other keeping everything."""
    with _reproducible():
        seen, unseen = data()
        model = network() if model is None else model
        planned, keep_all = (
            _prepare(copy.deepcopy(model), seen, say, budget=share, solver=solver, time_limit_s=time_limit_s)
            for share, solver in ((budget, None), ("100%", KeepAll()))
        )
        all_batches = list(batches(seen, epochs))
        warm_up, measured = 2, (0, 0)  # the first step compiles the backward pass and creates the optimizer's state
        for index, batch in enumerate(all_batches):
            say(f"training, step {index + 1} of {len(all_batches)}, both ways in turn")
            if index == warm_up:
                measured = planned.measure(*batch)[0], keep_all.measure(*batch)[0]
            else:
                for training in (planned, keep_all) if index % 2 else (keep_all, planned):
                    training.advance(*batch)
        return Trained(
            planned=planned,
            keep_all=keep_all,
            measured_bytes=measured,
            accuracy=(_accuracy(planned.model, unseen), _accuracy(keep_all.model, unseen)),
            identical=equal_bits(planned.state(), keep_all.state()),
            time_ratio=sum(planned.seconds[warm_up:]) / sum(keep_all.seconds[warm_up:]),
        )


def _prepare(model: nn.Module, seen: Batch, say: Callable[[str], None], **options: Any) -> Training:
    say(f"capturing and planning for a budget of {options['budget']}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    example = Example(model, nn.CrossEntropyLoss(), (seen[0][:BATCH], seen[1][:BATCH]))
    return Training(example, optimizer, **options)


def _accuracy(model: nn.Module, unseen: Batch) -> float:
    model.eval()
    with torch.no_grad():
        return float((model(unseen[0]).argmax(1) == unseen[1]).float().mean())


@contextmanager
def _reproducible() -> Iterator[None]:
    """Use one thread; restore the number of threads and the random state at the end."""
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
