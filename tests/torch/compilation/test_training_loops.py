"""Training loops as scripts have them: several optimizers, evaluation in between, outputs that are held, smaller batches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from checkmate.torch import measure_peak
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.steps import functorch_settings

# The search for regions allocates in the second step, as costs decide.
QUICK = {"time_limit_s": 1.0, "chunking": "off", "costs": "estimated"}
Batch = tuple[torch.Tensor, torch.Tensor]
# Dynamo asks a tensor between two graphs for its gradient, and torch warns of that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Residual(nn.Module):
    """A small classifier of residual blocks."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)
        )
        self.head = nn.Linear(64, 10)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x))
        return self.head(x)


@dataclass
class Training:
    """A model in training, compiled within a budget.

    Attributes:
        model: The model.
        run: The compiled model.
        seen: Results to compare: losses, and all else that a loop wants to.
        over: Bytes by which measured steps exceeded their budgets.
    """

    model: nn.Module
    run: Callable[..., Any]
    seen: list[torch.Tensor] = field(default_factory=list)
    over: list[int] = field(default_factory=list)

    def measured(self, step: Callable[[], object], held_bytes: int = 0) -> None:
        """Run a step and compare its peak with the budget of its plan, both above what the step is given."""
        peak = measure_peak(step)
        plan = coordinator().step
        assert plan is not None
        parameters = sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers()))
        self.over.append(peak + parameters + held_bytes - plan.result.budget_bytes)

    def backward(self, batch: Batch, scale: float = 1.0) -> None:
        """Forward, loss and backward of a batch; the loss is outside of the compiled model."""
        x, y = batch
        loss = F.cross_entropy(self.run(x), y)
        (loss * scale).backward()
        self.seen.append(loss.detach())


def batches(count: int, seed: int = 1) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        yield torch.randn(512, 64, generator=generator), torch.randint(10, (512,), generator=generator)


def adam(training: Training) -> torch.optim.Optimizer:
    return torch.optim.AdamW(training.model.parameters())


