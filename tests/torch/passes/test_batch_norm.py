"""BatchNorm runs by the ops of eager mode where that selects cuDNN: same bits, statistics updated once."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import checkmate.torch
from checkmate import Graph
from checkmate.torch import measure_peak
from checkmate.torch._compat.dispatch import FakeTensorMode
from checkmate.torch.passes import batch_norm
from tests.torch.features import FEATURES, OPEN
from tests.torch.networks import Cnn, Mixed, input_of, mlp
from tests.torch.steps import ROOMY, Forgetful, close, compiled, observe, planned_bytes, recomputes

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor stands in for a CUDA device: it has kernels of the same ops."""
    monkeypatch.setattr(batch_norm, "selects_cudnn", lambda x, weight: True)


def kinds(graph: Graph) -> Counter[str]:
    return Counter(op.kind.removeprefix("aten.").split(".")[0] for op in graph.ops)


class Checkpointed(nn.Module):
    """A norm in a checkpointed region, whose copy in the backward updates nothing; in eager mode it does."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = mlp(2, dropout=0.0), Cnn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.before(x).repeat(1, 3)
        if not torch.compiler.is_compiling():
            return self.inner(hidden)
        return torch.utils.checkpoint.checkpoint(self.inner, hidden, use_reentrant=False)


def case(name: str) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    if name in FEATURES:
        return *FEATURES[name](), input_of("dropout")
    model = Checkpointed() if name == "checkpointed" else Cnn()
    return model, model, input_of("dropout" if name == "checkpointed" else name)


@pytest.mark.usefixtures("selected")
@pytest.mark.parametrize(
    ("name", "updates", "others"),
    [
        ("batch_norm", 3, 0),
        ("batch_norm_twice", 2, 0),
        ("batch_norm_untracked", 0, 1),
        ("batch_norm_cumulative", 0, 0),  # eager mode runs it, between two graphs
        ("checkpointed", 3, 3),
    ],
)
def test_every_recomputation_gives_the_bits_of_eager_mode_and_updates_nothing(name: str, updates: int, others: int) -> None:
    """Loss, gradients, running statistics and counters, keeping everything and at the worst plan there is."""
    model, forward, x = case(name)

    def loss() -> torch.Tensor:
        return forward(x).square().mean()

    options: dict[str, Any] = {"fullgraph": name not in OPEN, "checkpoints": "hints" if others < 3 else "respected"}
    eager = observe(model, loss)
    keep_all, planned = compiled(loss, **options)
    assert eager.differs(observe(model, keep_all)) == []
    found = sum((kinds(interface.graph) for interface, _ in planned), Counter[str]())
    assert (found["_batch_norm_with_update"], found["_batch_norm_with_update_functional"]) == (updates, others)
    assert found["batch_norm_backward"] == max(updates, others)
    assert not any("native_batch_norm" in kind for kind in found)
    torch._dynamo.reset()
    run, planned = compiled(loss, budget=ROOMY, solver=Forgetful(), **options)
    assert eager.differs(observe(model, run)) == []
    assert sum(recomputes([each]) for each in planned) > 5
    if name not in OPEN:
        measured = measure_peak(lambda: run().backward())
        assert measured <= planned_bytes(planned) + 64
        assert close(measured, planned_bytes(planned))


@pytest.mark.usefixtures("selected")
def test_a_whole_step_trains_as_eager_mode_does() -> None:
    """With one op for all counters; also if every plan recomputes."""
    x, y, after = input_of("batch_norm"), torch.arange(128), []
    for budget, solver in ((None, None), ("100%", None), (ROOMY, Forgetful())):
        torch.manual_seed(0)
        model = Mixed(depth=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(1)
        if budget is not None:
            step = checkmate.torch.compile(
                model, nn.functional.cross_entropy, optimizer, example=(x, y), budget=budget, solver=solver
            )
            found = kinds(step.graph)
            assert (found["_batch_norm_with_update"], found["_foreach_add_"], found["copy_"]) == (3, 1, 0)
            for _ in range(3):
                step(x, y)
        else:
            for _ in range(3):
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        after.append(copy.deepcopy(model.state_dict()))
    for mine in after[1:]:
        assert all(torch.equal(mine[name], value) for name, value in after[0].items())


@pytest.mark.usefixtures("selected")
def test_a_gradient_that_comes_late_updates_nothing_again() -> None:
    """The forward runs once more for it."""

    class Two(Cnn):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            out = super().forward(x)
            return out.square().mean(), out.sin()

    model, x, states = Two(), input_of("batch_norm"), []
    before = copy.deepcopy(model.state_dict())
    for run in (torch.compile(model, backend="checkmate", options={"budget": "1GiB", "time_limit_s": 1}), model):
        model.load_state_dict(before)
        for late in (False, False, True):
            model.zero_grad(set_to_none=True)
            first, second = run(x)
            (first + second.mean() if late else first).backward()
        states.append((copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]))
    assert all(torch.equal(states[0][0][name], value) for name, value in states[1][0].items())
    for mine, theirs in zip(states[0][1], states[1][1], strict=True):
        torch.testing.assert_close(mine, theirs)


def graph_on(device: str, model: nn.Module, x: torch.Tensor) -> Graph:
    y = torch.ones((), dtype=x.dtype)
    return checkmate.torch.capture(model, lambda p, y: p.mean() * y, example=(x, y), device=device)


def test_a_device_that_is_not_there_runs_what_eager_mode_would_run_on_it() -> None:
    """cuDNN in float32, and the native kernels in bfloat16 or for an input that is not dense; none on a processor."""
    x = input_of("batch_norm", 16)
    found = kinds(graph_on("H100", Cnn(), x))
    assert (found["_batch_norm_with_update"], found["batch_norm_backward"], found["_foreach_add_"], found["copy_"]) == (
        3,
        3,
        1,
        0,
    )
    for device, model, example in (
        ("H100", Cnn().bfloat16(), x.bfloat16()),
        ("H100", nn.BatchNorm1d(8), torch.randn(16, 4, 8).transpose(1, 2)),
        ("CPU", Cnn(), x),
    ):
        found = kinds(graph_on(device, model, example))
        assert found["_native_batch_norm_legit_functional"] == sum("running_mean" in name for name, _ in model.named_buffers())
        assert not found["_batch_norm_with_update"]
        assert found["copy_"] > 1


def test_a_statistic_that_is_read_is_not_overwritten_early() -> None:
    """A loss that reads the new running mean, or the one before, sees the numbers of eager mode."""

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            old = self.norm.running_mean * 2  # type: ignore[operator]
            return self.norm(x.view(-1, 3, 8, 8)).mean() + (self.norm.running_mean - old).square().sum() * x.sum()  # type: ignore[operator]

    model, x = Read(), input_of("batch_norm", 16).requires_grad_()

    def loss() -> torch.Tensor:
        return model(x)

    eager = observe(model, loss)
    for options in ({}, {"budget": ROOMY, "solver": Forgetful()}):
        torch._dynamo.reset()
        assert eager.differs(observe(model, compiled(loss, **options)[0])) == []


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "dtype", "of_weight", "by_cudnn"),
    [
        ((4, 6, 5, 5), F32, F32, True),
        ((4, 6, 5), F32, F32, True),
        ((4, 6), F32, F32, False),
        ((4, 6, 5, 5), F16, F32, True),
        ((4, 6, 5, 5), F16, F16, False),
        ((4, 6, 5, 5), BF16, F32, False),
        ((4, 6, 5, 5), BF16, BF16, False),
        ((4, 6, 5, 5), torch.float64, torch.float64, True),
        ((880801, 6, 2), F32, F32, True),
        ((880802, 6, 2), F32, F32, False),
        ((2048, 1024, 1023), F32, F32, True),
        ((2048, 1024, 1024), F32, F32, False),
    ],
)
def test_the_rules_for_a_device_that_is_not_there_are_those_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, of_weight: torch.dtype, by_cudnn: bool
) -> None:
    """A build of PyTorch with CUDA says so itself, without a device."""
    with FakeTensorMode():
        x, weight = torch.empty(shape, dtype=dtype, device="cuda"), torch.empty(shape[1], dtype=of_weight, device="cuda")
        assert batch_norm.selects_cudnn(x, weight) is by_cudnn
        if torch.backends.cudnn.is_available():
            selected = torch._C._select_batch_norm_backend(x, weight, weight, weight, weight, True, 1e-5)
            assert (selected == torch._C._BatchNormBackend.Cudnn) is by_cudnn  # type: ignore[attr-defined]
