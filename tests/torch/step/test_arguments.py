"""Model, loss, optimizer and example are checked before anything is traced."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkmate.core.errors import GraphError, OptionError
from checkmate.torch import Options, capture, compile, fits, largest_batch, region_policy  # noqa: A004

X, Y = torch.ones(6, 4), torch.zeros(6, 2)
MSE = nn.functional.mse_loss


class Untraced(nn.Linear):
    def forward(self, _: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it was traced")


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
    "loss and optimizer swapped": ({"loss": torch.optim.SGD([torch.zeros(1)])}, "loss is an optimizer, SGD"),
    "loss of one argument": ({"loss": lambda p: p.sum()}, r"too many positional arguments, and it takes \(p\)"),
    "optimizer by name": ({"optimizer": "adamw"}, "optimizer='adamw' is not an optimizer"),
    "optimizer class": ({"optimizer": torch.optim.AdamW}, "optimizer=AdamW is a class"),
    "a loader": ({"example": iter([(X, Y)])}, "example=list_iterator is not a batch"),
    "no target": ({"example": (X,)}, "1 of at least 2 elements is not a batch"),
    "numbers in lists": ({"example": (torch.ones(64, 4).tolist(), Y)}, "256 numbers in lists"),
    "no sample": ({"example": (X[:0], Y[:0])}, r"example has no sample: 2 arguments: float32 \(0, 4\)"),
    "a lazy module": ({"model": nn.LazyLinear(2)}, "the model's 'weight' is of a lazy module"),
    "a pair for two arguments": ({"model": Two(), "example": ((X, X), Y)}, "missing a required argument: 'b'"),
    "no loss": ({"loss": None}, "too many positional arguments"),
    "LBFGS": ({"optimizer": torch.optim.LBFGS([torch.zeros(1)])}, "optimizer=LBFGS runs the model as often as it likes"),
    "a backward hook": ({"model": hooked()}, "module '0' has a backward hook"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("verb", [compile, capture, largest_batch, fits])
def test_a_mistake_is_told_before_anything_is_traced(mistake: str, verb: Callable[..., Any]) -> None:
    """Whoever asks has the answer at once, in one sentence with what to do, and no traceback of a framework."""
    given, words = MISTAKES[mistake]
    if verb is fits and given.get("optimizer") == "adamw":
        pytest.skip("fits knows optimizers by name")
    model = given.get("model", Untraced(4, 2))
    arguments = {"loss": nn.functional.mse_loss, "example": (X, Y), **given}
    arguments |= {largest_batch: {"budget": "1GiB"}, fits: {"device": "H100"}}.get(verb, {})
    with pytest.raises(OptionError, match=words) as error:
        verb(**{**arguments, "model": model})
    assert error.value.hint and "\n" not in error.value.message
    assert error.value.__context__ is None or error.value.__suppress_context__


def test_arguments_by_position_are_named() -> None:
    """The signature of the call is known to whoever wrote it, and not to whoever guesses it."""
    with pytest.raises(OptionError, match=r"hint: name the others: .*example=\(x, y\)"):
        compile(nn.Linear(4, 2), nn.functional.mse_loss, None, (X, Y), "50%")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"no example is given: .*\n\nhint: write example=\(x, y\)"):
        compile(nn.Linear(4, 2), nn.functional.mse_loss)
    with pytest.raises(OptionError, match="1 more were given"):
        compile(nn.Linear(4, 2), nn.functional.mse_loss, None, "50%", example=(X, Y))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"buget": "50%"}, "unknown option 'buget' of checkmate.torch.compile; the nearest known one is 'budget'"),
        ({"time_limit": 5}, "the nearest known one is 'time_limit_s'"),
        ({"clip_grad_norm": 1.0}, "the nearest known one is 'clip_norm'"),
        ({"budget_gb": 8}, "write budget='8GiB'"),
        ({"options": {"budget": "50%"}}, "write each option by its name"),
        ({"fullgraph": True}, "leave it out: a step is always one graph"),
        ({"backend": "inductor"}, "leave it out; compiler='inductor'"),
        ({"unplanned": "warn"}, "leave it out: it is an option of torch.compile"),
        ({"whole": "yes"}, "whole='yes' is not one of True, False, None"),
        ({"dynamic": "yes"}, "dynamic='yes' is not one of True, False"),
        ({"clip_norm": True}, "clip_norm=True must be a number above zero"),
        ({"clip_norm": "1"}, "clip_norm='1' must be a number above zero"),
        ({"compiler": "tvm"}, "compiler='tvm' is not one of eager, inductor"),
    ],
)
def test_a_wrong_option_is_told_with_what_may_be_meant(option: dict[str, Any], words: str) -> None:
    """Names come from other libraries, and types from files of settings."""
    with pytest.raises(OptionError) as error:
        compile(nn.Linear(4, 2), MSE, example=(X, Y), **option)
    assert words in str(error.value)


def test_what_a_step_has_not_is_asked_of_what_has_it() -> None:
    """A step takes the place of model, loss and optimizer in a loop. Its plan is taken for another one."""
    step = compile(nn.Linear(4, 2), MSE, example=(X, Y), costs="estimated")
    with pytest.raises(AttributeError, match=r"a step has no 'state_dict'; write model\.state_dict"):
        step.state_dict()  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"a step has no 'peak_bytes'; write step\.result\.peak_bytes"):
        step.peak_bytes  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(step, "fit")
    assert compile(nn.Linear(4, 2), MSE, example=(X, Y), costs="estimated", plan=step).plan.order == step.plan.order  # type: ignore[arg-type]


def test_a_batch_of_another_type_is_told_as_that() -> None:
    """Tensors without data take it; the kernel does not."""
    with pytest.raises(GraphError, match=r"hint: convert what is float64, such as x\.to\(torch\.float32\)"):
        compile(nn.Linear(4, 2), MSE, example=(X.double(), Y))


def test_a_model_without_data_is_not_compiled_and_can_be_captured() -> None:
    """It could be traced, and would then fail in its first op."""
    with torch.device("meta"):
        model = nn.Linear(4, 2)
    with pytest.raises(OptionError, match="'weight' is on the meta device"):
        compile(model, nn.functional.mse_loss, example=(X, Y))
    assert capture(model, nn.functional.mse_loss, example=(X, Y), costs="estimated").ops


def test_a_model_of_inference_mode_is_not_compiled() -> None:
    """No update can write to its parameters, which the first step would tell."""
    with torch.inference_mode():
        model = nn.Linear(4, 2)
    with pytest.raises(OptionError, match=r"'weight' was made under torch.inference_mode\(\)"):
        compile(model, nn.functional.mse_loss, example=(X, Y))


def test_a_forgotten_loss_is_asked_for() -> None:
    """The example then has one element more than the model takes."""
    with pytest.raises(OptionError) as error:
        compile(nn.Linear(4, 2), example=(X, Y))
    assert "give the loss that the last element is the target of" in error.value.hint


OWN_ERRORS: dict[str, tuple[Any, str]] = {
    "no number": (nn.MSELoss(reduction="none"), r"the loss has shape \(6, 2\), and is not one number"),
    "an error": (lambda p, y: {}["key"], r"model and loss raise KeyError: 'key', at .*test_arguments.py:\d+: `"),
    "labels of floats": (nn.functional.cross_entropy, r"Expected dtype int32/int64 for index, but got torch.float32"),
    "a tuple": (lambda p, y: (MSE(p, y), p), "the loss is a tuple, and not a tensor"),
    "a mapping": (lambda p, y: {"loss": MSE(p, y)}, "the loss is a dict, and not a tensor"),
    "nothing": (lambda p, y: None, "the loss is a NoneType, and not a tensor"),
    "a float": (lambda p, y: MSE(p, y).item(), "the loss is a float, and not a tensor"),
    "detached": (lambda p, y: MSE(p.detach(), y), "nothing in this step requires a gradient"),
    "a backward": (lambda p, y: (loss := MSE(p, y), loss.backward())[0], r"model or loss call backward\(\)"),
}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("mistake", OWN_ERRORS)
def test_an_error_of_the_users_own_code_is_told_as_that(mistake: str, whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    """It has nothing to do with tracing: the plain step raises it too. Torch's traceback does not come before it."""
    loss, words = OWN_ERRORS[mistake]
    model, y = nn.Linear(4, 2), torch.zeros(6) if mistake == "labels of floats" else Y
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if whole else None
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    with pytest.raises((OptionError, GraphError), match=words) as error:
        compile(model, loss, optimizer, example=(X, y), costs="estimated")
    log.removeHandler(caplog.handler)
    assert error.value.__suppress_context__ or error.value.__context__ is None
    assert error.value.hint and "\n" not in error.value.message
    assert not caplog.records


