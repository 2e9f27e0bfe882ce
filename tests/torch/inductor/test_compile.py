"""Plans compiled by Inductor: the measured peak keeps the budget, and no bit depends on it."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checkmate.torch
from checkmate import OptionError
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch import measure_peak
from checkmate.torch._compat.profiler import memory_trace
from checkmate.torch.inductor.account import Account
from checkmate.torch.steps.coordinator import coordinator
from tests.torch.networks import NETWORKS, input_of, mlp
from tests.torch.steps import Planned, compiled, observe, recomputes

pytestmark = pytest.mark.usefixtures("nothing_else")

ROWS = 512
SHARES = {"in_place": (1.0,), "views": (1.0,), "custom_function": (0.8, 0.7)}
"""Budgets, as shares of keeping everything, of networks of which nothing keeps 65 %: one op alone takes more, or nearly."""
Run = Callable[[], Any]


def planned_loss(model: nn.Module, x: torch.Tensor, budget: int | str | None, **options: Any) -> tuple[Run, Planned]:
    torch._dynamo.reset()
    options = {"compiler": "inductor", "time_limit_s": 3, **options}
    return compiled(lambda: model(x).square().mean(), budget=budget, **options)


def peak_of(run: Run, model: nn.Module) -> int:
    """Peak of a step above what is resident; the model is as before."""
    state = copy.deepcopy(model.state_dict())
    model.zero_grad(set_to_none=True)
    peak = measure_peak(lambda: run().backward())
    model.zero_grad(set_to_none=True)
    model.load_state_dict(state)
    return peak


def given_room(planned: Planned, bytes_above: float) -> int:
    """The budget that leaves so many bytes above what is resident."""
    return planned[-1][0].graph.resident_bytes + int(bytes_above)


def test_the_measured_peak_keeps_the_budget_and_no_bit_changes() -> None:
    """The whole promise on a network with dropout: budget, gradients, and the random state."""
    model, x = mlp(depth=2), input_of("dropout", ROWS)
    run, planned = planned_loss(model, x, None)
    reference, everything, light = observe(model, run), peak_of(run, model), recomputes(planned)
    run, planned = planned_loss(model, x, given_room(planned, 0.8 * everything))
    assert reference.differs(observe(model, run)) == []
    assert recomputes(planned) > light
    assert peak_of(run, model) <= 0.8 * everything


class _Heads(nn.Module):
    """Attention, whose backward reads three views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(8, 16, 4, 8).transpose(1, 2) for part in self.project(x).split(32, dim=2))
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_tensor_is_saved_once_for_all_its_views() -> None:
    """Each saved tensor takes processor time in every step."""
    model, x = _Heads(), torch.randn(8, 16, 32)
    run, _ = planned_loss(model, x, None)
    loss = run()
    saved = [t for t in loss.grad_fn.saved_tensors if t.dim()]
    assert len({t.untyped_storage().data_ptr() for t in saved}) == len(saved)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_no_bit_depends_on_the_budget(name: str) -> None:
    """Dropout, statistics, buffers, views, aliases and hand-written backwards, fused and computed again."""
    torch.manual_seed(0)
    model, x = NETWORKS[name](), input_of(name, ROWS)
    run, planned = planned_loss(model, x, None)
    reference, everything = observe(model, run), peak_of(run, model)
    for share in SHARES.get(name, (0.8, 0.65)):
        run, planned = planned_loss(model, x, given_room(planned, share * everything))
        assert reference.differs(observe(model, run)) == []
        assert peak_of(run, model) <= share * everything
        assert any("compiled by Inductor" in remark for remark in planned[-1][1].remarks)


def test_weights_of_convolutions_are_not_held_twice() -> None:
    """Inductor turns them to channels last for the forward; what the backward is handed are the weights themselves."""
    model, x = nn.Sequential(*[nn.Conv2d(64, 64, 3, padding=1) for _ in range(3)]), torch.randn(2, 64, 8, 8)
    run, _ = planned_loss(model, x, None)
    run().backward()
    with memory_trace() as trace:
        loss = run()
    held = sum(amount for what, amount in trace.events if what == "alloc")  # type: ignore[misc]
    assert loss.requires_grad
    assert held < sum(p.nbytes for p in model.parameters()) / 2


@pytest.mark.slow
def test_every_planned_matrix_product_is_in_the_code() -> None:
    """Nothing of Inductor finds that two computations are the same: a recomputation that is merged saves nothing."""
    from torch._inductor.utils import run_and_get_code

    model, x = mlp(depth=4, dropout=0.0), input_of("dropout", 1024)
    run, planned = planned_loss(model, x, "60%")
    _, codes = run_and_get_code(lambda: run().backward())
    interface, result = planned[-1]
    assert result.plan is not None
    products = ("aten.mm.default", "aten.addmm.default")
    wanted = sum(interface.graph.ops[o].kind in products for o in result.plan.order)
    found = sum(len(re.findall(r"extern_kernels\.(?:add)?mm\(", code)) for code in codes[-2:])  # of the newest compilation
    assert found == wanted


