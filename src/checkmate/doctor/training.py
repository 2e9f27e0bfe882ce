"""Small models, and their training with a plan or keeping everything, for `checkmate doctor` and `checkmate demo`."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import checkmate.torch
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.torch.graph.storages import same_bytes
from checkmate.torch.steps.coordinator import coordinator

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Example:
    """A model, its loss of a prediction and a target, and a batch of inputs and targets."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Batch


class _Block(nn.Module):
    """Two convolutions with BatchNorm, dropout between them, around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        first, second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.body = nn.Sequential(first, _norm(width), nn.ReLU(), nn.Dropout(0.1), second, _norm(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.body(x))


def _norm(width: int) -> nn.Module:
    """BatchNorm whose running statistics converge within the few steps of a demo."""
    return nn.BatchNorm2d(width, momentum=0.3)


def residual_network(channels: int, width: int, blocks: int) -> nn.Module:
    """A residual network for ten classes of images."""
    stem = [nn.Conv2d(channels, width, 3, padding=1, bias=False), _norm(width), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10)]
    return nn.Sequential(*stem, *(_Block(width) for _ in range(blocks)), *head)


def convolutions(scale: int) -> Example:
    """Residual convolutions with BatchNorm and dropout, at a width of 16 times the scale."""
    return Example(residual_network(3, 16 * scale, 2), F.cross_entropy, (torch.randn(16, 3, 24, 24), torch.randint(10, (16,))))


def transformer(scale: int) -> Example:
    """A language model with attention and dropout; the scale multiplies width, length and vocabulary."""
    vocabulary, length, width = 256 * scale, 64 * scale, 64 * scale
    tokens = torch.randint(vocabulary, (4, length))
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, activation="gelu", batch_first=True, norm_first=True)
    layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(vocabulary, width), layers, nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return Example(model, loss, (tokens, tokens.roll(-1, 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished training, and the measurements of its steps."""

    graph: Graph
    result: Result
    losses: tuple[float, ...]
    state: tuple[Tensor, ...]  # copies of losses, parameters or gradients, buffers, and random state
    peak_bytes: int  # allocated in the measured step, everything included
    reserved_bytes: int | None  # by the CUDA allocator in that step; None on a CPU
    compiling_s: float  # until the measured step
    seconds: tuple[float, ...]  # of each step after the measured one


def trained(
    example: Example,
    optimizer: torch.optim.Optimizer | None,
    batches: Iterable[Batch],
    *,
    measured: int,
    plain: bool = False,
    **options: Any,
) -> Trained:
    """Train a model on batches, with a separate random state, and measure the peak of one of the steps.

    The step is a step of `checkmate.torch.compile`, or of a plain loop around ``torch.compile(model, backend="checkmate")``.
    Without an optimizer the gradients of the last step stay.
    """
    torch._dynamo.reset()
    coordinator().forget_steps()
    free_memory()
    began, coming = time.perf_counter(), iter(batches)
    training = _Training(example, optimizer, plain=plain, **options)
    for batch in itertools.islice(coming, measured):
        training.advance(*batch)
    compiling_s = time.perf_counter() - began
    peak_bytes, reserved_bytes = training.measure(*next(coming))
    seconds = tuple(training.advance(*batch) for batch in coming)
    planned = training.planned()
    return Trained(
        graph=planned.graph,
        result=planned.result,
        losses=tuple(training.losses),
        state=training.state(),
        peak_bytes=peak_bytes,
        reserved_bytes=reserved_bytes,
        compiling_s=compiling_s,
        seconds=seconds,
    )


def promises(planned: Trained, keep_all: Trained, planned_bytes: int | None) -> dict[str, bool]:
    """Whether each promise was kept: the budget, the planned peak to 1 % if it is known, and the bits of keeping everything."""
    return {
        "within_budget": planned.peak_bytes <= planned.result.budget_bytes,
        "as_planned": planned_bytes is None or abs(planned.peak_bytes - planned_bytes) <= 0.01 * planned_bytes,
        "identical": all(map(same_bytes, planned.state, keep_all.state)),
    }


class _Training:
    """A model that is trained step by step."""

    def __init__(self, example: Example, optimizer: torch.optim.Optimizer | None, *, plain: bool, **options: Any) -> None:
        self.losses: list[float] = []
        self._model, self._loss, self._optimizer = example.model, example.loss, optimizer
        self._device = example.batch[0].device
        self._outputs: object = None
        if plain:
            self._step, self._compiled = None, torch.compile(example.model, backend="checkmate", options=options)
        else:
            self._step = checkmate.torch.compile(example.model, example.loss, optimizer, example=example.batch, **options)
        torch.manual_seed(1)
        self._random_states = self._random()

    def advance(self, x: Tensor, y: Tensor) -> float:
        """Train one step, and return its seconds."""
        torch.set_rng_state(self._random_states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._random_states[1])
        if self._optimizer is None:
            self._model.zero_grad(set_to_none=True)
        # On one thread, the time of the process leaves out other processes.
        alone = self._device.type != "cuda" and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        self._synchronize()
        began = clock()
        if self._step is None:
            loss = self._loss(self._compiled(x), y)
            loss.backward()
        else:
            outputs = self._step(x, y)
            # A loop holds them until the next step ends; the plan allows for that.
            self._outputs = outputs if self._step.whole else None
            loss = outputs[1]
        self.losses.append(float(loss.detach()))
        elapsed_s = clock() - began
        self._random_states = self._random()
        return elapsed_s

    def measure(self, x: Tensor, y: Tensor) -> tuple[int, int | None]:
        """Train one step; return the peak of allocated memory, and on a GPU the reserved memory."""
        if self._optimizer is None:
            self._model.zero_grad(set_to_none=True)
        free_memory()
        if self._device.type != "cuda":
            return self.planned().graph.resident_bytes + checkmate.torch.measure_peak(lambda: self.advance(x, y)), None
        self.advance(x, y)  # reserve again the memory that was given back
        self._synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.advance(x, y)
        self._synchronize()
        return torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()

    def planned(self) -> checkmate.torch.Step | checkmate.torch.PlannedStep:
        """The graph and the plan of the step, known after the second step."""
        planned = self._step or checkmate.torch.last_plan()
        assert planned is not None
        return planned

    def state(self) -> tuple[Tensor, ...]:
        """Copies of losses, parameters or gradients, buffers, and random state."""
        parameters = list(self._model.parameters())
        result = parameters if self._optimizer is not None else [p.grad for p in parameters if p.grad is not None]
        losses = torch.tensor(self.losses, dtype=torch.float64)
        return tuple(t.detach().clone().cpu() for t in (losses, *result, *self._model.buffers(), *self._random_states))

    def _random(self) -> tuple[Tensor, ...]:
        return torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self._device.type == "cuda" else [])

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def equal_up_to_rounding(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether two states differ at most as another order of float32 sums allows; integers must be equal."""
    return all(
        bool((a - b).abs().max() <= 1e-4 * b.abs().max()) if a.is_floating_point() else torch.equal(a, b)
        for a, b in zip(ours, theirs, strict=True)
    )


def free_memory() -> None:
    """Collect garbage, and empty the cache of a GPU's allocator."""
    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
