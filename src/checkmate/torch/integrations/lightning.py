"""Lightning within the budget of the environment, by its entry point ``lightning.pytorch.callbacks_factory``, and its loggers.

In a separate module, since it imports lightning.
"""

from __future__ import annotations

import contextlib
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_info

from checkmate.frontend.options import budget_of_environment
from checkmate.torch.integrations.metrics import StepMetrics
from checkmate.torch.integrations.script import TrainingReport, is_active, training_within


def callbacks() -> list[Callback]:
    """The callbacks for a new ``Trainer``: none if the environment has no budget, or the whole script has one."""
    budget = budget_of_environment()
    return [] if budget is None or is_active() else [WithinBudget(budget)]


class MetricsCallback(Callback):
    """Send the figures of `StepMetrics` to the loggers of a ``Trainer`` of Lightning, in each step that it logs.

    Examples:
        >>> trainer = lightning.Trainer(logger=WandbLogger(), callbacks=[MetricsCallback()])  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self._metrics = StepMetrics()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Send the figures if the step is one that is logged."""
        figures = self._metrics()
        if figures and trainer.global_step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)


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
