"""What a step takes on a device that is not there: what the processor can measure is measured, the rest held to PyTorch's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import OptionError
from checkmate.torch import measure_peak
from checkmate.torch.forecast.tracer import OPTIMIZERS, optimizer_class
from tests.torch.networks import NETWORKS, Cnn, input_of
from tests.torch.steps import child

aten = torch.ops.aten


def predicted_and_measured(names: Sequence[str], optimizer: str, whole: bool | None) -> dict[str, tuple[int, int]]:
    """Of each network, the bytes of a step that `fits` predicts, and those that its parameters, state, batch and peak take."""
    found = {}
    for name in names:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, x, y = nn.Sequential(NETWORKS[name](), nn.Flatten(0)), input_of(name, 1024), torch.ones(())
        given: dict[str, Any] = {"example": (x, y), "whole": whole}
        answer = checkmate.torch.fits(model, squares, device="CPU", optimizer=optimizer, time_limit_s=2.0, **given)
        trained = OPTIMIZERS[optimizer](model.parameters())
        torch._dynamo.reset()
        step = checkmate.torch.compile(model, squares, trained, **given)
        _, last = step(x, y), step(x, y)
        state = [t for s in trained.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        there = [
            t.untyped_storage() for t in (*model.parameters(), *model.buffers(), *state, x, y, *(last if step.whole else ()))
        ]
        held = sum({s._cdata: s.nbytes() for s in there}.values())
        found[name] = (answer.keep_all_bytes, held + measure_peak(lambda step=step, x=x, y=y: step(x, y)))
    return found


def squares(prediction: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return prediction.square().mean() * scale


def check_predictions(found: dict[str, tuple[int, int]]) -> None:
    for name, (predicted, measured) in found.items():
        assert abs(predicted - measured) <= 0.01 * measured, name


def test_the_predicted_total_is_the_measured_one() -> None:
    """On what a processor can measure: parameters, state, batch and the peak of a step, to one per cent."""
    check_predictions(predicted_and_measured(("batch_norm",), "adamw", None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "whole", "names"),
    [
        ("adamw", None, ("dropout", "batch_norm")),
        ("adamw", None, ("attention",)),
        ("momentum", None, ("tied", "in_place", "views", "custom_function")),
        ("sgd", None, ("dropout", "attention", "batch_norm")),
        ("adam", False, ("dropout", "attention", "batch_norm", "tied")),
    ],
)
def test_the_predicted_total_is_the_measured_one_in_a_fresh_process(
    optimizer: str, whole: bool | None, names: tuple[str, ...]
) -> None:
    """For every kind of network and of optimizer, and with its updates outside of the plan."""
    code = f"""
