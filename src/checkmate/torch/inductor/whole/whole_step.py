"""Whole steps under Inductor: forward, backward and updates in one graph, in the order of a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from checkmate.torch._compat.aot import BoxedRun
from checkmate.torch.graph.optimizer_ops import UPDATE
from checkmate.torch.inductor.whole.step_state import StepState
from checkmate.torch.inductor.whole.update_ops import expand_updates
from checkmate.torch.joint.capture import with_workspace
from checkmate.torch.partition.split import Task, plan_whole_step

WHOLE_STEP_CONFIG: dict[str, Any] = {
    "reorder_for_locality": False,  # only done to graphs without a backward of their own; it would undo the order of the plan
}
"""Decisions of Inductor on whole steps that are left to the plan."""


class WholeStep:
    """A compiled whole step, with the optimizer's state as inputs."""

    def __init__(self) -> None:
        self.run: BoxedRun = _not_compiled
        self.state = StepState((), ())
        self._trial: list[Any] | None = None

    def plan(self, module: fx.GraphModule, task: Task) -> tuple[fx.GraphModule, list[Any]]:
        """The module that runs a plan, with all updates as ATen ops."""
        # Inductor computes each update in one loop, without temporary tensors.
        costs = with_workspace(task.costs, UPDATE, lambda update: 0)
        planned = plan_whole_step(module, dataclasses.replace(task, costs=costs))
        planned, self.state, fakes = expand_updates(planned)
        return planned, fakes

    def __call__(self, args: list[Any]) -> Any:
        """Run the step."""
        args += self.state.tensors() if self._trial is None else self._trial
        return self.run(args)

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Run on a state of zeros inside, so that the optimizer's stays as it is."""
        self._trial = self.state.zeros()
        try:
            yield
        finally:
            self._trial = None


def _not_compiled(args: list[Any]) -> Any:
    raise AssertionError("the step is not compiled")
