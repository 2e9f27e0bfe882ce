"""Calls of a step are compared with its example before they are traced, and what is wrong is told in a sentence."""

from __future__ import annotations

import functools
import operator
import pickle
from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.core.errors import GraphError, OptionError
from checkmate.torch import Step, compile  # noqa: A004
from checkmate.torch.step.arguments import BatchLayout

X, Y = torch.ones(6, 4), torch.zeros(6, 2)
IDS = torch.arange(12).reshape(3, 4)


class Output(dict[str, Any]):
    """A mapping with attributes, as a library's output object is one."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclass
class Logits:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    past_key_values: Any = None
    layers: tuple[torch.Tensor, ...] = ()
    temperature: float = 1.0


class Language(nn.Module):
    """A model that computes its loss, with an output object of Hugging Face's kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 8), nn.Linear(8, 12)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Logits:
        hidden = self.embed(ids)
        logits = self.head(hidden)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return Logits(logits, loss, past_key_values=(hidden,), layers=(hidden,))


def step_of(**options: Any) -> Step:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return compile(model, nn.functional.mse_loss, optimizer, example=(X, Y), costs="estimated", **options)


@pytest.fixture(scope="module")
def step() -> Step:
    return step_of()


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        (
            (X,),
            {},
            r"called with 1 argument: float32 \(6, 4\), and its example was 2 arguments: float32 \(6, 4\), float32 \(6, 2\)",
        ),
        ((), {"x": X, "y": Y}, r"called with 2 arguments: x=float32 \(6, 4\), y=float32 \(6, 2\)"),
        ((X, Y, Y), {}, "called with 3 arguments"),
        ((X.tolist(), Y), {}, "argument 1 of the step is a list, and that of the example is a tensor"),
        ((X[:3], Y), {}, r"raise RuntimeError: .*called with 2 arguments: float32 \(3, 4\).*the example was .*\(6, 4\)"),
        ((X[:, :3], Y), {}, r"raise RuntimeError: .*called with 2 arguments: float32 \(6, 3\)"),
    ],
    ids=["one less", "keywords", "one more", "a list", "rows", "columns"],
)
def test_a_call_that_is_not_like_the_example_is_told_so(
    step: Step, args: tuple[Any, ...], kwargs: dict[str, Any], words: str
) -> None:
    """Dynamo would tell of a graph break in our code, or of fake tensors in sixty lines."""
    with pytest.raises(OptionError, match=words) as error:
        step(*args, **kwargs)
    assert error.value.__suppress_context__ or error.value.__context__ is None
    assert error.value.hint


def test_a_batch_may_come_in_one_piece(step: Step) -> None:
    """A data loader yields tuples."""
    for batch in ((X, Y), [X, Y]):
        prediction, loss = step(batch)
        assert prediction.shape == Y.shape and loss.ndim == 0


def test_a_step_of_one_element_takes_a_tuple_as_that_element() -> None:
    """A model may have one argument that is a tuple of two tensors."""
    layout = BatchLayout.of(((X, Y),))
    assert layout.batch_of(((Y, X),), {}) == ((Y, X),)
    assert BatchLayout.of(((X, X), Y)).batch_of((((X, X), Y),), {}) == ((X, X), Y)


def test_a_mapping_comes_by_keyword_or_in_one_piece() -> None:
    """`model(**batch)` is how such models are called, and a data loader yields the mapping."""
    model = Language()
    step = compile(
        model, optimizer=torch.optim.SGD(model.parameters(), 0.1), example={"ids": IDS, "labels": IDS}, costs="estimated"
    )
    compiled = len(step._compiled.planned)
    for batch in ({"labels": IDS, "ids": IDS}, UserDict(ids=IDS, labels=IDS)):
        assert isinstance(step(batch), Logits)
    assert isinstance(step(ids=IDS, labels=IDS), Logits)
    assert len(step._compiled.planned) == compiled  # the order of the keywords changes nothing
    for wrong in ({"ids": IDS}, {"ids": IDS, "labels": IDS, "mask": IDS}):
        with pytest.raises(OptionError, match="its example was 2 arguments: ids="):
            step(**wrong)
    with pytest.raises(OptionError, match="called with 2 arguments: int64"):
        step(IDS, IDS)


