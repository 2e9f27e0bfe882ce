"""Steps whose regions run in pieces: results, peaks and choices."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
import checkmate.torch
from checkmate import Limits
from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import InfeasibleBudgetError, OptionError, PlanNotFoundError
from checkmate.core.units import parse_bytes
from checkmate.torch import measure_peak
from checkmate.torch.chunking import choose

pytestmark = pytest.mark.usefixtures("nothing_else")

TOKENS, WIDTH, VOCABULARY = 256, 16, 1024


class Language(nn.Module):
    """Embedding, one MLP, and a head whose logits are by far the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        logits = self.head(hidden + self.mlp(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (2, TOKENS // 2), generator=generator)
    labels = tokens.roll(1, 1).clone()
    labels[0, ::7] = -100
    return {"tokens": tokens, "labels": labels}


def plain(model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of plain PyTorch."""
    loss = model(**batch())
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def floor_of(model: nn.Module, **options: Any) -> int:
    """The smallest budget without chunks."""
    with pytest.raises((InfeasibleBudgetError, PlanNotFoundError)) as refused:
        checkmate.torch.compile(model, example=batch(), budget=1, chunking="off", **options)
    return int(refused.value.floor_bytes)


def test_a_budget_below_the_floor_is_kept_in_pieces() -> None:
    model = Language()
    loss, gradients = plain(model)
    least = floor_of(model)
    step = checkmate.torch.compile(model, example=batch(), budget=int(0.6 * least), chunking="auto")
    assert any("in pieces" in remark for remark in step.result.remarks)

    inputs = batch()

    def run() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        return step(**inputs)[1]

    assert torch.equal(run(), loss)  # the picks of tokens are summed by one kernel, in its order
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)
    run()
    model.zero_grad(set_to_none=True)
    assert measure_peak(run) == step.result.peak_bytes - step.graph.resident_bytes
    assert step.result.peak_bytes <= int(0.6 * least)


def test_a_whole_step_runs_head_and_loss_as_one_op() -> None:
    model = Language()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected.parameters(), 0.1)
    expected(**batch()).backward()
    optimizer.step()
    mine = torch.optim.SGD(model.parameters(), 0.1)
    graph = checkmate.torch.capture(model, example=batch(), optimizer=mine)
    budget = graph.resident_bytes + (keep_all_bytes(graph) - graph.resident_bytes) // 3
    step = checkmate.torch.compile(model, optimizer=mine, example=batch(), budget=budget, chunking="auto")
    head = [op for op in step.graph.ops if "pieces" in op.kind]
    assert len(head) == 1
    step(**batch())
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


def test_nothing_runs_in_pieces_where_everything_fits() -> None:
    model = Language()
    step = checkmate.torch.compile(model, example=batch(), budget="100%", chunking="auto")
    assert not any("pieces" in op.kind for op in step.graph.ops)


def test_by_default_nothing_runs_in_pieces() -> None:
    model = Language()
    least = floor_of(model)
    with pytest.raises(InfeasibleBudgetError):
        checkmate.torch.compile(model, example=batch(), budget=int(0.6 * least), chunking="off")


def test_fewer_pieces_are_taken_where_memory_allows() -> None:
    """Each piece of a region with sums adds to all of a sum. The numbers that there are depend on the model alone."""
    model = Language()
    with pytest.raises(InfeasibleBudgetError) as refused:
        checkmate.torch.compile(model, example=batch(), budget=1, chunking="auto", costs="estimated")
    counts: list[int] = []
    for budget in (refused.value.smallest_bytes, floor_of(model, costs="estimated") - 1):
        assert budget is not None
        step = checkmate.torch.compile(model, example=batch(), budget=budget, chunking="auto", costs="estimated")
        counts += [int(found) for remark in step.result.remarks for found in re.findall(r"head \+ loss, (\d+) pieces", remark)]
    assert counts == [16, 4]


@pytest.mark.parametrize("tokens", [251, pytest.param(96, marks=pytest.mark.slow)])
def test_pieces_need_not_be_equal(tokens: int) -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY)
    x, y = torch.randn(tokens, WIDTH), torch.randint(VOCABULARY, (tokens,))
    loss = nn.functional.cross_entropy(head(x), y)
    gradients = torch.autograd.grad(loss, list(head.parameters()))
    cross_entropy = nn.functional.cross_entropy
    with pytest.raises(InfeasibleBudgetError) as refused:
        checkmate.torch.compile(head, cross_entropy, example=(x, y), budget=1, chunking="off", outputs="released")
    least = refused.value.floor_bytes
    step = checkmate.torch.compile(
        head, cross_entropy, example=(x, y), budget=int(0.95 * least), outputs="released", chunking="auto"
    )
    assert torch.equal(step(x, y)[1], loss)
    for parameter, expected in zip(head.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)


class Attention(nn.Module):
    """Attention whose scores exist, a tensor of (sequences, heads, tokens, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inputs, self.outputs = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, tokens, width = x.shape
        q, k, v = self.inputs(x).view(n, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1)
        return self.outputs((weights @ v).transpose(1, 2).reshape(n, tokens, width)).square().sum()


def test_exact_pieces_give_the_bits_of_the_plain_step() -> None:
    model, x = Attention(), torch.randn(8, 128, 32)
    loss = model(x)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    graph = checkmate.torch.capture(model, example=[x])
    with pytest.raises(InfeasibleBudgetError) as refused:
        checkmate.torch.compile(model, example=[x], budget=1, chunking="off")
    step = checkmate.torch.compile(model, example=[x], budget=int(0.5 * refused.value.floor_bytes), chunking="exact")
    assert any("in pieces" in remark for remark in step.result.remarks)
    assert graph.resident_bytes == step.graph.resident_bytes
    assert torch.equal(step(x)[1], loss)
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, expected)  # type: ignore[arg-type]


def test_exact_pieces_are_the_default() -> None:
    """A budget that whole ops cannot keep is kept, with the bits of the plain step and nothing to be asked for."""
    model = Language()
    loss, gradients = plain(model)
    compiled = torch.compile(model, backend="checkmate", options={"budget": int(0.6 * floor_of(model)), "time_limit_s": 4})
    for _ in range(2):
        mine = compiled(**batch())
        mine.backward()
        assert torch.equal(mine, loss)
        for parameter, expected in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, expected)  # type: ignore[arg-type]
        model.zero_grad(set_to_none=True)


def test_cheap_plans_of_whole_ops_are_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    """To look for regions and to test their bits takes seconds, and would gain little."""
    with caplog.at_level(logging.DEBUG, "checkmate.torch.chunking"):
        step = checkmate.torch.compile(Language(), example=batch(), budget="97%")
    assert 1 < step.result.overhead <= 1.1
    assert "groups of regions" not in caplog.text


def test_exact_cuts_no_sum() -> None:
    model = Language()
    loss, gradients = plain(model)
    least = floor_of(model)
    step = checkmate.torch.compile(model, example=batch(), budget=int(0.6 * least), chunking="exact")
    assert torch.equal(step(**batch())[1], loss)
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, expected)  # type: ignore[arg-type]
    with pytest.raises((InfeasibleBudgetError, PlanNotFoundError)):
        checkmate.torch.compile(model, example=batch(), budget=int(0.25 * least), chunking="exact")


@pytest.mark.parametrize("chunking", ["exact", pytest.param("auto", marks=pytest.mark.slow)])
def test_studies_know_pieces(chunking: Any) -> None:
    """A captured graph in pieces has the smallest budget of `compile`, and a curve."""
    model = Language()
    whole, graph = (checkmate.torch.capture(model, example=batch(), chunking=each) for each in ("off", chunking))
    assert "head_loss_in" in " ".join(op.name for op in graph.ops)
    smallest = checkmate.min_budget(graph)
    assert smallest.peak_bytes < 0.7 * checkmate.min_budget(whole).floor_bytes
    curve = checkmate.pareto(graph, points=3, limits=Limits(time_s=1.0))
    assert curve.points[0].budget_bytes < whole.resident_bytes + 0.7 * keep_all_bytes(whole)
    step = checkmate.torch.compile(model, example=batch(), budget=smallest.peak_bytes, chunking=chunking, time_limit_s=2.0)
    assert step.result.peak_bytes <= smallest.peak_bytes


def test_exact_pieces_cannot_be_captured_where_nothing_runs() -> None:
    for given in ({"costs": "estimated"}, {"device": "H100"}):
        with pytest.raises(OptionError, match="chunking='exact' cannot be answered"):
            checkmate.torch.capture(Language(), example=batch(), chunking="exact", **given)  # type: ignore[arg-type]


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(OptionError, match="chunking"):
        checkmate.torch.compile(Language(), example=batch(), budget="50%", chunking="sometimes")  # type: ignore[arg-type]


def test_explanations_name_what_runs_in_pieces() -> None:
    """By modules and numbers, not by the names of ops that are not there any more."""
    model = Language()
    step = checkmate.torch.compile(model, example=batch(), budget=int(0.6 * floor_of(model)), chunking="auto")
    text = str(checkmate.torch.explain(step))
    found = re.match(r"in pieces: head \+ loss, (\d+) pieces of (\d+)", text)
    assert found is not None
    assert int(found[1]) * int(found[2]) == TOKENS
    assert any(op.name.startswith(f"head_loss_in_{found[1]}_pieces") for op in step.graph.ops)
    assert "chunked_default" not in text


@pytest.mark.parametrize("chunking", ["off", pytest.param("exact", marks=pytest.mark.slow)])
def test_a_refusal_names_what_is_enough_in_pieces(chunking: Any) -> None:
    """Whoever follows the hint has a plan within that budget, below the smallest one without pieces."""
    with pytest.raises(InfeasibleBudgetError) as refused:
        checkmate.torch.compile(Language(), example=batch(), budget=1, chunking=chunking)
    assert refused.value.binding_op
    enough = re.search(r'with chunking="auto", which runs ops piece by piece, (\S+) is enough$', refused.value.hint)
    assert enough is not None
    assert parse_bytes(enough[1]) < 0.7 * refused.value.floor_bytes
    step = checkmate.torch.compile(Language(), example=batch(), budget=enough[1], chunking="auto")
    assert step.result.peak_bytes <= parse_bytes(enough[1])

    between = (parse_bytes(enough[1]) + refused.value.floor_bytes) // 2
    with pytest.raises(InfeasibleBudgetError, match="this budget is enough"):
        checkmate.torch.compile(Language(), example=batch(), budget=between, chunking=chunking)


def test_a_refusal_names_chunking_without_bytes_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = choose.ChunkChoices.captured

    def too_late(choices: Any, groups: Any) -> Any:
        choices._until = choices._until and 0.0
        return captured(choices, groups)

    with monkeypatch.context() as slow:
        slow.setattr(choose.ChunkChoices, "captured", too_late)
        with pytest.raises(InfeasibleBudgetError) as refused:
            checkmate.torch.compile(Language(), example=batch(), budget=1)
    assert refused.value.hint.endswith('; chunking="auto" may need less: it runs ops piece by piece')
    assert "raise the budget to at least" in str(refused.value)
    with pytest.raises((InfeasibleBudgetError, PlanNotFoundError)) as again:
        checkmate.torch.compile(Language(), example=batch(), budget=1, chunking="auto")
    assert "chunking" not in again.value.hint
