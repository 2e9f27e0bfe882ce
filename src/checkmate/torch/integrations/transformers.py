"""What a trainer needs of Checkmate beyond ``torch.compile``; imported on its own, since it imports the trainer.

The model is compiled before the trainer gets it, ``model.compile(backend="checkmate", options=...)``: that is all that
Lightning and accelerate need, and what Hugging Face's ``Trainer`` needs to train within a budget.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from checkmate.core.errors import MissingExtraError
from checkmate.core.units import format_bytes
from checkmate.torch._compat.profiler import memory_trace, profiler_running
from checkmate.torch.compilation.coordinator import COORDINATOR
from checkmate.torch.graph.storages import leaves, unique_bytes

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError(
        "checkmate.torch.integrations.transformers needs transformers, which is not installed",
        hint="pip install transformers accelerate",
    ) from error

_log = logging.getLogger("checkmate.torch")


class PeakCallback(TrainerCallback):
    """Logs the planned and the measured peak of a step of Hugging Face's ``Trainer``.

    One step is measured, from its first forward to its last backward: on the CPU by torch's profiler, which slows that step
    down, on CUDA by the allocator. Both peaks are totals: ``planned_peak_bytes`` and ``measured_peak_bytes`` are in what the
    trainer logs next, in its ``log_history``, and attributes.

    Args:
        step: Which step to measure; the first compiles, and a budget that several graphs share holds from the second on.

    Attributes:
        planned_bytes: The most that the step was to take, resident bytes included; None before it, or if nothing is planned.
        measured_bytes: What it took: parameters, gradients, optimizer state, and what was allocated above them. The batch is
            there before the step begins and is not in it on the CPU.
    """

    def __init__(self, step: int = 3) -> None:
        self.step = step
        self.planned_bytes: int | None = None
        self.measured_bytes: int | None = None
        self._running = contextlib.ExitStack()
        self._peak: Callable[[], int] | None = None
        self._logged = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to measure."""
        if state.global_step + 1 != self.step or profiler_running():
            return
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()
            self._peak = torch.cuda.max_memory_allocated
            return
        resident = _resident_bytes(kwargs["model"], kwargs.get("optimizer"))
        trace = self._running.enter_context(memory_trace())
        self._peak = lambda: resident + trace.peak()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop measuring: what an optimizer takes by itself is in no plan."""
        if self._peak is None:
            return
        self._running.close()
        self.measured_bytes, self._peak = self._peak(), None
        self.planned_bytes = COORDINATOR.step_bytes
        planned = "nothing" if self.planned_bytes is None else format_bytes(self.planned_bytes)
        _log.info("step %d: planned %s, measured %s", self.step, planned, format_bytes(self.measured_bytes))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the peaks to what is logged, once."""
        if self.measured_bytes is None or self._logged:
            return
        self._logged = True
        found = {"planned_peak_bytes": self.planned_bytes, "measured_peak_bytes": self.measured_bytes}
        for where in (logs, state.log_history[-1] if state.log_history else None):
            if where is not None:
                where.update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop measuring a step that was never over."""
        self._running.close()


def _resident_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of what a trainer holds between steps."""
    held = [*model.parameters(), *model.buffers(), *[p.grad for p in model.parameters() if p.grad is not None]]
    states = getattr(optimizer, "state", {})
    return unique_bytes([*held, *[t for state in states.values() for t in leaves(state)]])
