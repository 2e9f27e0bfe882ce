"""The plan written into a copy of the joint graph."""

from __future__ import annotations

import pytest
import torch

from checkmate.torch.partition import split as partition
from tests.torch.networks import input_of, mlp
from tests.torch.steps import ROOMY, Forgetful, compiled


def test_the_joint_graph_is_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning may fail at any time, and must leave what it was given."""
    model, x = mlp(2), input_of("dropout")
    seen: list[tuple[str, str]] = []
    original = partition.apply_plan

    def spy(capture: object, plan: object) -> torch.fx.GraphModule:
        before = str(capture.joint.graph)  # type: ignore[attr-defined]
        module = original(capture, plan)  # type: ignore[arg-type]
        seen.append((before, str(capture.joint.graph)))  # type: ignore[attr-defined]
        return module

    monkeypatch.setattr(partition, "apply_plan", spy)
    run, _ = compiled(lambda: model(x).mean(), budget=ROOMY, solver=Forgetful())
    run()
    assert seen
    assert seen[0][0] == seen[0][1]
