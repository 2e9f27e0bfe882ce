"""Lightning within the budget of the environment: the module behind the entry points of its two packages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from checkmate.frontend.options import budget_of_environment
from checkmate.torch.integrations.script import TrainingReport, is_active, training_within


def callbacks(package: str) -> list[Any]:
    """The callbacks for a new ``Trainer`` of a package: none if the environment has no budget, or the whole script has one."""
    budget = budget_of_environment()
    if budget is None or is_active():
        return []
    within = type("WithinBudget", (_WithinBudget, import_module(package).Callback), {})
    return [within(budget, import_module(f"{package}.utilities").rank_zero_info)]


class _WithinBudget:
    """Compiles the modules of the optimizers of ``Trainer.fit`` within a budget, and reports the plans at the end."""

    def __init__(self, budget: str, told: Callable[[str], None]) -> None:
        self._budget, self._told = budget, told
        self._running = contextlib.ExitStack()
        self._report: TrainingReport | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin before the optimizers are made, unless another callback has begun: callbacks do not end in the opposite order."""
        if stage == "fit" and not is_active():
            self._report = self._running.enter_context(training_within(self._budget))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End without a report."""
        self._running.close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End with a report."""
        self._running.close()
        if self._report is not None and stage == "fit":
            self._told("\n".join(["checkmate:", *self._report.lines()]))
