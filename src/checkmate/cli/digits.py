"""The training of the demo: a residual network on scikit-learn's digits, with a plan and keeping everything."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import checkmate.torch
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.solvers.baselines.keep_all import KeepAll

BATCH = 128
EPOCHS = 3
WIDTH = 64
BLOCKS = 5
SEED = 0
WARM_UP = 2
"""Steps before the measurements: the first compiles the backward pass and creates the optimizer's state."""

Batch = tuple[Tensor, Tensor]


def _norm(width: int) -> nn.Module:
    """BatchNorm whose running statistics converge within the few steps of a demo."""
    return nn.BatchNorm2d(width, momentum=0.3)


class Block(nn.Module):
    """Two convolutions with BatchNorm, dropout between them, around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            _norm(width),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            _norm(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """ReLU of the sum of the input and the output of the body."""
        return torch.relu(x + self.body(x))


def network() -> nn.Module:
    """The network, with parameters initialized from the seed."""
    torch.manual_seed(SEED)
    stem = [nn.Conv2d(1, WIDTH, 3, padding=1, bias=False), _norm(WIDTH), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * WIDTH, 10)]
    return nn.Sequential(*stem, *(Block(WIDTH) for _ in range(BLOCKS)), *head)


def data() -> tuple[Batch, Batch]:
    """Training and test digits: images ``[n, 1, 8, 8]`` and their classes ``[n]``."""
    pixels, targets = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    classes = torch.tensor(targets)
    shuffled = torch.randperm(len(classes), generator=torch.Generator().manual_seed(SEED))
    train, test = shuffled[:1437], shuffled[1437:]
    return (images[train], classes[train]), (images[test], classes[test])


def batches(data: Batch, epochs: int) -> Iterator[Batch]:
    """Batches of equal size, in an order determined by the seed."""
    x, y = data
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(epochs):
        order = torch.randperm(len(y), generator=generator)
        for start in range(0, len(y) - BATCH + 1, BATCH):
            chosen = order[start : start + BATCH]
            yield x[chosen], y[chosen]


@dataclass
class Run:
    """One of the two trainings: model, compiled step, random state and measurements."""

    model: nn.Module
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    graph: Graph
    plan: Plan
    result: Result
    random_state: Tensor
    losses: list[float] = field(default_factory=list[float])
    seconds: list[float] = field(default_factory=list[float])
    measured_bytes: int = 0
    accuracy: float = 0.0

    def advance(self, x: Tensor, y: Tensor, *, measure: bool, timed: bool) -> None:
        """Train one step with the random state of this run."""
        torch.set_rng_state(self.random_state)
        seen: list[float] = []

        def train() -> None:
            _, loss = self.step(x, y)
            seen.append(float(loss.detach()))

        began = time.perf_counter()
        if measure:
            self.measured_bytes = self.graph.resident_bytes + checkmate.torch.measure_peak(train)
        else:
            train()
            if timed:
                self.seconds.append(time.perf_counter() - began)
        self.losses += seen
        self.random_state = torch.get_rng_state()


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Both finished trainings."""

    planned: Run
    keep_all: Run
    steps: int
    parameters: int

    @property
    def identical(self) -> bool:
        """Whether all losses, parameters, buffers and the random state are bitwise equal."""
        ours, theirs = self.planned.model.state_dict(), self.keep_all.model.state_dict()
        return (
            self.planned.losses == self.keep_all.losses
            and all(torch.equal(ours[name], theirs[name]) for name in ours)
            and torch.equal(self.planned.random_state, self.keep_all.random_state)
        )

    @property
    def time_ratio(self) -> float:
        """Time of the planned steps divided by the time of the same steps keeping everything."""
        return sum(self.planned.seconds) / sum(self.keep_all.seconds)


def train(budget: str, *, epochs: int, time_limit_s: float, say: Callable[[str], None]) -> Trained:
    """Train two copies of the network on the same batches, interleaved: one within the budget, one keeping everything."""
    with _reproducible():
        seen, unseen = data()
        model = network()
        planned = _prepare(model, seen, budget, time_limit_s, None, say)
        keep_all = _prepare(copy.deepcopy(model), seen, "100%", time_limit_s, KeepAll(), say)
        all_batches = list(batches(seen, epochs))
        for index, (x, y) in enumerate(all_batches):
            say(f"training, step {index + 1} of {len(all_batches)}, both ways in turn")
            for run in (planned, keep_all) if index % 2 else (keep_all, planned):
                run.advance(x, y, measure=index == WARM_UP, timed=index > WARM_UP)
        for run in (planned, keep_all):
            run.accuracy = _accuracy(run.model, unseen)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return Trained(planned=planned, keep_all=keep_all, steps=len(all_batches), parameters=parameters)


def _prepare(
    model: nn.Module, seen: Batch, budget: str, time_limit_s: float, solver: KeepAll | None, say: Callable[[str], None]
) -> Run:
    say(f"capturing and planning for a budget of {budget}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    example = (seen[0][:BATCH], seen[1][:BATCH])
    step = checkmate.torch.compile(
        model, nn.CrossEntropyLoss(), optimizer, example=example, budget=budget, solver=solver, time_limit_s=time_limit_s
    )
    torch.manual_seed(SEED)
    return Run(model, step, step.graph, step.plan, step.result, torch.get_rng_state())


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