@pytest.mark.parametrize("options", [{}, {"whole": False}, {"micro_batches": 3}], ids=["whole", "split", "micro-batches"])
def test_a_model_that_computes_its_loss_returns_its_own_output(options: dict[str, Any]) -> None:
    """Scripts read `.loss` and `.logits` of it. Its tensors are those of the plain step to the bit, and hold no graph."""
    torch.manual_seed(0)
    model = Language()
    parts = [model(rows, rows) for rows in IDS.chunk(options.get("micro_batches", 1))]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = compile(model, optimizer=optimizer, example={"ids": IDS, "labels": IDS}, costs="estimated", **options)
    output = step(ids=IDS, labels=IDS)
    assert torch.equal(output.logits, torch.cat([part.logits for part in parts]))
    assert torch.equal(output.layers[0], torch.cat([part.layers[0] for part in parts]))
    losses = [part.loss / len(parts) for part in parts if part.loss is not None]
    assert torch.equal(output.loss, functools.reduce(operator.add, losses))
    assert not output.logits.requires_grad and not output.loss.requires_grad
    assert output.past_key_values is None and output.temperature == 1.0


def test_an_output_costs_the_memory_that_it_takes() -> None:
    """What the step returns stays to its end, so that the planner counts it; who needs the loss alone can say so."""
    model = Language()
    arguments: dict[str, Any] = {"example": {"ids": IDS, "labels": IDS}, "costs": "estimated"}
    held, released = compile(model, **arguments), compile(model, **arguments, outputs="released")

    def returned(step: Step) -> int:
        boundary = step.graph.ops[step.graph.boundary or 0]
        return sum(step.graph.values[v].size_bytes for v in {step.graph.root[v] for v in boundary.inputs})

    assert returned(held) >= returned(released) + 4 * IDS.numel() * (12 + 8)
    prediction, loss = released(ids=IDS, labels=IDS)
    assert prediction is None and loss.ndim == 0


def test_a_loss_is_found_in_what_models_return() -> None:
    """A tuple with one number in it, and a mapping, are as common as an object with `.loss`."""

    class Model(nn.Linear):
        def __init__(self, made: Any) -> None:
            super().__init__(4, 2)
            self.made = made

        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            y = super().forward(x)
            return self.made(y, y.square().mean())

    for made, where in ((lambda y, loss: (y, loss), 1), (lambda y, loss: {"logits": y, "loss": loss}, "loss")):
        model = Model(made)
        step = compile(model, optimizer=torch.optim.SGD(model.parameters(), 0.1), example=(X,), costs="estimated")
        expected = model(X)[where]
        assert torch.equal(step(X)[where], expected)
    with pytest.raises(OptionError, match="returned a tuple without a loss"):
        compile(Model(lambda y, loss: (y, y)), example=(X,), costs="estimated")


def test_a_dataclass_is_detached() -> None:
    """PyTorch knows no dataclass as a container, and its tensors would hold the graph of the step."""

    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> Logits:  # type: ignore[override]
            return Logits(super().forward(x))

    model = Model(4, 2)

    def loss(output: Logits, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output.logits, y)

    prediction, _ = compile(model, loss, torch.optim.SGD(model.parameters(), 0.1), example=(X, Y), costs="estimated")(X, Y)
    assert isinstance(prediction, Logits) and not prediction.logits.requires_grad


def test_a_step_runs_under_no_grad_and_not_under_inference_mode(step: Step) -> None:
    """It switches gradients on; tensors of inference mode can have none."""
    with torch.no_grad():
        step(X, Y)
    with torch.inference_mode():
        with pytest.raises(OptionError, match=r"under torch.inference_mode"):
            step(X, Y)
        with pytest.raises(OptionError, match=r"under torch.inference_mode"):
            step_of()


def test_a_step_is_not_pickled(step: Step) -> None:
    """What pickle would say names a function inside ours."""
    with pytest.raises(OptionError, match="neither be copied nor pickled"):
        pickle.dumps(step)


def test_types_that_do_not_fit_are_told_with_the_op_and_its_place() -> None:
    """Fake tensors take them: without the check a step is planned that fails when it runs."""
    with pytest.raises(GraphError, match=r"addmm.* of float64, float32, float64 cannot run: .*dtype"):
        compile(nn.Linear(4, 2).double(), nn.functional.mse_loss, example=(X, Y))
