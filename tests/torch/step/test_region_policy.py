"""Policies run by PyTorch's own checkpointing, in eager mode: measured peaks within the budget, and the plain step's bits."""

from __future__ import annotations

import copy
import functools
import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from checkmate import InfeasibleBudgetError, OptionError, parse_bytes
from checkmate.torch import RegionPolicy, checkpoint_regions, context_fn, measure_peak, region_policy

FRESH = functools.partial(torch.randint, 0, 200, (4, 32))


class Block(nn.Module):
    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.wo = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.wo(attended.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.ln2(x)))))


class Gpt(nn.Module):
    def __init__(self, dropout: float = 0.0, layers: int = 4, dim: int = 32) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(200, dim), nn.Linear(dim, 200)
        self.layers = nn.ModuleList(Block(dim, dropout) for _ in range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Counts(TorchDispatchMode):
    """Counts the ops that run, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[str(func)] += 1
        return func(*args, **(kwargs or {}))


def loss_of(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(prediction.flatten(0, 1), y.flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """A plain step; its loss, gradients and random state."""
    prediction = model(x)
    loss = loss_of(prediction, y)
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return [loss.detach(), *gradients, torch.get_rng_state()]


def measured(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> int:
    """Bytes of a plain step, everything included."""

    def step() -> None:
        prediction = model(x)
        loss_of(prediction, y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
    there = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in (*model.parameters(), *state, x, y)}
    return sum(there.values()) + measure_peak(step)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize("dropout", [0.3, pytest.param(0.0, marks=pytest.mark.slow)])
def test_policies_keep_the_budget_and_the_bits(dropout: float) -> None:
    """Ops, modules and whole layers, with random ops and without: two steps equal a plain loop's, the peak is measured."""
    plain = Gpt(dropout)
    x, y = FRESH(), FRESH()
    given: dict[str, Any] = {"example": (x, y), "time_limit_s": 1, "costs": "estimated"}
    overheads = {}
    for save in ("ops", "modules", "nothing"):
        model, other = copy.deepcopy(plain), copy.deepcopy(plain)
        optimizer, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
        torch._dynamo.reset()
        policy = region_policy(model, loss_of, optimizer, budget="50%", save=save, **given)
        assert policy.saved
        checkpoint_regions(model, policy)
        for _ in range(2):
            state = torch.get_rng_state()
            ours = train(model, optimizer, x, y)
            torch.set_rng_state(state)
            assert same(ours, train(other, theirs, x, y)), save
        assert policy.peak_bytes <= policy.budget_bytes
        peak = measured(model, optimizer, x, y)
        assert 0.9 * policy.peak_bytes < peak <= policy.budget_bytes < measured(other, theirs, x, y)
        overheads[save] = policy.evaluated.overhead
        assert list(model.state_dict()) == list(other.state_dict())
    assert overheads["ops"] <= min(overheads["modules"], overheads["nothing"])


def test_the_saved_ops_are_not_run_again() -> None:
    """Matrix products that the policy saves run once, all others twice."""
    model, (x, y) = Gpt(), (FRESH(), FRESH())
    policy = region_policy(model, loss_of, example=(x, y), budget="60%", time_limit_s=1, costs="estimated")
    saved = sum(kind == "aten.addmm.default" for calls in policy.saved.values() for kind, _ in calls)
    assert saved
    loss = loss_of(checkpoint_regions(model, policy)(x), y)
    with Counts() as counts:
        loss.backward()
    assert counts.ran["aten.addmm.default"] == 3 * len(policy.saved) - saved  # the last product of a layer is not needed


def test_a_policy_as_json_and_a_context_function() -> None:
    """As other code applies it: `checkpoint(..., context_fn=...)` on each module, from the JSON of the command line."""
    model, (x, y) = Gpt(), (FRESH(), FRESH())
    policy = region_policy(model, loss_of, example=(x, y), budget="60%", time_limit_s=1, costs="estimated")
    other = checkpoint_regions(copy.deepcopy(model), policy)
    for name, saved in json.loads(json.dumps(policy.as_dict()))["saved"].items():
        module = model.get_submodule(name)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, context_fn=context_fn(saved))
    # Whole steps: the profiler does not see a tensor freed whose allocation it has not seen.
    peaks = [measure_peak(lambda m=m: loss_of(m(x), y).backward()) for m in (model, other)]
    assert peaks[0] == peaks[1]
    assert torch.equal(loss_of(model(x), y), loss_of(other(x), y))


def test_without_gradients_nothing_is_checkpointed() -> None:
    """Evaluation runs the forward as it is."""
    model, (x, y) = Gpt(), (FRESH(), FRESH())
    expected = model(x)
    policy = region_policy(model, loss_of, example=(x, y), budget="40%", time_limit_s=1, save="nothing", costs="estimated")
    with torch.no_grad():
        assert torch.equal(checkpoint_regions(model, policy)(x), expected)


def test_what_cannot_be_done_is_refused() -> None:
    """Budgets below the smallest peak, optimizers that need more, and a model of another structure."""
    model, (x, y) = Gpt(), (FRESH(), FRESH())
    given: dict[str, Any] = {"example": (x, y), "time_limit_s": 1, "costs": "estimated"}
    with pytest.raises(InfeasibleBudgetError) as refused:
        region_policy(model, loss_of, budget="400KiB", **given)
    enough = refused.value.hint.split("at least ")[1].split(",")[0]
    found = region_policy(model, loss_of, budget=enough, **given)
    assert isinstance(found, RegionPolicy)
    assert found.peak_bytes <= parse_bytes(enough)
    with pytest.raises(InfeasibleBudgetError, match="the optimizer's step needs"):
        region_policy(model, loss_of, torch.optim.AdamW(model.parameters()), budget="600KiB", **given)
    with pytest.raises(OptionError, match=r"no module 'layers\.\d'"):
        checkpoint_regions(nn.Linear(2, 2), found)
    with pytest.raises(OptionError, match="is none of"):
        region_policy(model, loss_of, budget="1MiB", save="some", **given)
