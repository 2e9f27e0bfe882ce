"""Figures of planned steps, for the loggers of training loops and trainers."""

from __future__ import annotations

import time
from typing import Any

import torch

from checkmate.core.units import seconds
from checkmate.torch.steps.coordinator import coordinator


class StepMetrics:
    """The figures of the current plan as one dictionary, for Weights & Biases, TensorBoard and other loggers.

    Call it after every step: ``wandb.log({"loss": loss, **metrics()})``. Names begin with ``checkmate/``: ``budget_bytes``,
    ``planned_peak_bytes``, ``overhead`` and ``gap`` of the plan; on CUDA ``measured_peak_bytes``, the largest so far; ``step_s``,
    the seconds since the call before; and ``planned_over_measured_time``, the sum of the op costs over these seconds.

    Args:
        step: The step of `checkmate.torch.compile`; by default the newest plan of the backend, as `last_plan` has it.

    Examples:
        >>> from checkmate.torch import compile
        >>> model, x = torch.nn.Linear(4, 2), torch.ones(3, 4)
        >>> step = compile(model, torch.nn.functional.mse_loss, example=(x, torch.ones(3, 2)), budget="1MiB")
        >>> StepMetrics(step)()["checkmate/budget_bytes"]
        1048576
    """

    def __init__(self, step: Any = None) -> None:
        self._step = step
        self._ended: float | None = None

    def __call__(self, *, measured_peak_bytes: int | None = None) -> dict[str, float]:
        """The figures; a measured peak takes the place of the one of CUDA."""
        began, self._ended = self._ended, time.perf_counter()
        planned = coordinator().planned if self._step is None else (self._step.graph, self._step.result)
        if planned is None:
            return {}
        graph, result = planned
        found: dict[str, float] = {name: getattr(result, name) for name in ("budget_bytes", "overhead", "gap")}
        found["planned_peak_bytes"] = result.peak_bytes
        if measured_peak_bytes is None and torch.cuda.is_available() and torch.cuda.is_initialized():
            measured_peak_bytes = torch.cuda.max_memory_allocated()
        if measured_peak_bytes is not None:
            found["measured_peak_bytes"] = measured_peak_bytes
        if began is not None:
            found["step_s"] = self._ended - began
            planned_s = seconds(result.cost, graph.cost_unit)
            if planned_s is not None:
                found["planned_over_measured_time"] = planned_s / found["step_s"]
        return {f"checkmate/{name}": figure for name, figure in found.items()}