def with_lbfgs(training: Training) -> None:
    """Several forwards and backwards in one step of the optimizer."""
    optimizer = torch.optim.LBFGS(training.model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    for batch in batches(3):

        def closure(batch: Batch = batch) -> torch.Tensor:
            optimizer.zero_grad()
            training.backward(batch)
            return training.seen[-1]

        optimizer.step(closure)


def with_muon(training: Training) -> None:
    """Muon for the matrices alone; the gradients of all other parameters are never cleared."""
    optimizer = torch.optim.Muon([p for p in training.model.blocks.parameters() if p.ndim == 2])  # type: ignore[attr-defined]
    for i, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        if i > 1:
            training.measured(lambda batch=batch: training.backward(batch))
        else:
            training.backward(batch)
        optimizer.step()


def with_evaluation(training: Training) -> None:
    """Evaluation between steps, once without `no_grad`."""
    optimizer = adam(training)
    for i, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        if i:
            training.measured(lambda batch=batch: training.backward(batch))
        else:
            training.backward(batch)
        optimizer.step()
        training.model.eval()
        with torch.no_grad():
            training.seen.append(training.run(batch[0]))
        if i == 1:
            training.seen.append(training.run(batch[0]).detach())
        training.model.train()


def with_a_smaller_last_batch(training: Training) -> None:
    """Epochs end with fewer samples."""
    optimizer = adam(training)
    for x, y in [
        *batches(2),
        *((x[:200], y[:200]) for x, y in batches(1)),
        *batches(2),
        *((x[:200], y[:200]) for x, y in batches(1)),
    ]:
        optimizer.zero_grad()
        training.backward((x, y))
        optimizer.step()


def with_an_exception(training: Training) -> None:
    """The loss of one batch is bad, and the script skips it."""
    optimizer = adam(training)
    for i, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        loss = F.cross_entropy(training.run(batch[0]), batch[1])
        if i == 1:
            continue
        loss.backward()
        optimizer.step()
        training.seen.append(loss.detach())


def with_two_backwards(training: Training) -> None:
    """The graph is retained, and differentiated once more."""
    optimizer = adam(training)
    for x, y in batches(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(training.run(x), y)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()
        training.seen.append(loss.detach())


def with_a_scaler(training: Training) -> None:
    """Mixed precision with a `GradScaler`."""
    optimizer, scaler = adam(training), torch.amp.GradScaler("cpu")
    for x, y in batches(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(training.run(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        training.seen.append(loss.detach())


def with_averaged_weights(training: Training) -> None:
    """An exponential moving average of the weights."""
    optimizer = adam(training)
    average = torch.optim.swa_utils.AveragedModel(training.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for batch in batches(3):
        optimizer.zero_grad()
        training.backward(batch)
        optimizer.step()
        average.update_parameters(training.model)
    training.seen += [p.detach() for p in average.parameters()]


LOOPS = [
    with_lbfgs,
    pytest.param(with_muon, marks=pytest.mark.slow),
    pytest.param(with_evaluation, marks=pytest.mark.slow),
    with_two_backwards,
    pytest.param(with_a_smaller_last_batch, marks=pytest.mark.slow),
    pytest.param(with_an_exception, marks=pytest.mark.slow),
    pytest.param(with_a_scaler, marks=pytest.mark.slow),
    pytest.param(with_averaged_weights, marks=pytest.mark.slow),
]


def trained(loop: Callable[[Training], None], budget: str, *, checkpointed: bool = False) -> Training:
    torch._dynamo.reset()
    coordinator().forget_steps()
    torch.manual_seed(0)
    model = Residual(checkpointed)
    training = Training(model, torch.compile(model, backend="checkmate", options={"budget": budget, **QUICK}))
    loop(training)
    training.seen += [p.detach() for p in model.parameters()]
    return training


@functorch_settings(donated_buffer=False)  # PyTorch needs it for a second backward
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_trains_as_without_a_budget(loop: Callable[[Training], None]) -> None:
    """Losses and parameters are those of keeping everything, to the bit, and steps keep their budget."""
    wanted, got = trained(loop, "100%"), trained(loop, "60%")
    assert len(got.seen) == len(wanted.seen)
    assert all(map(torch.equal, got.seen, wanted.seen))
    assert all(over <= 0 for over in got.over)


def test_regions_under_checkpoint_are_planned() -> None:
    """`torch.utils.checkpoint` inside of the compiled model."""

    def loop(training: Training) -> None:
        for i, batch in enumerate(batches(3)):
            training.model.zero_grad(set_to_none=True)
            if i:
                training.measured(lambda batch=batch: training.backward(batch))
            else:
                training.backward(batch)

    wanted, got = trained(loop, "100%", checkpointed=True), trained(loop, "60%", checkpointed=True)
    assert all(map(torch.equal, got.seen, wanted.seen))
    assert all(over <= 0 for over in got.over)


def test_outputs_of_the_step_before_are_in_the_budget() -> None:
    """``outputs = model(x)`` holds those of the step before until the new ones are there."""
    outputs: list[torch.Tensor] = []

    def loop(training: Training) -> None:
        for i, (x, y) in enumerate(batches(5)):
            training.model.zero_grad(set_to_none=True)

            def step(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                z = training.run(x)
                outputs[:] = [z]
                F.cross_entropy(z, y).backward()

            if i < 2:
                step()
                outputs.clear()  # the profiler does not see a tensor freed whose allocation it has not seen
            else:
                training.measured(step, sum(t.nbytes for t in outputs) + x.nbytes + y.nbytes)

    assert trained(loop, "50%").over[1] <= 0


def test_predictions_that_are_kept_are_left_room_for(caplog: pytest.LogCaptureFixture) -> None:
    """More is held in every step; the step is not planned anew in each."""
    caplog.set_level(logging.INFO, "checkmate.torch")
    kept: list[torch.Tensor] = []

    def loop(training: Training) -> None:
        for i, (x, y) in enumerate(batches(12)):
            training.model.zero_grad(set_to_none=True)

            def step(x: torch.Tensor = x, y: torch.Tensor = y) -> None:
                z = training.run(x)
                F.cross_entropy(z, y).backward()
                kept.append(z.detach())

            if i:
                training.measured(step, sum(t.nbytes for t in kept) + x.nbytes + y.nbytes)
            else:
                step()

    assert max(trained(loop, "60%").over) <= 0
    plans = [r for r in caplog.records if "planned as one" in r.getMessage()]
    assert len(plans) <= 6


def test_labels_that_eager_code_reads_are_in_the_budget() -> None:
    """What the loss outside of the model is given exists during the whole step."""

    def loop(training: Training) -> None:
        x, target = torch.randn(512, 64), torch.rand(512, 10, dtype=torch.float64)
        for i in range(3):
            training.model.zero_grad(set_to_none=True)

            def step() -> None:
                (training.run(x) - target).square().mean().backward()

            if i:
                training.measured(step, x.nbytes + target.nbytes)
            else:
                step()

    assert max(trained(loop, "100%").over) <= 0


def test_steps_that_begin_alike_and_alternate_keep_their_plans() -> None:
    """One batch alone, then two views of one: expected is the kind of step that followed before."""

    def loop(training: Training) -> None:
        x, y = next(batches(1))
        for i in range(8):
            training.model.zero_grad(set_to_none=True)

            def one() -> None:
                F.cross_entropy(training.run(x), y).backward()

            def two() -> None:
                (F.cross_entropy(training.run(x), y) + training.run(-x).square().mean()).backward()

            step = two if i % 2 else one
            if i < 4:
                step()
                continue
            training.measured(step, x.nbytes + y.nbytes)
            plan = coordinator().step
            assert plan is not None
            assert len(plan.graphs) == 1 + i % 2

    assert max(trained(loop, "60%").over) <= 0


def test_a_result_that_is_held_and_not_differentiated_keeps_no_step_open() -> None:
    """A script that forgets `no_grad` for a first look at its model."""

    def loop(training: Training) -> None:
        optimizer = adam(training)
        data = list(batches(4))
        first = training.run(data[0][0])
        for i, batch in enumerate(data):
            optimizer.zero_grad()
            if i > 2:
                training.measured(lambda batch=batch: training.backward(batch))
            else:
                training.backward(batch)
            optimizer.step()
        training.seen.append(first.detach())

    wanted, got = trained(loop, "100%"), trained(loop, "60%")
    assert all(map(torch.equal, got.seen, wanted.seen))
    assert all(over <= 0 for over in got.over)


class Sentences(nn.Module):
    """A classifier of sentences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 64)
        self.mix = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)))
        self.rnn = nn.GRU(64, 16, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.mix(self.embedding(ids)), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_a_packed_gru_between_planned_graphs() -> None:
    """The share is of the whole step, and not of the first small graph."""
    found = []
    ids, lengths, y = torch.randint(256, (64, 32)), torch.randint(8, 33, (64,)), torch.randint(4, (64,))
    for budget in ("100%", "60%"):
        torch._dynamo.reset()
        coordinator().forget_steps()
        torch.manual_seed(0)
        model = Sentences()
        training = Training(model, torch.compile(model, backend="checkmate", options={"budget": budget, **QUICK}))
        for i in range(3):
            model.zero_grad(set_to_none=True)

            def step(training: Training = training) -> None:
                loss = F.cross_entropy(training.run(ids, lengths), y)
                loss.backward()
                training.seen.append(loss.detach())

            training.measured(step, ids.nbytes + lengths.nbytes + y.nbytes) if i else step()
        found.append([*training.seen, *(p.grad for p in model.parameters())])
        assert max(training.over) <= 0
    assert all(map(torch.equal, *found))


class _Two(torch.autograd.Function):
    """Eager code with two results; it notes into which of them gradients flow."""

    noted: ClassVar[list[tuple[bool, bool]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
        _Two.noted.append((first is None, second is None))
        return None if first is None else first * 2


def test_no_gradient_is_none_for_eager_code_in_the_first_step_too() -> None:
    """A value that is returned for a log: eager code before the graph would compute its gradient from zeros, as it never does."""
    lower, upper = nn.Linear(8, 8), nn.Linear(8, 8)
    scale = nn.Parameter(torch.ones(8))

    @torch.compiler.disable
    def between(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _Two.apply(x)

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = between(lower(x).tanh())
        return upper(first).square().mean(), (second * scale).mean()

    run = torch.compile(step, backend="checkmate", options={"budget": "100%", "costs": "estimated"})
    _Two.noted.clear()
    for _ in range(3):
        run(torch.randn(4, 8))[0].backward()
        assert scale.grad is None
    assert _Two.noted == [(False, True)] * 3


class Masked(Residual):
    """A model with a graph of its own for a mask, which depends on no input, once it is evaluated."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(64, 64).tril() if not self.training else None
        torch._dynamo.graph_break()
        return super().forward(x if mask is None else x @ mask)


def test_an_evaluation_may_begin_with_a_graph_without_inputs() -> None:
    """Once the memory of a training step is known, such graphs are planned as well; BigBird makes its masks in one."""
    model = Masked()
    training = Training(model, torch.compile(model, backend="checkmate", options={"budget": "60%", **QUICK}))
    (batch,) = batches(1)
    for _ in range(2):
        model.zero_grad()
        training.backward(batch)
    model.eval()
    with torch.no_grad():
        assert torch.equal(training.run(batch[0]), model(batch[0]))