@pytest.mark.parametrize("whole", [True, False])
def test_a_batch_on_another_device_is_told(whole: bool) -> None:
    """It is often the CPU, where a loader makes it. The meta device stands for the other one here."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if whole else None
    with pytest.raises(OptionError, match="model and batch are on two devices, meta and cpu"):
        compile(model, MSE, optimizer, example=(X.to("meta"), Y.to("meta")), costs="estimated")


def test_a_number_of_the_model_is_no_loss() -> None:
    """Such as one of `Tensor.item`, which is another object while it is traced."""

    class Mean(nn.Linear):
        def forward(self, input: torch.Tensor) -> float:  # type: ignore[override]  # noqa: A002
            return super().forward(input).mean().item()

    with pytest.raises(OptionError, match="the model returned a float without a loss"):
        compile(Mean(4, 2), example=(X,), costs="estimated")


def test_a_layer_frozen_after_compilation_is_told() -> None:
    """The updates in the graph are those of all parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    step = compile(model, MSE, torch.optim.SGD(model.parameters(), 0.1), example=(X, Y), costs="estimated")
    model[0].requires_grad_(False)
    with pytest.raises(OptionError, match="does not require a gradient any more"):
        step(X, Y)


def test_clipping_after_a_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """No gradient is left then, so that it would clip nothing, in silence."""
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    options: dict[str, Any] = {"loss": nn.functional.mse_loss, "example": (x, x), "costs": "estimated"}

    def train(**more: Any) -> None:
        step = compile(model, optimizer=torch.optim.SGD(model.parameters()), **options, **more)
        for _ in range(2):
            step(x, x)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    train(clip_norm=1.0)
    assert "clip_grad_norm_" not in caplog.text
    train()
    train(whole=False)
    assert caplog.text.count("clip_grad_norm_ is named in") == 2


