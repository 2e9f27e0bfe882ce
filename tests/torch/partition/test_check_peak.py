"""The second account, of what will really run, catches a split that is not the plan."""

from __future__ import annotations

import pytest
import torch

from checkmate.torch import SplitError
from checkmate.torch.partition import split as partition
from checkmate.torch.partition.apply_plan import impose
from tests.torch.networks import input_of, mlp
from tests.torch.steps import ROOMY, Forgetful, compiled


def test_a_split_that_takes_more_than_its_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the keep-all plan where another was promised: caught before anything runs."""
    model, x = mlp(), input_of("dropout", 1024)

    def wrong(capture: object, plan: object) -> torch.fx.GraphModule:
        from checkmate import Plan

        return impose(capture, Plan.from_order(capture.graph, range(len(capture.graph.ops))))  # type: ignore[attr-defined, arg-type]

    monkeypatch.setattr(partition, "impose", wrong)
    ran: list[int] = []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    run, _ = compiled(lambda: model(x).square().mean(), budget="70%", time_limit_s=3)
    with pytest.raises(SplitError, match="as split takes"):
        run()


def test_the_joint_graph_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning may fail at any time, and must leave what it was given."""
    model, x = mlp(2), input_of("dropout")
    seen: list[tuple[str, str]] = []
    original = partition.impose

    def spy(capture: object, plan: object) -> torch.fx.GraphModule:
        before = str(capture.joint.graph)  # type: ignore[attr-defined]
        module = original(capture, plan)  # type: ignore[arg-type]
        seen.append((before, str(capture.joint.graph)))  # type: ignore[attr-defined]
        return module

    monkeypatch.setattr(partition, "impose", spy)
    run, _ = compiled(lambda: model(x).mean(), budget=ROOMY, solver=Forgetful())
    run()
    assert seen
    assert seen[0][0] == seen[0][1]
