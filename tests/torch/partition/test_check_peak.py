"""The second account, of what will really run, catches a split that is not the plan."""

from __future__ import annotations

import pytest
import torch

from checkmate.torch import SplitError
from checkmate.torch.partition import split as partition
from checkmate.torch.partition.apply_plan import apply_plan
from tests.torch.networks import input_of, mlp
from tests.torch.steps import compiled


def test_a_split_that_takes_more_than_its_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the keep-all plan where another was promised: caught before anything runs."""
    model, x = mlp(), input_of("dropout", 1024)

    def wrong(capture: object, plan: object) -> torch.fx.GraphModule:
        from checkmate import Plan

        return apply_plan(capture, Plan.from_order(capture.graph, range(len(capture.graph.ops))))  # type: ignore[attr-defined, arg-type]

    monkeypatch.setattr(partition, "apply_plan", wrong)
    ran: list[int] = []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    run, _ = compiled(lambda: model(x).square().mean(), budget="70%", time_limit_s=3)
    with pytest.raises(SplitError, match="partitioned step takes"):
        run()
