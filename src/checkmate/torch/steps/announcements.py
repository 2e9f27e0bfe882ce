"""Warnings for a step that was not planned as a whole, before it exceeds its budget: its memory becomes known while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch

from checkmate.core.budget import Budget
from checkmate.core.units import format_bytes
from checkmate.torch.graph.storages import storage_key
from checkmate.torch.measure.device_memory import DeviceMemory, device_memory
from checkmate.torch.steps.program import PlannedGraph, StepAllotment
from checkmate.torch.steps.recorder import StepRecorder
from checkmate.torch.steps.run import Run

_log = logging.getLogger("checkmate.torch")


class Announcements:
    """Warns of the bytes that a step may take: once for each kind of step, and again if they grow."""

    def __init__(self, recorder: StepRecorder, in_flight: Sequence[Run]) -> None:
        self._said: dict[tuple[int, bool], int] = {}  # bytes, by the first graph, and whether the step is a first one
        self._in_flight = in_flight  # the graphs of the present step that wait for their backwards
        self._hooked: set[int] = set()  # graphs that ran under `saved_tensors_hooks`
        self.begin_step(recorder)

    @property
    def most_bytes(self) -> int:
        """The largest total of a warning, in bytes; 0 if there was none."""
        return max(self._said.values(), default=0)

    def begin_step(self, recorder: StepRecorder, *, first: bool = True, unseen_bytes: int = 0) -> None:
        """Note which step begins.

        Args:
            recorder: Its segments and storages.
            first: Whether it is a first step; otherwise another, planned step was expected.
            unseen_bytes: Expected bytes of its eager code, if that code is not watched.
        """
        self._recorder, self._first, self._unseen_bytes = recorder, first, unseen_bytes
        self._memory: DeviceMemory | None = None  # all tensors at the newest look; None if they were not looked up
        self._newest: PlannedGraph | None = None  # the newest graph of a step whose eager code is seen for the first time
        self._budgets: list[Budget] = []  # of the step
        self._fixed_bytes = self._keep_all_bytes = 0  # of the step, to which shares refer
        self._outside_bytes: int | None = None  # bytes outside of a step of which no graph has run
        self._besides_eager_bytes = 0  # bytes without eager code, after the newest segment

    def before_forward(self, run: Run, allotted: StepAllotment | None, memory: DeviceMemory | None) -> None:
        """Warn before a forward that may exceed the budget, or whose backward may."""
        planned, own, forwards, recorder = run.planned, run.program, [*self._in_flight, run], self._recorder
        self._newest, self._memory = None, memory
        if planned.budget.keeps_everything:
            return
        alone = planned.alone and (len(forwards) == 1 or not planned.replaceable or planned.options.plan is not None)
        if alone and not recorder.watched:
            return  # the plan of a graph alone keeps the budget, unless eager code takes more, which watched steps see
        made = recorder.present(made=True)
        if alone:
            counted = recorder.held(forwards)
            made_bytes = sum(size for key, size in made.items() if key not in counted)
            if allotted is not None and allotted.eager_bytes is not None and made_bytes <= allotted.eager_bytes:
                return  # it was compiled to leave this much
            needed = own.result.peak_bytes + made_bytes
            self._budgets = [planned.budget.with_total(own.result.budget_bytes)]
        else:
            needed = self._held_bytes(planned, forwards) + self._unseen_bytes + own.memory.peak_bytes
            self._budgets = [forward.planned.budget for forward in forwards]
            inputs = {key: size for f in forwards for key, size in f.inputs.items() if key not in made}
            memories = [forward.planned.keep_all for forward in forwards]
            running_bytes = max(memory.peak_bytes - memory.saved_bytes for memory in memories)  # one at a time
            self._fixed_bytes = sum(inputs.values()) + planned.resident.total_bytes
            self._keep_all_bytes = self._fixed_bytes + running_bytes + sum(memory.saved_bytes for memory in memories)
        self._newest = planned if recorder.watched and allotted is None else None
        self._say(needed, needed)

    def after_segment(self) -> None:
        """Note the bytes of the step when a forward or a backward is over."""
        if self._newest is not None:
            self._besides_eager_bytes = self._held_bytes(self._newest, self._in_flight) - self._recorder.eager_bytes

    def of_eager_code(self, size_bytes: int) -> None:
        """Warn if eager code exceeds the budget together with its present op, which allocates ``size_bytes``."""
        if self._newest is not None:
            eager_bytes = self._recorder.eager_bytes
            needed = self._besides_eager_bytes + eager_bytes + size_bytes
            # The tensors that eager code has made have gradients as large, which are still to come.
            self._say(needed, needed + eager_bytes, 2 * eager_bytes)

    def before_any_graph(self, budget: Budget, device: torch.device) -> None:
        """Warn if eager code exceeds the budget before any graph of the step has run: Dynamo may have made none."""
        if budget.total_bytes is None:
            return
        eager_bytes = self._recorder.eager_bytes
        if self._outside_bytes is None:
            self._outside_bytes = device_memory(device).total_bytes - eager_bytes
        needed, key = self._outside_bytes + eager_bytes, (0, True)
        if needed > max(budget.total_bytes, self._said.get(key, 0)):
            self._said[key] = needed + eager_bytes  # gradients of these tensors are as large
            _log.warning(
                "a first step may take up to %s, more than its budget of %s: no graph of it has run yet",
                format_bytes(self._said[key]),
                budget,
            )

    def before_backward(self, run: Run, tangents: Iterable[object]) -> None:
        """Warn before a backward: the bytes of eager code and of the graphs after its own are known now."""
        if self._newest is not None:
            memory = run.program.memory
            given = {storage_key(t) for t in tangents if isinstance(t, torch.Tensor)}
            held_bytes = self._held_bytes(self._newest, self._in_flight, given)
            needed = held_bytes - memory.saved_bytes + memory.backward_peak_bytes
            self._say(needed, needed, 2 * self._recorder.eager_bytes)

    def of_saved_tensors_hooks(self, planned: PlannedGraph, packer: Callable[..., Any]) -> None:
        """Warn if the saved tensors of a graph go through hooks: the bytes that hooks hold are not known."""
        if id(planned) in self._hooked:
            return
        self._hooked.add(id(planned))
        module, name = getattr(packer, "__module__", None), getattr(packer, "__qualname__", repr(packer))
        _log.warning(
            "torch.autograd.graph.saved_tensors_hooks are active around a compiled graph: everything is saved and passes through "
            "%s, and the budget of %s is not kept for it\nhint: call the compiled function outside of the context; of "
            "torch.utils.checkpoint, compile the function that calls it instead of what is inside of it",
            name if module is None else f"{module}.{name}",
            planned.budget,
        )

    def _held_bytes(self, planned: PlannedGraph, forwards: Iterable[Run], besides: Container[int] = ()) -> int:
        """Bytes that exist now, of the step and of everything else."""
        held = self._recorder.present() | self._recorder.held(forwards)
        # Tensors that were outside of a graph when it was compiled may belong to another graph since then.
        outside = planned.resident.other_bytes if self._memory is None else self._memory.besides(held)
        rest = planned.resident.total_bytes - planned.resident.other_bytes
        return rest + outside + sum(size for key, size in held.items() if key not in besides)

    def _say(self, needed_bytes: int, most_bytes: int, eager_bytes: int = 0) -> None:
        keep_all_bytes = self._keep_all_bytes + eager_bytes
        total_bytes, budget = min(
            ((b.within(fixed_bytes=self._fixed_bytes, keep_all_bytes=keep_all_bytes), b) for b in self._budgets),
            key=lambda found: found[0],
        )
        key = id(self._recorder.forwards[0].planned), self._first
        if most_bytes <= total_bytes or needed_bytes <= self._said.get(key, 0):
            return
        self._said[key] = most_bytes
        _log.warning(
            "%s may take up to %s, more than its budget of %s: it is planned as a whole from the next step on",
            "a first step" if self._first else "a step that runs other graphs than those before",
            format_bytes(most_bytes),
            format_bytes(total_bytes) + (f", {budget} of what is known by now" if budget.is_share else ""),
        )