import json, torch
torch.set_num_threads(1)
from tests.torch.forecast.test_fits import predicted_and_measured
print(json.dumps(predicted_and_measured({names!r}, {optimizer!r}, {whole!r})))
"""
    check_predictions(child(code))


LAYERS = 2
ALONE_S = 2.0
"""A time limit that is too short for the largest batch to be looked for."""


def ask(memory: str | None = None, **options: object) -> checkmate.torch.Fits:
    with torch.device("meta"):
        model = nn.Sequential(*[m for _ in range(LAYERS) for m in (nn.Linear(256, 256), nn.GELU())])
        x = torch.empty(4096, 256)
    given = {"device": "A100", "optimizer": "adamw", "time_limit_s": 6.0, "headroom": 0.0, "memory": memory, **options}
    return checkmate.torch.fits(model, nn.functional.mse_loss, example=(x, x), **given)


@pytest.fixture(scope="module")
def roomy() -> checkmate.torch.Fits:
    torch._dynamo.reset()
    return ask(time_limit_s=ALONE_S)


def test_what_fits_keeping_everything_says_so(roomy: checkmate.torch.Fits) -> None:
    """The plan then computes every op once."""
    assert roomy
    assert roomy.verdict == "keeps everything"
    assert roomy.result is not None
    assert roomy.result.overhead == 1.0
    assert roomy.keep_all_bytes == keep_all_bytes(roomy.graph)
    parameters = LAYERS * (256 * 256 + 256) * 4
    assert (roomy.parameter_bytes, roomy.state_bytes, roomy.whole) == (parameters, 2 * parameters, True)
    assert roomy.remarks[0].startswith("nothing was measured")
    assert "keeps everything: 1.000x" in str(roomy)


def test_between_smallest_and_keep_all_ops_are_computed_again(roomy: checkmate.torch.Fits) -> None:
    """The plan keeps what is available: memory less context and headroom."""
    context = roomy.device.context_bytes
    between = (roomy.smallest_bytes + roomy.keep_all_bytes) // 2
    answer = ask(f"{context + between}B", time_limit_s=ALONE_S)
    assert answer.available_bytes == between
    assert answer.verdict == "fits with recomputation"
    assert answer.result is not None
    assert answer.result.plan is not None
    assert answer.result.overhead > 1
    assert checkmate.validate(answer.graph, answer.result.plan, between) == ()


def test_below_the_floor_nothing_fits_and_it_is_proven(roomy: checkmate.torch.Fits) -> None:
    """No plan is looked for where none can be."""
    answer = ask(f"{roomy.device.context_bytes + roomy.floor_bytes - 1}B")
    assert not answer
    assert answer.verdict == "does not fit"
    assert answer.result is None
    assert answer.largest_batch is None or answer.largest_batch.batch < 4096


def test_the_largest_batch_fits_and_the_first_proven_too_large_does_not(roomy: checkmate.torch.Fits) -> None:
    """It is found on a line through two traces; a trace at that batch confirms it."""
    answer = ask(f"{roomy.device.context_bytes + 2 * roomy.keep_all_bytes}B", time_limit_s=12.0)
    largest = answer.largest_batch
    assert largest is not None
    assert 4096 < largest.batch <= largest.upper_bound
    assert largest.result.peak_bytes is not None
    assert largest.result.peak_bytes <= answer.available_bytes


def test_a_plain_loop_needs_all_gradients_at_once() -> None:
    """Parameters, gradients, state and what the optimizer's step makes: whatever the plan of forward and backward."""
    whole, plain = ask(time_limit_s=ALONE_S), ask(time_limit_s=ALONE_S, whole=False)
    assert (whole.whole, plain.whole) == (True, False)
    gradients = temporaries = plain.parameter_bytes
    assert plain.smallest_bytes >= plain.graph.resident_bytes + gradients + temporaries


def test_an_optimizer_is_known_by_name_in_letters_of_any_case() -> None:
    """As torch writes it, too."""
    assert optimizer_class("AdamW") is torch.optim.AdamW is optimizer_class("adamw")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "H1000"}, "no device 'H1000'"),
        ({"optimizer": "adamx"}, "no optimizer 'adamx' is known by name"),
        ({"memory": "100MiB"}, "leave nothing"),
        ({"headroom": 1.5}, "headroom=1.5"),
        ({"sequence_dim": 5}, "sequence_dim=5"),
        ({"memory": "lots"}, "cannot read 'lots'"),
    ],
)
def test_what_cannot_be_asked_is_refused(options: dict[str, object], said: str) -> None:
    """Before anything is traced."""
    with pytest.raises((OptionError, checkmate.UnitError), match=said):
        ask(**options)  # type: ignore[arg-type]


def test_a_batch_of_one_is_like_no_other() -> None:
    """What is a view at one is a copy at two: the lines go through two and four."""

    class Turned(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.transpose(0, 1).reshape(-1, 64)).relu()

    x, y = torch.randn(1, 512, 64), torch.ones(1)
    answer = checkmate.torch.fits(
        Turned(64, 64), lambda p, y: p.square().mean() * y.sum(), example=(x, y), device="A100", memory="2GiB", time_limit_s=30.0
    )
    assert answer.largest_batch is not None, answer.remarks
    assert answer.largest_batch.batch > 100


