"""A plan changes when things are computed, and nothing of what is computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from checkmate.torch import measure_peak
from tests.torch.networks import NETWORKS, Cnn, input_of, mlp
from tests.torch.steps import ROOMY, Forgetful, close, compiled, observe, planned_bytes, recomputes

QUICK = ("attention", "batch_norm", "in_place")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NETWORKS])
def test_recomputing_everything_changes_no_bit(name: str) -> None:
    """A recomputation is the same kernel on the same inputs with the same random state."""
    if name == "in_place" and torch.__version__ < (2, 13):
        pytest.skip("AOTAutograd before 2.13 rounds add_(x, alpha=a) twice: other bits than eager mode without any plan")
    model, x = NETWORKS[name](), input_of(name)

    def loss() -> torch.Tensor:
        return model(x).square().mean()

    eager = observe(model, loss)
    keep_all, _ = compiled(loss)
    assert eager.differs(observe(model, keep_all)) == []
    torch._dynamo.reset()
    forgetful, planned = compiled(loss, budget=ROOMY, solver=Forgetful())
    assert eager.differs(observe(model, forgetful)) == []
    assert recomputes(planned) > 5
    measured = measure_peak(lambda: forgetful().backward())
    assert measured <= planned_bytes(planned) + 64
    assert close(measured, planned_bytes(planned))


def test_batch_norm_statistics_are_updated_once() -> None:
    """Clones compute without running statistics: what eager updates once stays updated once."""
    model, x = Cnn(), input_of("batch_norm")
    run, planned = compiled(lambda: model(x).square().mean(), budget=ROOMY, solver=Forgetful(every=2))
    run().backward()
    assert recomputes(planned) > 5
    assert [int(b) for n, b in model.named_buffers() if "num_batches" in n] == [1, 1, 1]


def test_autocast_equals_keeping_everything() -> None:
    """Under autocast AOT and eager differ by themselves, so that the reference is the same backend."""
    model, x = mlp(), input_of("dropout")

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    reference = observe(model, compiled(loss)[0])
    torch._dynamo.reset()
    run, planned = compiled(loss, budget=ROOMY, solver=Forgetful())
    assert reference.differs(observe(model, run)) == []
    assert recomputes(planned) > 5


def test_gradients_accumulate() -> None:
    """A second backward adds to what the first left, as in eager."""
    model, x = mlp(), input_of("dropout")

    def two(run: object) -> torch.Tensor:
        run().backward()  # type: ignore[operator]
        return run()  # type: ignore[operator]

    def loss() -> torch.Tensor:
        return model(x).square().mean()

    eager = observe(model, lambda: two(loss))
    run, _ = compiled(loss, budget=ROOMY, solver=Forgetful())
    assert eager.differs(observe(model, lambda: two(run))) == []


def test_several_outputs_and_an_input_gradient() -> None:
    """Outputs without a gradient, and inputs with one, go through like any other."""
    model, x = mlp(2), input_of("dropout").requires_grad_()

    def forward() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = model[:3](x)
        return model[3:](hidden).mean(), hidden, hidden.detach().argmax(-1)

    results = []
    for run in (forward, compiled(forward, budget=ROOMY, solver=Forgetful())[0]):
        torch.manual_seed(1)
        model.zero_grad()
        x.grad = None
        value, hidden, index = run()
        (value + hidden.square().mean()).backward()
        results.append([value, hidden, index, x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_dropout_that_nobody_reads_advances_the_generator_as_stock_aot_does() -> None:
    """The random stream belongs to the forward, whatever the backward needs of it."""
    model, x = mlp(2), input_of("dropout")

    def loss() -> torch.Tensor:
        nn.functional.dropout(x, 0.5)
        return model(x).mean()

    stock = torch.compile(loss, backend="aot_eager", fullgraph=True)
    reference = observe(model, stock)
    torch._dynamo.reset()
    assert reference.differs(observe(model, compiled(loss, budget=ROOMY, solver=Forgetful())[0])) == []


def test_inference_runs_unplanned() -> None:
    """Without gradients there is nothing to keep."""
    model, x = mlp().eval(), input_of("dropout")
    run, planned = compiled(lambda: model(x), budget="50%")
    with torch.no_grad():
        assert torch.equal(run(), model(x))
    assert not planned
