"""Model, loss, optimizer and example are checked before anything is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.core.errors import OptionError
from checkmate.torch import capture, compile, fits, largest_batch  # noqa: A004
from checkmate.torch.step import tracing

X, Y = torch.ones(6, 4), torch.zeros(6, 2)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a + b)


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 2))
    model[0].register_full_backward_hook(lambda *_: None)
    return model


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a function as model": ({"model": lambda x: x}, "model=<lambda> is not a module"),
    "loss by name": ({"loss": "cross_entropy"}, "loss='cross_entropy' cannot be called"),
    "loss class": ({"loss": nn.MSELoss}, "loss=MSELoss is a class"),
    "loss of one argument": ({"loss": lambda p: p.sum()}, r"too many positional arguments, and it takes \(p\)"),
    "optimizer by name": ({"optimizer": "adamw"}, "optimizer='adamw' is not an optimizer"),
    "optimizer class": ({"optimizer": torch.optim.AdamW}, "optimizer=AdamW is a class"),
    "a loader": ({"example": iter([(X, Y)])}, "example=list_iterator is not a batch"),
    "no target": ({"example": (X,)}, "1 of at least 2 elements is not a batch"),
    "numbers in lists": ({"example": (torch.ones(64, 4).tolist(), Y)}, "256 numbers in lists"),
    "a pair for two arguments": ({"model": Two(), "example": ((X, X), Y)}, "missing a required argument: 'b'"),
    "no loss": ({"loss": None}, "too many positional arguments"),
    "a backward hook": ({"model": hooked()}, "module '0' has a backward hook"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("verb", [compile, capture, largest_batch, fits])
def test_a_mistake_is_told_before_anything_is_traced(
    mistake: str, verb: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks has the answer at once, in one sentence with what to do, and no traceback of a framework."""
    monkeypatch.setattr(tracing, "run_as_one_graph", None)
    given, words = MISTAKES[mistake]
    if verb is fits and given.get("optimizer") == "adamw":
        pytest.skip("fits knows optimizers by name")
    model = given.get("model", nn.Linear(4, 2))
    arguments = {"loss": nn.functional.mse_loss, "example": (X, Y), **given}
    arguments |= {largest_batch: {"budget": "1GiB"}, fits: {"device": "H100"}}.get(verb, {})
    with pytest.raises(OptionError, match=words) as error:
        verb(**{**arguments, "model": model})
    assert error.value.hint and "\n" not in error.value.message
    assert error.value.__context__ is None or error.value.__suppress_context__


def test_arguments_by_position_are_named() -> None:
    """The signature of the call is known to whoever wrote it, and not to whoever guesses it."""
    with pytest.raises(TypeError, match="'example'"):
        compile(nn.Linear(4, 2), nn.functional.mse_loss, None, (X, Y), "50%")  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="1 more were given"):
        compile(nn.Linear(4, 2), nn.functional.mse_loss, None, "50%", example=(X, Y))  # type: ignore[arg-type]


def test_a_model_without_data_is_not_compiled_and_can_be_captured() -> None:
    """It could be traced, and would then fail in its first op."""
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    with pytest.raises(OptionError, match="'weight' is on the meta device"):
        compile(model, nn.functional.mse_loss, example=(X, Y))
    assert capture(model, nn.functional.mse_loss, example=(X, Y), costs="estimated").ops


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (nn.MSELoss(reduction="none"), r"the loss has shape \(6, 2\), and is not one number"),
        (lambda p, y: {}["key"], r"model and loss raise KeyError: 'key', at .*test_arguments.py:\d+: `"),
    ],
    ids=["no number", "an error"],
)
def test_an_error_of_the_users_own_code_is_told_as_that(loss: Any, words: str) -> None:
    """It has nothing to do with tracing: the plain step raises it too."""
    with pytest.raises(OptionError, match=words) as error:
        compile(nn.Linear(4, 2), loss, example=(X, Y), costs="estimated")
    assert error.value.__suppress_context__ or error.value.__context__ is None
