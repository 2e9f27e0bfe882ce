"""Figures of planned steps for the loggers of Lightning, in a separate module, since it imports one of its packages."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from checkmate.torch.integrations.metrics import StepMetrics

Callback: Any = import_module("lightning.pytorch" if find_spec("lightning") else "pytorch_lightning").Callback


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
