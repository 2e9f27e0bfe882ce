"""Whether a step fits with copies to the host, on devices that are not there."""

from __future__ import annotations

import pytest
import torch

import checkmate
import checkmate.torch

LOSS = torch.nn.functional.mse_loss


def case(rows: int = 2**19) -> tuple[torch.nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """A chain of layers with large activations."""
    with torch.device("meta"):
        layers = [m for _ in range(6) for m in (torch.nn.Linear(512, 512), torch.nn.GELU())]
        return torch.nn.Sequential(*layers), (torch.empty(rows, 512), torch.empty(rows, 512))


@pytest.mark.slow
def test_copies_are_part_of_the_answer():
    """Less is computed again with a host, and the report names it."""
    model, example = case()
    asked = {"example": example, "device": "GH200", "memory": "9GiB", "time_limit_s": 4}
    alone = checkmate.torch.fits(model, LOSS, **asked)
    host = checkmate.torch.fits(model, LOSS, **asked, host="64GiB")
    assert (alone.verdict, host.verdict) == ("fits with recomputation", "fits with offload")
    assert host
    assert alone.result is not None
    assert host.result is not None
    assert host.result.cost < alone.result.cost
    assert any("copies to the host end the step" in remark for remark in host.remarks)


def test_a_device_without_a_bus_has_no_host():
    """The CPU copies nowhere."""
    model, example = case(8)
    with pytest.raises(checkmate.OptionError, match="no bus"):
        checkmate.torch.fits(model, LOSS, example=example, device="CPU", host="1GiB")
