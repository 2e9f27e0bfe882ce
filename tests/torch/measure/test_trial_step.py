"""One step run to measure it."""

from __future__ import annotations

import torch

from checkmate.torch.measure import trial_step


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
    step = trial_step.measure_step(run, (weight, buffer), hold_outputs=True)
    assert torch.equal(buffer, torch.zeros(4))
    assert weight.grad is None
    assert not hooked
    assert versions == (weight._version, buffer._version)
    assert torch.equal(before, torch.get_rng_state())
    assert step.peak_bytes >= step.saved_bytes >= step.gradient_bytes == 16
