"""Callbacks for Hugging Face's ``Trainer``; in a separate module, since it imports transformers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from checkmate.core.errors import MissingExtraError
from checkmate.core.units import Amount, format_bytes
from checkmate.frontend.options import budget_of_environment
from checkmate.torch._compat.profiler import memory_trace, profiler_running
from checkmate.torch.graph.host_weights import ON_HOST, is_frozen
from checkmate.torch.graph.storages import leaves, storage_key, unique_bytes
from checkmate.torch.integrations.metrics import StepMetrics
from checkmate.torch.partition.copies import RESIDENTS
from checkmate.torch.steps.coordinator import coordinator

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError(
        "checkmate.torch.integrations.transformers needs transformers, which is not installed",
        hint="pip install transformers accelerate",
    ) from error

_log = logging.getLogger("checkmate.torch")


class BudgetCallback(TrainerCallback):
    """Train a model within a budget with Hugging Face's ``Trainer``, whose list of compile backends is fixed.

    At the beginning of a training the model is compiled in place with the backend ``"checkmate"``. It keeps its class, its state
    dict and its signature.

    Args:
        budget: Memory for a training step, optimizer state included: ``"8GiB"``, a number of bytes, or a share (``"70%"``). None:
            the budget of the environment variable ``CHECKMATE_BUDGET``; without it everything is kept.
        **options: Further options of the backend, for example ``time_limit_s``. With ``host``, give the Trainer
            ``TrainingArguments(place_model_on_device=False)``: frozen weights then stay on the host.

    Examples:
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[BudgetCallback("8GiB")])  # doctest: +SKIP
    """

    def __init__(self, budget: Amount | None = None, **options: Any) -> None:
        self.options = {"budget": budget_of_environment() if budget is None else budget, **options}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """With a host, leave frozen weights there: Accelerate and the Trainer do not move a model with parts on devices."""
        model = kwargs["model"]
        if self._copies and args.device.type != "cpu" and any(map(is_frozen, model.parameters())):
            model.hf_device_map = dict.fromkeys(("trained", "frozen"), args.device)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compile the model in place; the Trainer has already created its optimizer, whose state counts."""
        model = kwargs["model"]
        if self._copies:
            model._apply(lambda tensor: tensor if is_frozen(tensor) else tensor.to(args.device))
        model.compile(backend="checkmate", options=self.options)

    @property
    def _copies(self) -> bool:
        return self.options.get("host") is not None


class PeakCallback(TrainerCallback):
    """Add the figures of `StepMetrics` to the logs of Hugging Face's ``Trainer``, with the measured peak of one step.

    The step is measured from its first forward to its last backward: on the CPU by torch's profiler, which slows down this step,
    on CUDA by the allocator. Both peaks include resident bytes. Trainers call the callbacks of their loggers first: for Weights &
    Biases or TensorBoard set ``report_to="none"``, and give the logger's callback after this one.

    Args:
        step: The step to measure, from 1. The first step compiles; a budget that several graphs share holds from the
            second step on.

    Attributes:
        planned_bytes: Planned peak of the step; None before the step, or if no graph is planned.
        measured_bytes: Measured peak: parameters, gradients, optimizer state, and bytes allocated above them. On the CPU it
            does not include the batch, which is allocated before the step begins.
    """

    def __init__(self, step: int = 3) -> None:
        self.step = step
        self.planned_bytes: int | None = None
        self.measured_bytes: int | None = None
        self._running = contextlib.ExitStack()
        self._peak: Callable[[], int] | None = None
        self._metrics = StepMetrics()
        self._figures: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start measuring if this step is the one to measure."""
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
        """Stop measuring: no plan includes the memory of ``optimizer.step()``."""
        if self._peak is None:
            return
        self._running.close()
        self.measured_bytes, self._peak = self._peak(), None
        self.planned_bytes = coordinator().step_bytes
        planned = "nothing" if self.planned_bytes is None else format_bytes(self.planned_bytes)
        _log.info("step %d: planned %s, measured %s", self.step, planned, format_bytes(self.measured_bytes))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the figures of the step."""
        self._figures = self._metrics(measured_peak_bytes=self.measured_bytes)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add the figures to the log entry, and to the one in ``log_history``."""
        for where in (logs, state.log_history[-1] if state.log_history else None):
            if where is not None:
                where.update(self._figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop measuring a step that did not finish."""
        self._running.close()


def _resident_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes held between steps: parameters, buffers, gradients and optimizer state; of weights on the host their copies."""
    held = [*model.parameters(), *model.buffers(), *[p.grad for p in model.parameters() if p.grad is not None]]
    held = [*RESIDENTS.of(held), *(t for t in held if storage_key(t) not in ON_HOST)]
    states = getattr(optimizer, "state", {})
    return unique_bytes([*held, *[t for state in states.values() for t in leaves(state)]])