@pytest.mark.parametrize("verb", [compile, capture, largest_batch, fits, region_policy])
def test_a_signature_shows_every_option_with_its_default(verb: Callable[..., Any]) -> None:
    """Help, documentation and editors read it."""
    parameters = inspect.signature(verb).parameters
    assert {"model", "loss", "example", "autocast"} < parameters.keys() and "options" not in parameters
    assert all(p.default is not dataclasses.MISSING for p in parameters.values())
    options = Options() if verb in (compile, capture) else None
    for name in ("outputs", "reserve", "compiler", "time_limit_s", "mode") if options else ():
        assert name not in parameters or parameters[name].default == getattr(options, name)


PROGRAM = """
import torch
import checkmate.torch

model = torch.nn.Linear(4, 2)
batch = torch.ones(3, 4), torch.zeros(3, 2)
mse = torch.nn.functional.mse_loss
step: checkmate.torch.Step = checkmate.torch.compile(model, mse, example=batch, budget="8GiB", compiler="inductor", whole=True)
checkmate.torch.compile(model, mse, example=batch, compiler="tvm")
checkmate.torch.compile(model, mse, example=batch, budgt="8GiB")
checkmate.torch.capture(model, mse, example=batch, micro_batches="2")
checkmate.torch.fits(model, mse, example=batch, device="H100", host="1GiB", time_limit_s=5)
checkmate.torch.fits(model, mse, example=batch, device="H100", compiler="eager")
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_options(tmp_path: Path) -> None:
    """Names and values are checked while they are written."""
    pytest.importorskip("pyright")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(Path(__file__).parents[3] / "src")]}))
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "-p", tmp_path], capture_output=True, text=True, check=False
    )
    errors = [d for d in json.loads(done.stdout)["generalDiagnostics"] if d["severity"] == "error"]
    wrong = [n for n, line in enumerate(PROGRAM.splitlines()) if any(w in line for w in ("tvm", "budgt", '"2"', '"eager"'))]
    assert [d["range"]["start"]["line"] for d in errors] == wrong
