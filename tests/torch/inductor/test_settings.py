"""``mode`` and Inductor's own options: what torch does with them, merged with what a plan needs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checkmate.torch
from checkmate import OptionError
from checkmate.torch import Options, measure_peak
from checkmate.torch._compat import inductor as compat
from checkmate.torch.backend import checkmate as backend
from checkmate.torch.inductor.settings import PLANNED_SETTINGS, compiler_fingerprint, config_patches
from tests.torch.inductor.conftest import inductor_settings
from tests.torch.networks import input_of, mlp
from tests.torch.steps import compiled, observe

ON_CPU = {"cpu"}


def settings(*devices: str, **options: Any) -> dict[str, Any]:
    return config_patches(Options(compiler="inductor", **options), set(devices or ON_CPU))


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"])
def test_a_mode_is_the_configuration_that_torch_gives_it(mode: str) -> None:
    """The list is torch's own, so that a release that adds to a mode adds to ours."""
    found = settings("cuda", mode=mode)
    assert found == {**torch._inductor.list_mode_options(mode), **PLANNED_SETTINGS}


def test_an_option_overrides_that_of_the_mode() -> None:
    """As torch merges the two; names may have dashes, which torch allows."""
    options = {"coordinate_descent_tuning": False, "max-fusion-size": 4}
    found = settings(mode="max-autotune-no-cudagraphs", inductor_options=options)
    assert (found["max_autotune"], found["coordinate_descent_tuning"], found["max_fusion_size"]) == (True, False, 4)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_on_a_cpu_are_left_out_and_said(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """They have nothing to record there; whoever asks for them has to learn that nothing came of it."""
    with caplog.at_level(logging.WARNING, "checkmate.torch"):
        found = settings(mode=mode, budget="1GiB")
    assert found["triton.cudagraphs"] is False
    assert caplog.messages == [
        f"mode='{mode}' asks for CUDA graphs, which have no effect on a CPU: the step is compiled without them"
    ]


def test_cuda_graphs_may_have_a_budget() -> None:
    """What their memory pool will hold is measured."""
    assert settings("cuda", mode="max-autotune", budget="1GiB")["triton.cudagraphs"]
    with inductor_settings({"triton.cudagraphs": True}):
        assert "triton.cudagraphs" not in settings("cuda", budget="1GiB")


def test_trial_steps_run_without_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a graph would stay, and count in the next trial; the compiled step has graphs from its first call on."""
    calls: list[str] = []

    def kept(name: str) -> Callable[[list[Any]], list[Any]]:
        return lambda inputs: calls.append(name) or inputs

    monkeypatch.setattr(compat, "_cudagraphify", lambda model, **_: kept("graph"))
    with compat.under_a_plan(None):
        run = compat.compilation.cudagraphify(kept("plain"), static_input_idxs=())
    aligned, shifted = torch.ones(9), torch.ones(9)[1:]
    with compat.without_graphs():
        given = run([aligned, shifted, 3])
    assert given[0] is aligned and given[1].data_ptr() % 16 == 0 and torch.equal(given[1], shifted)
    run([aligned])
    assert calls == ["plain", "graph"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_autotun": True}, "unknown option 'max_autotun' in inductor_options; the nearest known one is 'max_autotune'"),
        ({"reorder_for_peak_memory": True}, "would undo the plan"),
        ({"allow-buffer-reuse": True}, "'allow-buffer-reuse': True.*would undo the plan"),
        ({"memory_planning": True}, "would undo the plan"),
        ({"custom_partitioner_fn": None}, "the plan enters there"),
        ({"inductor_choices_class": None}, "installed there"),
        ({"max_autotune": "yes"}, "Unexpected type of attr max_autotune, got str should be bool"),
    ],
)
def test_what_would_undo_the_plan_or_is_unknown_is_refused(given: dict[str, Any], words: str) -> None:
    """By name, and with what to do."""
    with pytest.raises(OptionError, match=words) as refused:
        settings(inductor_options=given)
    assert refused.value.hint


def test_what_the_plan_sets_anyway_may_be_given() -> None:
    """Somebody who copies stock options that agree with the plan is not refused."""
    assert settings(inductor_options={"allow_buffer_reuse": False}) == PLANNED_SETTINGS


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "max-autotune"}, "mode='max-autotune' needs compiler='inductor'"),
        ({"inductor_options": {"max_autotune": True}}, "inductor_options needs compiler='inductor'"),
        ({"compiler": "inductor", "mode": "fast"}, "mode='fast' is not one of default, reduce-overhead"),
        ({"compiler": "inductor", "inductor_options": 3}, "inductor_options=3 is not a mapping"),
    ],
)
def test_eager_has_no_modes_and_other_values_are_refused(options: dict[str, Any], words: str) -> None:
    """With ``compiler="eager"`` a mode would silently mean nothing."""
    with pytest.raises(OptionError, match=words):
        torch.compile(mlp(), backend="checkmate", options=options)


def test_a_mode_without_options_says_how_to_give_both() -> None:
    """`torch.compile` refuses mode and options together, before any backend sees them."""
    with pytest.raises(OptionError, match=r"torch\.compile takes either mode or options") as refused:
        torch.compile(mlp(), backend="checkmate", mode="max-autotune")
    assert "options={'budget': ..., 'compiler': 'inductor', 'mode': ...}" in refused.value.hint


def test_an_unknown_option_of_inductor_reaches_the_user_as_it_is() -> None:
    """Through Dynamo, with its own type."""
    options = {"compiler": "inductor", "inductor_options": {"max_autotun": True}}
    with pytest.raises(OptionError, match="nearest known one is 'max_autotune'") as refused:
        torch.compile(mlp(), backend="checkmate", options=options)(input_of("dropout"))
    assert type(refused.value) is OptionError


def test_measurements_of_one_configuration_do_not_answer_for_another() -> None:
    """A plan measured with other kernels is another measurement."""
    x = [torch.ones(2)]
    keys = {
        compiler_fingerprint(x, Options(compiler="inductor"), patches)
        for patches in (settings(), settings(mode="max-autotune"), settings(inductor_options={"max_fusion_size": 4}))
    }
    assert len(keys) == 3
    texts = {repr(Options(compiler="inductor", mode=mode)) for mode in ("default", "max-autotune")}  # key of Inductor's cache
    assert len(texts) == 2


def test_a_mode_keeps_the_budget_and_the_bits(caplog: pytest.LogCaptureFixture) -> None:
    """ "reduce-overhead" on a CPU: the same bits and the same peak as without it, and a word that says so."""
    model, x = mlp(depth=2), input_of("dropout", 512)
    seen = []
    ways: tuple[dict[str, Any], ...] = ({}, {"mode": "reduce-overhead"})
    for options in ways:
        torch._dynamo.reset()
        run, _ = compiled(lambda: model(x).square().mean(), budget="80%", compiler="inductor", time_limit_s=3, **options)
        left = observe(model, run)
        seen.append((left, measure_peak(lambda run=run: run().backward())))
        model.zero_grad(set_to_none=True)
    assert seen[0][0].differs(seen[1][0]) == []
    assert seen[0][1] == seen[1][1]
    assert "no effect on a CPU" in caplog.text


def test_every_way_to_compile_takes_a_mode() -> None:
    """A step, and a backend whose other options are bound, where `torch.compile` may be given the mode."""
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    bound = functools.partial(backend, compiler="inductor", inductor_options={"max_fusion_size": 4})
    torch.compile(model, backend=bound, mode="max-autotune-no-cudagraphs")(x).sum().backward()
    step = checkmate.torch.compile(
        model, nn.functional.mse_loss, example=(x, x), compiler="inductor", mode="max-autotune-no-cudagraphs"
    )
    assert step(x, x)[1] > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_no_bit_depends_on_the_budget_in_any_mode(mode: str) -> None:
    """Kernels are chosen by their sizes, which a plan does not change."""
    model, x = mlp(depth=2), input_of("dropout", 512)
    seen = []
    for budget in (None, "80%"):
        torch._dynamo.reset()
        run, _ = compiled(lambda: model(x).square().mean(), budget=budget, compiler="inductor", mode=mode, time_limit_s=3)
        seen.append(observe(model, run))
    assert seen[0].differs(seen[1]) == []