@pytest.mark.slow
def test_that_no_compiled_step_fits_is_found_out_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several compilations find it out; the next process runs op by op at once. Another budget is tried."""
    over = StepMemory(forward_peak_bytes=0, saved_bytes=0, backward_peak_bytes=2**40, gradient_bytes=0)
    monkeypatch.setattr("checkmate.torch.inductor.compile.measure_step", lambda *args, **kwargs: over)
    monkeypatch.setattr(Account, "memory", lambda *args, **kwargs: over)
    model, x = mlp(depth=3), input_of("dropout", ROWS)
    for budget, said in (("80%", "plans that Inductor compiled kept"), ("80%", "compiled before kept"), ("81%", "compiled kept")):
        torch._dynamo.reset()
        coordinator().forget_steps()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "checkmate.torch"):
            run, planned = planned_loss(model, x, budget)
            run().backward()
        assert said in caplog.text and "compiled by 'eager'" in caplog.text
        interface, result = planned[-1]
        assert result.peak_bytes is not None
        assert peak_of(run, model) <= result.peak_bytes - interface.graph.resident_bytes + 64
        model.zero_grad(set_to_none=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own, at a graph break
def test_several_graphs_share_a_budget(caplog: pytest.LogCaptureFixture) -> None:
    """A graph break: each graph's measured figures are what the budget is divided by."""
    first, second = mlp(depth=3), mlp(depth=3)
    x = input_of("dropout", 2048)

    def broken() -> torch.Tensor:
        h = first(x)
        torch._dynamo.graph_break()
        return second(h).square().mean()

    both = nn.ModuleList((first, second))
    torch._dynamo.reset()
    options = {"fullgraph": False, "compiler": "inductor", "time_limit_s": 3}
    run, _ = compiled(broken, **options)
    reference, everything = observe(both, run), peak_of(run, both)
    torch._dynamo.reset()
    resident = sum(p.nbytes for p in both.parameters()) + x.nbytes
    budget = resident + int(0.75 * everything)
    run, planned = compiled(broken, budget=budget, **options)
    run().backward()  # the first step calibrates
    run().backward()
    assert len(planned) >= 4
    assert reference.differs(observe(both, run)) == []
    assert peak_of(run, both) <= budget - resident


@pytest.mark.slow
def test_a_step_leaves_room_for_what_earlier_steps_hold() -> None:
    """A loop that keeps the predictions of its last step: compiled again for what is left, still by Inductor."""
    model, x = mlp(depth=6, dropout=0.0), input_of("dropout", 2048)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        prediction = model(x)
        return prediction.square().mean(), prediction.detach()

    options = {"compiler": "inductor", "time_limit_s": 3}
    torch._dynamo.reset()
    run, planned = compiled(forward, budget=None, **options)
    run()
    everything = measure_peak(lambda: run()[0].backward())
    budget = given_room(planned, 0.75 * everything)
    torch._dynamo.reset()
    run, planned = compiled(forward, budget=budget, **options)
    held: list[torch.Tensor] = []

    def step() -> None:
        loss, prediction = run()
        loss.backward()
        model.zero_grad(set_to_none=True)
        held[:] = [prediction]

    for _ in range(4):
        step()
    kept = held[0].nbytes
    assert measure_peak(step) <= budget - planned[0][0].graph.resident_bytes - kept
    assert len(planned) > 1
    assert any("compiled by Inductor" in remark for remark in planned[-1][1].remarks)


@pytest.mark.slow
def test_a_step_runs_its_plan_compiled() -> None:
    """`checkmate.torch.compile` traces, measures and stops at the door like with the eager compiler."""
    model, x, y = mlp(depth=3, dropout=0.0), input_of("dropout", ROWS), torch.zeros(ROWS, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = copy.deepcopy(model.state_dict())
    options = {"example": (x, y), "compiler": "inductor", "time_limit_s": 3}
    step = checkmate.torch.compile(model, nn.functional.mse_loss, optimizer, budget="70%", **options)
    assert not step.whole
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    losses = [step(x, y)[1].item() for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1]


def test_a_loss_outside_of_the_model_stays_fused(caplog: pytest.LogCaptureFixture) -> None:
    """The usual loop: the step is planned as a whole after its first run, and what it saves may differ from the plan."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16)),
        *(nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)),
    )
    x, y = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    torch._dynamo.reset()
    options = {"compiler": "inductor", "time_limit_s": 3}
    run, planned = compiled(lambda: model(x), budget="100%", **options)
    with caplog.at_level(logging.INFO, "checkmate.torch"):
        for _ in range(4):
            nn.functional.cross_entropy(run(), y).backward()
            model.zero_grad(set_to_none=True)
    assert all("compiled by Inductor" in " ".join(result.remarks) for _, result in planned)
    assert len(planned) == 2
    assert not [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_unknown_compiler_is_refused() -> None:
    """With the known ones in the message."""
    with pytest.raises(OptionError, match="eager, inductor"):
        checkmate.torch.Options(compiler="cuda")  # type: ignore[arg-type]
