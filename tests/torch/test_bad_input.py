"""What cannot be done is said in words, and leaves the model as it was."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from checkmate import InfeasibleBudgetError, OptionError, PlanError, UnitError, WrongGraphError
from checkmate.torch import GraphBreakError
from tests.torch.networks import Cnn, input_of, mlp
from tests.torch.steps import ROOMY, Forgetful, compiled, observe, recomputes


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"budgt": "8GiB"}, OptionError, "unknown option 'budgt'.*nearest known one is 'budget'"),
        ({"budget": "8 apples"}, UnitError, "apples"),
        ({"budget": "plenty"}, UnitError, "cannot read 'plenty'"),
        ({"compiler": "tvm"}, OptionError, "'tvm' is not one of eager, inductor"),
        ({"outputs": "lost"}, OptionError, "outputs='lost' is not one of held, released"),
        ({"solver": "oracle"}, OptionError, "no solver 'oracle'"),
        ({"time_limit_s": 0}, OptionError, "time_limit_s=0"),
        ({"accumulate": 4}, OptionError, "accumulate=4 is not one of True, False"),
        ({"plan": 3}, OptionError, "plan=3 is no plan"),
        (
            {"clip_norm": 1.0},
            OptionError,
            "unknown option 'clip_norm' of backend 'checkmate'\n\nhint: give it to checkmate.torch.comp",
        ),
        ("50%", OptionError, "options='50%' is not a mapping"),
        ({"reserve": "10%"}, UnitError, "'10%' is a share.*\n\nhint: write an amount such as '8GiB', '512 MB', or"),
    ],
)
def test_a_wrong_option_reaches_the_user_as_it_is(options: Any, error: type[Exception], words: str) -> None:
    """Dynamo wraps what a backend raises; ours comes before the first call, with its own type and message."""
    with pytest.raises(error, match=words) as caught:
        torch.compile(mlp(), backend="checkmate", options=options)
    assert type(caught.value) is error


def test_a_model_without_data_is_told() -> None:
    """Dynamo says it in twenty lines."""
    run = torch.compile(mlp().to("meta"), backend="checkmate", options={"budget": "50%"})
    with pytest.raises(OptionError, match="model and batch are on two devices, cpu and meta") as caught:
        run(input_of("dropout"))
    assert caught.value.__suppress_context__


def test_an_impossible_budget_leaves_the_model_untouched() -> None:
    """Planning happens before anything runs."""
    model, x = Cnn(), input_of("batch_norm", 512)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    run = torch.compile(model, backend="checkmate", options={"budget": "100KiB"})
    with pytest.raises(InfeasibleBudgetError, match="the smallest budget a plan was found for is") as caught:
        run(x)
    assert caught.value.floor_bytes <= (caught.value.smallest_bytes or 0)
    assert re.search("hint: this graph alone needs at least [0-9.]+[KM]iB", str(caught.value))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(state, torch.get_rng_state())


def test_the_hinted_budget_works() -> None:
    """A hint that does not help is worse than none."""
    model, x = mlp(2), input_of("dropout", 1024)
    with pytest.raises(InfeasibleBudgetError) as caught:
        compiled(lambda: model(x).mean(), budget="10KiB", time_limit_s=2)[0]()
    amount = re.findall(r"at least ([0-9.]+[KMG]iB)", caught.value.hint)[0]
    run, planned = compiled(lambda: model(x).mean(), budget=amount, time_limit_s=2)
    run().backward()
    assert planned[-1][1].peak_bytes <= checkmate.parse_bytes(amount)


def test_the_named_budget_works_while_its_refusal_is_handled() -> None:
    """The frames of a refused compilation would hold its tensors, such as a scalar for each Python number of the program."""

    def loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (0.5 * prediction * (1.0 + torch.tanh(0.8 * prediction)) - target).square().mean()

    x = input_of("dropout", 256)
    model = mlp(2)
    options: dict[str, Any] = {"example": (x, x), "time_limit_s": 2}
    with pytest.raises(InfeasibleBudgetError) as handled:
        checkmate.torch.compile(model, loss, budget="10KiB", **options)
    step = checkmate.torch.compile(model, loss, budget=handled.value.smallest_bytes, **options)
    assert step.result.peak_bytes <= handled.value.smallest_bytes


def test_a_plan_of_another_graph_is_refused(tmp_path: Path) -> None:
    """A plan is exact for its graph only."""
    model, x = mlp(), input_of("dropout")
    graph = checkmate.torch.capture(mlp(2), nn.functional.mse_loss, example=(x, x))
    path = tmp_path / "other.plan.json"
    checkmate.write(checkmate.Plan.from_order(graph, range(len(graph.ops))), path)
    with pytest.raises(WrongGraphError, match="made for another graph"):
        compiled(lambda: model(x).mean(), plan=str(path))[0]()


def test_a_plan_over_the_budget_is_refused() -> None:
    """The budget is a promise, whoever made the plan."""
    model, x = mlp(), input_of("dropout")
    step = checkmate.torch.compile(model, nn.functional.mse_loss, example=(x, x))
    with pytest.raises(PlanError, match="the plan needs"):
        checkmate.torch.compile(model, nn.functional.mse_loss, example=(x, x), plan=step.plan, budget="10KiB")


def test_a_graph_break_is_told_with_its_reason() -> None:
    """A step that is two graphs has no one plan."""

    def loss(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return nn.functional.mse_loss(prediction, target)

    x = input_of("dropout")
    with pytest.raises(GraphBreakError, match=r"cannot be traced as one graph: .*, at .*test_bad_input\.py:\d+: .*graph_break"):
        checkmate.torch.capture(mlp(), loss, example=(x, x))


def test_a_step_without_gradients_is_refused() -> None:
    """There is no backward to plan."""
    model, x = mlp().requires_grad_(False), input_of("dropout")
    with pytest.raises(checkmate.GraphError, match="nothing in this step requires a gradient"):
        checkmate.torch.capture(model, nn.functional.mse_loss, example=(x, x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_sparse_gradients_are_refused_and_the_hint_works() -> None:
    """How many rows a sparse gradient has depends on the data. Out of the graph, the embedding keeps its own."""
    table, model = nn.Embedding(100, 64, sparse=True), mlp()
    both, ids = nn.ModuleList([table, model]), torch.arange(512).view(64, 8) % 90

    def loss(embed: Callable[..., torch.Tensor]) -> torch.Tensor:
        return model(embed(ids)).square().mean()

    with pytest.raises(checkmate.GraphError, match="is a sparse tensor") as caught:
        compiled(lambda: loss(table), budget=ROOMY)[0]()
    assert "torch.compiler.disable(embedding)" in str(caught.value.hint)
    torch._dynamo.reset()
    outside = torch.compiler.disable(table)
    eager = observe(both, lambda: loss(table))
    run, planned = compiled(lambda: loss(outside), fullgraph=False, budget=ROOMY, solver=Forgetful())
    found = observe(both, run)
    for result in (eager, found):
        result.gradients[:] = [None if g is None else g.to_dense() for g in result.gradients]
    assert eager.differs(found) == []
    assert recomputes(planned) > 5
    run().backward()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse


def test_double_backward_is_refused_by_torch() -> None:
    """AOTAutograd has no second derivative; its error says so."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh()), input_of("dropout").requires_grad_()
    run, _ = compiled(lambda: model(x).square().mean())
    (gradient,) = torch.autograd.grad(run(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (None, "is not a batch"),
        ((), "no example is given: an input and a target must be in it"),
        ((torch.ones(2),), "is not a batch"),
        (torch.ones(2), "is not a batch"),
    ],
)
def test_an_example_must_be_a_batch(example: Any, said: str) -> None:
    """An input and a target, in that order."""
    with pytest.raises(OptionError, match=said):
        checkmate.torch.capture(mlp(), nn.functional.mse_loss, example=example)
