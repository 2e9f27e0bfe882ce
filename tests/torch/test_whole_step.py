"""The optimizer inside the step: the same training to the bit, and gradients that never meet."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checkmate
from checkmate import OptionError
from checkmate.torch import Step, measure_peak
from tests.torch.networks import Mixed, input_of
from tests.torch.steps import ROOMY, Forgetful

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": torch.optim.Adam,
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": (rest := [*p])[::2], "maximize": True, "weight_decay": 0.3}, {"params": rest[1::2], "foreach": True}], 1e-2
    ),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "adagrad": torch.optim.Adagrad,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
    "own": lambda p: Own([{"params": (rest := [*p])[::2]}, {"params": rest[1::2], "lr": 0.01}, {"params": []}]),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return Mixed(depth=2)


X, Y = input_of("batch_norm"), torch.arange(128)


def loss_of(prediction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(prediction, y)


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor = X, y: torch.Tensor = Y) -> Any:
    prediction = model(x)
    loss = loss_of(prediction, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return prediction.detach(), loss.detach()


def trained(run: Callable[[], Any], model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[Any]:
    """Everything that some steps from a fixed seed leave."""
    torch.manual_seed(5)
    results = [run() for _ in range(steps)]
    state = [v for _, s in sorted(optimizer.state_dict()["state"].items()) for v in s.values()]
    return [r for pair in results for r in pair] + [*model.state_dict().values(), *state, torch.get_rng_state()]


def same(mine: list[Any], theirs: list[Any]) -> bool:
    return len(mine) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(mine, theirs, strict=True)
    )


QUICK = ("nesterov", "adamw", "adagrad", "foreach", "groups", "own")
"""Those that run every time."""


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in OPTIMIZERS])
def test_an_optimizer_in_the_step_trains_the_same(kind: str) -> None:
    """Its own code updates each parameter, only sooner; all that can be recomputed is."""
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    reference = trained(lambda: eager_step(model, optimizer), model, optimizer)
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    step = checkmate.torch.compile(model, loss_of, optimizer, example=(X, Y), budget=ROOMY, solver=Forgetful(), reserve="1MiB")
    assert step.whole
    assert same(trained(lambda: step(X, Y), model, optimizer), reference)
    assert all(p.grad is None for p in model.parameters())


def test_gradients_never_meet() -> None:
    """The planned peak is measured, and less than a step needs that holds every gradient.

    The first plan, which keeps everything, leaves room to measure the updates. The budget leaves none: alone, the second plan
    would be one of estimates.
    """
    model, x = nn.Sequential(*[nn.Linear(256, 256) for _ in range(12)]), torch.randn(16, 256)
    y = torch.zeros(16, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    eager_step(model, optimizer, x, y)
    eager = measure_peak(lambda: eager_step(model, optimizer, x, y))
    for budget in (None, "85%"):
        step = checkmate.torch.compile(model, loss_of, optimizer, example=(x, y), budget=budget, time_limit_s=1)
        for _ in range(2):
            step(x, y)
        measured = measure_peak(lambda step=step: step(x, y))
        assert abs(measured - (step.result.peak_bytes - step.graph.resident_bytes)) <= 64
        assert measured < 0.5 * eager
        assert checkmate.validate(step.graph, step.plan, step.result.budget_bytes) == ()


def test_a_learning_rate_schedule_compiles_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The optimizer reads its groups when it steps, as ever."""
    outcomes = []
    for planned in (False, True):
        model = network()
        optimizer = torch.optim.SGD([{"params": model.stem.parameters()}, {"params": [*model.body.parameters()], "lr": 0.3}], 0.1)
        for p in (*model.head.parameters(), model.unused):
            p.requires_grad_(False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        step = checkmate.torch.compile(model, loss_of, optimizer, example=(X, Y)) if planned else None

        def run(step: Step | None = step, **kept: Any) -> Any:
            done = step(X, Y) if step else eager_step(kept["model"], kept["optimizer"], X, Y)
            kept["schedule"].step()
            return done

        kept = {"model": model, "optimizer": optimizer, "schedule": schedule}
        outcomes.append(trained(lambda run=run, kept=kept: run(**kept), model, optimizer))
    assert same(*outcomes)
    assert "was compiled" not in caplog.text


def test_state_saved_and_loaded_goes_on_the_same() -> None:
    """``state_dict`` is the optimizer's own, of the same format as without a plan."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step = checkmate.torch.compile(model, loss_of, optimizer, example=(X, Y))
    step(X, Y)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    reference = trained(lambda: step(X, Y), model, optimizer)
    other = network()
    resumed = torch.optim.AdamW(other.parameters(), 1e-2)
    again = checkmate.torch.compile(other, loss_of, resumed, example=(X, Y))
    other.load_state_dict(saved[0])
    resumed.load_state_dict(copy.deepcopy(saved[1]))
    assert same(trained(lambda: again(X, Y), other, resumed), reference)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(copy.deepcopy(saved[1]))
    assert same(trained(lambda: eager_step(other, resumed, X, Y), other, resumed), reference)


@pytest.mark.parametrize("whole", [True, False])
def test_clipping_by_the_global_norm(whole: bool) -> None:
    """It equals torch's, and holds every gradient until the norm is known."""
    outcomes, peaks = [], []
    for clip in (None, 0.01):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = checkmate.torch.compile(model, loss_of, optimizer, example=(X, Y), clip_norm=clip, whole=whole)
        assert step.whole == whole
        outcomes.append(trained(lambda step=step: step(X, Y), model, optimizer))
        peaks.append(step.result.peak_bytes)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def eager() -> Any:
        loss = loss_of(prediction := model(X), Y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return prediction.detach(), loss.detach()

    assert same(outcomes[1], trained(eager, model, optimizer))
    assert not same(outcomes[0], outcomes[1])
    assert peaks[0] <= peaks[1]


def test_micro_batches_accumulate_inside_one_step() -> None:
    """Four parts of a batch, one after the other: the gradients of four backwards, and less memory than the whole batch."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def eager() -> Any:
        predictions, total = [], torch.zeros(())
        for some, some_y in zip(X.chunk(4), Y.chunk(4), strict=True):
            prediction = model(some)
            loss = loss_of(prediction, some_y) / 4
            loss.backward()
            predictions.append(prediction.detach())
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return torch.cat(predictions), total

    reference = trained(eager, model, optimizer)
    peaks = []
    for parts in (1, 4):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        step = checkmate.torch.compile(model, loss_of, optimizer, example=(X, Y), micro_batches=parts)
        outcome = trained(lambda step=step: step(X, Y), model, optimizer)
        peaks.append(step.result.peak_bytes)
    assert same(outcome, reference)
    assert peaks[1] < peaks[0]
    with pytest.raises(OptionError, match="does not cut a batch of 3 rows into equal parts"):
        step(X[:3], Y[:3])  # the mean of unequal parts would be another loss


class Own(torch.optim.Optimizer):
    """An optimizer that torch does not know, with momentum."""

    kind = "separate"
    count = 0

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, **options})
        self.more: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.count += 1
        given = [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for _, p in given) if self.kind == "global norm" else 1
        for group, p in given:
            state = self.more if self.kind == "hidden state" else self.state[p]
            key = p if self.kind == "hidden state" else "momentum"
            momentum = state.setdefault(key, torch.zeros_like(p))
            momentum.lerp_(p.grad, 0.1)
            scale = {"counts calls": self.count, "random": torch.rand(()).item() if self.kind == "random" else 1}
            if self.kind == "counts in its group":
                scale[self.kind] = group["count"] = group.get("count", 0) + 1
            if self.kind == "reads a number of matrices" and p.ndim > 1:
                scale[self.kind] = p.grad.abs().max().item()
            p.sub_(momentum.sign() * (group["lr"] * scale.get(self.kind, 1) / norm))


UNSUITABLE = ("global norm", "counts calls", "counts in its group", "random", "hidden state", "reads a number of matrices")


def own(kind: str) -> Callable[..., torch.optim.Optimizer]:
    return type("Own", (Own,), {"kind": kind})


FURTHER: dict[str, dict[str, dict[str, Any]]] = {
    "torch.optim": {"Muon": {}},
    "transformers": {"Adafactor": {"lr": 1e-3, "relative_step": False, "scale_parameter": False}},
    "bitsandbytes.optim": {
        "AdamW32bit": {}, "Lion32bit": {}, "RMSprop32bit": {}, "Adagrad32bit": {}, "SGD32bit": {"lr": 0.1, "momentum": 0.9},
        "AdamW8bit": {}, "Lion8bit": {},
    },
    "timm.optim": {"Lion": {}, "NAdamW": {}, "LaProp": {}, "MADGRAD": {}, "AdafactorBigVision": {}, "Adan": {}},
    "torchao.optim": {"AdamW8bit": {}, "AdamW4bit": {}},
}  # fmt: skip
AFTER_THE_BACKWARD = ("AdamW8bit", "Lion8bit", "AdamW4bit", "Adan")
"""Optimizers of other packages that have state besides that of single parameters, or prepare all parameters together."""


@pytest.mark.slow
@pytest.mark.parametrize(("package", "kind"), [(package, kind) for package, kinds in FURTHER.items() for kind in kinds])
def test_optimizers_of_other_packages(package: str, kind: str) -> None:
    """The trial finds which of them update each parameter separately, and their bits are those of a plain loop."""
    make, options, outcomes = getattr(pytest.importorskip(package), kind), FURTHER[package][kind], []
    for whole in (False, True):
        model = network()
        for p in model.parameters():
            p.requires_grad_(kind != "Muon" or p.ndim == 2)
        optimizer = make([p for p in model.parameters() if p.requires_grad], **options)
        run = lambda m=model, o=optimizer: eager_step(m, o)  # noqa: E731
        if whole:
            step = checkmate.torch.compile(model, loss_of, optimizer, example=(X, Y), budget="100%")
            assert step.whole == (kind not in AFTER_THE_BACKWARD)
            run = lambda s=step: s(X, Y)  # noqa: E731
        torch.manual_seed(5)
        outcomes.append([*(r for _ in range(3) for r in run()), *model.state_dict().values()])
    assert same(*outcomes)


def halve_gradient(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def hooked(model: nn.Module, register: str, hook: Callable[[Any], Any]) -> torch.optim.Optimizer:
    """An optimizer of a model whose parameters all have a hook."""
    for p in filter(lambda p: p.requires_grad, model.parameters()):
        getattr(p, register)(hook)
    return torch.optim.SGD(model.parameters(), 0.1)


def test_what_cannot_be_in_the_step_comes_after_it(caplog: pytest.LogCaptureFixture) -> None:
    """The fallback trains the same, and says why it is one."""
    for make, why in (
        *(
            (lambda m, kind=kind: own(kind)(m.parameters()), "Own was not found to update each parameter independently")
            for kind in UNSUITABLE
        ),
        (
            lambda m: torch.optim.SGD(m.body.parameters(), 0.1),
            "SGD does not update 'unused', whose gradient must",
        ),
        (
            lambda m: hooked(m, "register_hook", lambda gradient: gradient / 2),
            "'unused' has a hook that is called with its gradient",
        ),
        (
            lambda m: hooked(m, "register_post_accumulate_grad_hook", halve_gradient),
            "'unused' has a hook that is called with its gradient",
        ),
    ):
        model = network()
        optimizer = make(model)
        reference = trained(lambda m=model, o=optimizer: eager_step(m, o, X, Y), model, optimizer)
        model = network()
        optimizer = make(model)
        caplog.clear()
        step = checkmate.torch.compile(model, loss_of, optimizer, example=(X, Y))
        assert not step.whole
        assert f"is not planned with it: {why}" in caplog.text
        assert same(trained(lambda s=step: s(X, Y), model, optimizer), reference)
        with pytest.raises(OptionError, match=f"whole=True cannot be: {why}"):
            checkmate.torch.compile(model, loss_of, optimizer, example=(X, Y), whole=True)


def test_gradients_left_over_are_not_lost_in_silence() -> None:
    """Eager mode would add to them; a whole step has no use for them."""
    model = network()
    step = checkmate.torch.compile(model, loss_of, torch.optim.SGD(model.parameters(), 0.1), example=(X, Y))
    loss_of(model(X), Y).backward()
    with pytest.raises(OptionError, match="gradients of an earlier backward are there"):
        step(X, Y)


def test_a_hook_that_no_gradient_would_reach_is_refused() -> None:
    """Registered after the step was compiled: without it the training would be another one."""
    model = network()
    step = checkmate.torch.compile(model, loss_of, torch.optim.SGD(model.parameters(), 0.1), example=(X, Y))
    handle = next(p for p in model.parameters() if p.requires_grad).register_hook(torch.zeros_like)
    with pytest.raises(OptionError, match="a hook that was registered after the step was compiled"):
        step(X, Y)
    handle.remove()
    step(X, Y)


@pytest.mark.parametrize(
    ("given", "words"), [({"micro_batches": 3}, "does not cut a batch of 128 rows"), ({"clip_norm": 0}, "clip_norm=0")]
)
def test_wrong_amounts_are_refused(given: dict[str, Any], words: str) -> None:
    """Before anything is traced: a batch in equal parts, and a norm above zero."""
    model = network()
    with pytest.raises(OptionError, match=words):
        checkmate.torch.compile(model, loss_of, torch.optim.SGD(model.parameters(), 0.1), example=(X, Y), **given)


@pytest.mark.parametrize("budget", ["60%", "6MiB"])
def test_what_the_step_before_returned_is_planned_for(budget: str, caplog: pytest.LogCaptureFixture) -> None:
    """``prediction, loss = step(x, y)`` holds it until the step is over, and the most of it is the prediction."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 512))
    x, y = torch.randn(512, 16), torch.randint(512, (512,))
    step = checkmate.torch.compile(model, loss_of, torch.optim.AdamW(model.parameters()), example=(x, y), budget=budget)
    assert step.whole
    prediction, _ = step(x, y)
    assert step.result.peak_bytes <= step.result.budget_bytes
    outside = step.graph.resident_bytes - prediction.nbytes  # parameters, state, batch
    for _ in range(2):
        held = prediction
        peak = outside + held.nbytes + measure_peak(lambda: step(x, y))
        assert peak <= step.result.budget_bytes
        assert abs(peak - step.result.peak_bytes) <= 64
        prediction, _ = step(x, y)
    assert "made after the step was compiled" not in caplog.text


def test_another_size_counts_what_was_returned_once() -> None:
    """It exists when the step is compiled again, and has room in the plan as what the step before returned."""
    model = nn.Linear(16, 512)
    step = checkmate.torch.compile(
        model,
        loss_of,
        torch.optim.SGD(model.parameters(), 0.1),
        example=(torch.randn(64, 16), torch.randint(512, (64,))),
        budget="1GiB",
    )
    outputs = step(torch.randn(64, 16), torch.randint(512, (64,)))
    step(torch.randn(128, 16), torch.randint(512, (128,)))
    first, second = (graph.resident_bytes for graph, _ in step._compiled.planned)
    assert outputs[0].nbytes == 64 * 512 * 4
    assert second - first < 2 * outputs[0].nbytes  # twice as much is returned, and a larger batch read
