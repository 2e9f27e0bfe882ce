"""Chunks in scripts as they are: stock calls of transformers, outputs that are held, accumulation, and a loss outside."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.core.errors import InfeasibleBudgetError
from checkmate.torch import measure_peak
from checkmate.torch.steps.coordinator import coordinator

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # what transformers and Dynamo warn of is not ours
VOCABULARY, TOKENS = 2048, 64


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    torch._dynamo.reset()
    coordinator().forget_steps()
    yield
    torch._dynamo.reset()


def language() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    ids = torch.randint(VOCABULARY, (4, TOKENS))
    model = transformers.GPT2LMHeadModel(config).train()
    return model, {"input_ids": ids, "labels": ids}


def run_steps(step: Callable[[], Any], model: nn.Module, count: int = 3) -> tuple[list[torch.Tensor], list[int]]:
    """Run steps whose outputs are held until the next has its own: the losses, and the peaks from the third step on."""
    held: Any = None
    losses, peaks = [], []

    def once() -> None:
        nonlocal held
        held = step()

    for k in range(count):
        if k < 2:
            once()
        else:
            peaks.append(measure_peak(once))
        losses.append(held.loss.detach().clone())
    return losses, peaks


def stepping(run: Callable[..., Any], model: nn.Module, batch: dict[str, Any], accumulated: int = 1) -> Callable[[], Any]:
    """A step of a script: forward, backward and SGD; of several batches where gradients are accumulated."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> Any:
        for _ in range(accumulated):
            output = run(**batch)
            (output.loss / accumulated).backward()
        optimizer.step()
        optimizer.zero_grad()
        return output

    return step


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="AOTAutograd before 2.13 holds the logits' gradient through a backward")
@pytest.mark.parametrize(
    ("accumulated", "arrays", "hint"),
    [(1, 2.9, "this graph alone needs at least"), pytest.param(2, 3.9, "raise the budget to at least", marks=pytest.mark.slow)],
)
def test_a_stock_call_below_its_floor(accumulated: int, arrays: float, hint: str) -> None:
    """`model(**batch).loss.backward()`: only logits, their gradient and what is held of the batch before exist whole.

    The outputs of the step before exist when a step begins, so that measured peaks do not count them.
    """
    model, batch = language()
    plain = copy.deepcopy(model)
    expected, peaks = run_steps(stepping(plain, plain, batch, accumulated), plain)
    keep_all = peaks[-1]
    resident = sum(p.nbytes for p in model.parameters()) + batch["input_ids"].nbytes
    logits = 4 * TOKENS * VOCABULARY * 4
    budget = resident + sum(p.nbytes for p in model.parameters()) + int(arrays * logits)
    assert budget < resident + keep_all

    whole = torch.compile(model, backend="checkmate", options={"budget": budget, "time_limit_s": 0.5, "chunking": "off"})
    with pytest.raises(InfeasibleBudgetError, match=f"hint: {hint}"):
        run_steps(stepping(whole, model, batch, accumulated), model)
    model.load_state_dict(language()[0].state_dict())
    model.zero_grad()
    torch._dynamo.reset()
    coordinator().forget_steps()

    run = torch.compile(model, backend="checkmate", options={"budget": budget, "time_limit_s": 2, "chunking": "auto"})
    losses, peaks = run_steps(stepping(run, model, batch, accumulated), model)
    result = coordinator().result
    assert result is not None and any("in pieces" in remark for remark in result.remarks)
    assert max(peaks) + resident <= budget
    for got, want in zip(losses, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.slow
def test_a_graph_and_its_loss_outside() -> None:
    """The logits cross into eager code, so that nothing of the loss can run piece by piece: the rest is planned as ever."""
    model, batch = language()
    run = torch.compile(model.transformer, backend="checkmate", options={"budget": "95%", "time_limit_s": 2, "chunking": "auto"})
    plain = copy.deepcopy(model)

    def step(net: nn.Module, body: Callable[..., Any]) -> torch.Tensor:
        logits = net.lm_head(body(batch["input_ids"]).last_hidden_state)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        return loss.detach()

    for _ in range(3):
        assert torch.equal(step(model, run), step(plain, plain.transformer))
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert (got.grad - want.grad).norm() <= 1e-6 * want.grad.norm()  # type: ignore[union-attr, operator]


class Scorer(nn.Module):
    """A model that returns the logits of each next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(2 * VOCABULARY, 8)
        self.layer = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(self.embedding(ids))) @ self.embedding.weight.T


class PreferenceTrainer:
    """A trainer that computes log-probabilities outside of its models, as TRL did before it had ``add_fused_lm_head``."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model, self.reference = Scorer(), Scorer()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.ids = torch.randint(2 * VOCABULARY, (16, TOKENS))

    def log_probs(self, model: nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logs = model(ids)[:, :-1].log_softmax(-1)
        return logs.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1), -(logs.exp() * logs).sum(-1)

    def step(self) -> torch.Tensor:
        log_probs, _ = self.log_probs(self.model, self.ids)
        with torch.no_grad():
            expected, _ = self.log_probs(self.reference, self.ids)
        chosen, rejected = (log_probs - expected).sum(-1).chunk(2)
        loss = -nn.functional.logsigmoid(chosen - rejected).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def test_log_probabilities_that_a_method_of_a_trainer_computes() -> None:
    """A method that calls the model is one graph with it: no logits exist whole, those of the reference model neither."""
    plain, trainer = PreferenceTrainer(), PreferenceTrainer()
    options = {"budget": "14MiB", "chunking": "auto", "time_limit_s": 1}
    trainer.log_probs = torch.compile(trainer.log_probs, backend="checkmate", dynamic=False, options=options)
    for _ in range(2):
        torch.testing.assert_close(trainer.step(), plain.step(), rtol=1e-6, atol=0)
    least = 16 * TOKENS * 2 * VOCABULARY * 4
    peaks = [measure_peak(each.step) for each in (trainer, plain)]
    assert peaks[0] <= 0.35 * peaks[1] and peaks[0] < least, (peaks, least)


def test_a_step_whose_graph_is_compiled_again_runs_in_pieces() -> None:
    """As by hooks that a trainer removes after its first step: the step is recorded once more, with the new graph."""
    plain, trainer = PreferenceTrainer(), PreferenceTrainer()
    options = {"budget": "14MiB", "chunking": "auto", "time_limit_s": 1}
    trainer.log_probs = torch.compile(trainer.log_probs, backend="checkmate", dynamic=False, options=options)
    hook = trainer.model.layer.register_forward_hook(lambda *_: None)
    for _ in range(4):
        torch.testing.assert_close(trainer.step(), plain.step(), rtol=1e-6, atol=0)
        hook.remove()
    assert coordinator().result is not None
    assert measure_peak(trainer.step) < 16 * TOKENS * 2 * VOCABULARY * 4
