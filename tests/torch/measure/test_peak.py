"""The most bytes that were there at once."""

from __future__ import annotations

import pytest
import torch

import checkmate
from checkmate.torch import measure_peak
from checkmate.torch._compat.profiler import memory_trace
from checkmate.torch.measure.peak import measure_step
from tests.torch.networks import mlp
from tests.torch.steps import compiled


def test_a_peak_counts_what_is_freed_before_the_end() -> None:
    """The most that was there at once, not what is left."""

    def work() -> torch.Tensor:
        big = torch.ones(1000)
        return big.sum()

    assert 4000 <= measure_peak(work) < 4100
    with memory_trace(), pytest.raises(checkmate.CheckmateError, match="cannot be measured"):
        measure_peak(work)
    with pytest.raises(checkmate.OptionError, match=r"Tensor cannot be called\n\nhint: .*measure_peak\(lambda"):
        measure_peak(work())  # type: ignore[arg-type]


@pytest.mark.gpu
def test_planned_is_measured_on_cuda() -> None:
    """The caching allocator rounds to 512 bytes, and so does the graph."""
    model, x = mlp(4, 256).cuda(), torch.randn(4096, 256, device="cuda")
    run, planned = compiled(lambda: model(x).square().mean(), budget="70%", time_limit_s=5)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        run().backward()
    model.zero_grad(set_to_none=True)
    measured = measure_peak(lambda: run().backward(), device="cuda")
    interface, result = planned[-1]
    assert result.peak_bytes is not None
    assert abs(measured - (result.peak_bytes - interface.graph.resident_bytes)) <= 0.01 * measured


def test_trial_steps_leave_nothing_behind() -> None:
    """Statistics, gradients, versions and generators are the user's: measuring must not be seen."""
    weight = torch.ones(4, requires_grad=True)
    buffer = torch.zeros(4)
    hooked: list[torch.Tensor] = []
    weight.register_hook(hooked.append)

    def run(w: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        b.add_(torch.rand(4))
        return [(w * w * torch.rand(4)).sum()]

    before, versions = torch.get_rng_state(), (weight._version, buffer._version)
    step = measure_step(run, (weight, buffer), hold_outputs=True)
    assert torch.equal(buffer, torch.zeros(4))
    assert weight.grad is None
    assert not hooked
    assert versions == (weight._version, buffer._version)
    assert torch.equal(before, torch.get_rng_state())
    assert step.peak_bytes >= step.saved_bytes >= step.gradient_bytes == 16
