"""Dynamic sizes with ``compiler="inductor"``: the eager compiler plans them, and says so."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from checkmate.torch import measure_peak
from tests.torch.networks import input_of, mlp
from tests.torch.steps import compiled, dynamo_settings

pytestmark = pytest.mark.usefixtures("nothing_else")
FUSED: dict[str, Any] = {"compiler": "inductor", "time_limit_s": 3}


@pytest.mark.parametrize("announced", [None, (0, 512)])
def test_one_eager_plan_serves_all_sizes(announced: tuple[int, int] | None, caplog: pytest.LogCaptureFixture) -> None:
    """The first batch is the largest, or the largest size is announced and the first batch is the smallest."""
    model = mlp(depth=2)
    run, planned = compiled(lambda x: model(x).square().mean(), dynamic=announced is None or None, budget="80%", **FUSED)
    for rows in (512, 160, 96) if announced is None else (96, 160, 512):
        x = input_of("dropout", rows)
        if announced is not None and rows == 96:
            torch._dynamo.mark_dynamic(x, announced[0], min=2, max=announced[1])
        with caplog.at_level(logging.WARNING, "checkmate.torch"):
            run(x).backward()
        model.zero_grad(set_to_none=True)
        graph, result = planned[0][0].graph, planned[0][1]
        assert result.budget_bytes is not None
        assert measure_peak(lambda x=x: run(x).backward()) <= result.budget_bytes - graph.resident_bytes
        model.zero_grad(set_to_none=True)
    assert len(planned) == 1
    assert "sizes of this graph are dynamic: compiled by 'eager'" in caplog.text


def test_sizes_that_torch_itself_makes_dynamic_are_compiled_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    """The usual loop, whose last batch is smaller."""
    model = mlp(depth=1)
    run, planned = compiled(lambda x: model(x).square().mean(), dynamic=None, budget="1GiB", **FUSED)
    for rows in (96, 32):
        with caplog.at_level(logging.WARNING, "checkmate.torch"):
            run(input_of("dropout", rows)).backward()
        model.zero_grad(set_to_none=True)
    assert len(planned) == 2
    assert all("compiled by Inductor" in " ".join(result.remarks) for _, result in planned)
    assert "compiled by 'eager'" not in caplog.text


def test_sizes_that_depend_on_data_are_refused() -> None:
    """As by the eager compiler: how much memory such a step takes is not known before it runs."""
    model = mlp(1)
    with dynamo_settings(capture_dynamic_output_shape_ops=True):
        run, _ = compiled(lambda x: model(x[x.sum(1) > 0]).square().sum(), dynamic=True, budget="1GiB", **FUSED)
        with pytest.raises(Exception, match="depends on the data"):
            run(input_of("dropout", 96))
