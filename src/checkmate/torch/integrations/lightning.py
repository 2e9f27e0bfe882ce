"""Lightning within the budget of the environment: the module behind its entry point ``lightning.pytorch.callbacks_factory``.

In a separate module, since it imports lightning.
"""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from checkmate.frontend.options import budget_of_environment
from checkmate.torch.integrations.script import TrainingReport, is_active, training_within


def callbacks() -> list[Callback]:
    """The callbacks for a new ``Trainer``: none if the environment has no budget, or the whole script has one."""
    budget = budget_of_environment()
    return [] if budget is None or is_active() else [WithinBudget(budget)]


class WithinBudget(Callback):
    """Compiles the modules of the optimizers of ``Trainer.fit`` within a budget, and reports the plans at the end."""

    def __init__(self, budget: str) -> None:
        self._budget = budget
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
            rank_zero_info("\n".join(["checkmate:", *self._report.lines()]))