def test_time_that_is_short_leaves_questions_open_and_says_so() -> None:
    """Nothing is guessed."""
    answer = ask(time_limit_s=1.0)
    assert answer.largest_batch is None
    assert any("not looked for" in remark for remark in answer.remarks)


def test_unknown_workspace_is_said() -> None:
    """cuDNN chooses when it runs: a convolution's workspace counts as nothing, and a remark says of how many."""
    model, x = Cnn(), input_of("batch_norm", 16)
    y = torch.ones(())
    answer = checkmate.torch.fits(model, lambda p, y: p.mean() * y, example=(x, y), device="V100", time_limit_s=3.0)
    assert any("workspace is not known" in remark and "convolution" in remark for remark in answer.remarks)


def test_what_only_a_processor_runs_is_said() -> None:
    """A kernel that a model names itself is not replaced, and no answer for it would be right."""

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, True)[0]

    x = torch.randn(2, 2, 8, 4)
    asked = {"example": (x, torch.zeros(2, 2, 8, 4)), "device": "A100", "time_limit_s": 2.0}
    answer = checkmate.torch.fits(Own(4, 4), nn.functional.mse_loss, **asked)
    assert any("attention_for_cpu" in remark and "A100 has others" in remark for remark in answer.remarks)


def test_state_that_is_not_known_is_said() -> None:
    """It would be missing from every figure."""

    class Mine(torch.optim.Adadelta):
        def step(self, closure: Any = None) -> None:
            self.total = sum(p.grad.norm().item() for p in self.param_groups[0]["params"])
            super().step()

    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    asked = {"example": (x, x), "device": "A100", "time_limit_s": 2.0, "optimizer": torch.optim.Adagrad(model.parameters())}
    assert not any("state" in remark for remark in checkmate.torch.fits(model, nn.functional.mse_loss, **asked).remarks)
    asked["optimizer"] = Mine(model.parameters())
    answer = checkmate.torch.fits(model, nn.functional.mse_loss, **asked)
    assert any("the state that Mine makes" in remark for remark in answer.remarks)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2-xl", "llama-7b"])
def test_a_large_model_is_answered_for_in_a_minute_and_4_gib(case: str) -> None:
    """A minute of processor time, since the wall's depends on who else is there; the benchmark of the same name has both."""
    script = Path(__file__).parents[3] / "benchmarks" / "torch_fits.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "--child", case], capture_output=True, text=True, check=True
    )
    row = json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT "))
    assert row["cpu_s"] < 60
    assert row["max_resident_bytes"] < 4 * 2**30
    assert row["verdict"] in ("keeps everything", "fits with recomputation", "does not fit")


def test_frozen_weights_that_exceed_the_memory_are_fetched_from_the_host() -> None:
    """Nothing fits without a host; with one, the bytes of the device and of the host are those of the plan."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(1024, 1024).requires_grad_(False)
            self.down, self.up = nn.Linear(1024, 8, bias=False), nn.Linear(8, 1024, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.base(x) + self.up(self.down(x)))

    with torch.device("meta"):
        model, x = nn.Sequential(*(Adapted() for _ in range(8))), torch.empty(64, 1024)
    asked = {"example": (x, x), "device": "RTX 4090", "optimizer": "adamw", "memory": "552MiB", "time_limit_s": 4}
    alone = checkmate.torch.fits(model, nn.functional.mse_loss, **asked)
    assert alone.verdict == "does not fit"
    answer = checkmate.torch.fits(model, nn.functional.mse_loss, **asked, host="1GiB")
    assert answer and answer.verdict == "fits with copies from the host"
    assert answer.result is not None and answer.smallest_bytes <= answer.result.peak_bytes <= answer.available_bytes
    assert answer.reserved_bytes is not None
    frozen = 8 * 4 * (1024 * 1024 + 1024)
    assert answer.graph.resident_bytes < alone.graph.resident_bytes - frozen + 2**16
    assert "are copied from there in a step" in dict(answer.rows())["host"]
