"""Warnings for a step that was not planned as a whole, before it exceeds its budget: its memory becomes known while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkmate.core.budget import Budget
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes
from checkmate.torch.graph.storages import storage_key
from checkmate.torch.measure.device_memory import DeviceMemory
from checkmate.torch.steps.program import PlannedGraph, StepAllotment
from checkmate.torch.steps.recorder import PendingBackward, StepRecorder

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True)
class StepNow:
    """A step at some moment."""

    recorder: StepRecorder  # its segments and storages so far
    pending: Sequence[PendingBackward]  # its graphs in flight
    memory: DeviceMemory | None  # all tensors as they were when its first graph was compiled; None if they were not looked up
    first: bool  # whether it is a first step; otherwise another, planned step was expected
    unseen_bytes: int  # expected bytes of its eager code, if that code is not watched

    def held_bytes(
        self, planned: PlannedGraph, pending: Sequence[PendingBackward] | None = None, besides: Container[int] = ()
    ) -> int:
        """Bytes that exist now, of the step and of everything else."""
        held = {**self.recorder.present(), **held_in_flight(self.pending if pending is None else pending)}
        # Tensors that were outside of a graph when it was compiled may belong to another graph since then.
        outside = planned.resident.other_bytes if self.memory is None else self.memory.besides(held)
        rest = planned.resident.total_bytes - planned.resident.other_bytes
        return rest + outside + sum(size for key, size in held.items() if key not in besides)


class Announcements:
    """Warns of the bytes that a step may take: once for each kind of step and each of its graphs, and again if they grow."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, int, bool], int] = {}  # bytes, by the graph, the first graph, and whether the step is new
        self._first_graph = 0  # of the step, by its identity
        self._limit: _Limit | None = None  # of a step whose eager code is seen for the first time
        self._besides_eager_bytes = 0  # bytes without eager code, after the newest segment
        self._hooked: set[int] = set()  # graphs that ran under `saved_tensors_hooks`

    @property
    def most_bytes(self) -> int:
        """The largest total of a warning, in bytes; 0 if there was none."""
        return max(self._said.values(), default=0)

    def begin_step(self) -> None:
        """Forget the step before."""
        self._limit = None
        self._first_graph = 0

    def before_forward(
        self, pending: PendingBackward, now: StepNow, allotment_of: Callable[[Graph, Budget], StepAllotment | None]
    ) -> None:
        """Warn before a forward that may exceed the budget, or whose backward may."""
        planned, own, forwards = pending.planned, pending.program, [*now.pending, pending]
        self._first_graph = self._first_graph or id(planned)
        alone = planned.alone and (not now.pending or not planned.replaceable or planned.options.plan is not None)
        if alone and not now.recorder.watched:
            return  # the plan of a graph alone keeps the budget, unless eager code takes more, which watched steps see
        allotted = None if planned.replaceable else allotment_of(planned.interface.whole, planned.budget)
        if alone:
            counted = held_in_flight(forwards)
            made_bytes = sum(size for key, size in now.recorder.made().items() if key not in counted)
            if allotted is not None and allotted.eager_bytes is not None and made_bytes <= allotted.eager_bytes:
                return  # it was compiled to leave this much
            needed, limit = own.result.peak_bytes + made_bytes, _Limit(planned, own.result.budget_bytes)
        else:
            needed = now.held_bytes(planned, forwards) + now.unseen_bytes + own.memory.peak_bytes
            limit = _Limit.of(forwards, now.recorder.made())
        self._limit = limit if now.recorder.watched and allotted is None else None
        self._say(limit, now.first, needed, needed)

    def after_segment(self, now: StepNow) -> None:
        """Note what the step holds when a forward or a backward is over."""
        if self._limit is not None:
            self._besides_eager_bytes = now.held_bytes(self._limit.planned) - now.recorder.eager_bytes

    def of_eager_code(self, size_bytes: int, now: StepNow) -> None:
        """Warn if eager code exceeds the budget together with its present op, which allocates ``size_bytes``."""
        if self._limit is not None:
            eager_bytes = now.recorder.eager_bytes
            needed = self._besides_eager_bytes + eager_bytes + size_bytes
            # The tensors that eager code has made have gradients as large, which are still to come.
            self._say(self._limit, now.first, needed, needed + eager_bytes, 2 * eager_bytes)

    def before_backward(self, pending: PendingBackward, tangents: Iterable[object], now: StepNow) -> None:
        """Warn before a backward: the bytes of eager code and of the graphs after its own are known now."""
        if self._limit is not None:
            memory = pending.program.memory
            given = {storage_key(t) for t in tangents if isinstance(t, torch.Tensor)}
            needed = now.held_bytes(self._limit.planned, besides=given) - memory.saved_bytes + memory.backward_peak_bytes
            self._say(self._limit, now.first, needed, needed, 2 * now.recorder.eager_bytes)

    def of_saved_tensors_hooks(self, planned: PlannedGraph, packer: Callable[..., Any]) -> None:
        """Warn if the saved tensors of a graph go through hooks: the bytes that hooks hold are not known."""
        if id(planned) in self._hooked:
            return
        self._hooked.add(id(planned))
        module, name = getattr(packer, "__module__", None), getattr(packer, "__qualname__", repr(packer))
        _log.warning(
            "torch.autograd.graph.saved_tensors_hooks are active around a compiled graph: everything is saved and passes through "
            "%s, and the budget of %s is not kept for it\nhint: %s",
            name if module is None else f"{module}.{name}",
            planned.budget,
            "compile the function that calls torch.utils.checkpoint instead of what is inside of it"
            if module == "torch.utils.checkpoint"
            else "call the compiled function outside of the context",
        )

    def _say(self, limit: _Limit, first: bool, needed_bytes: int, most_bytes: int, eager_bytes: int = 0) -> None:
        budget, total_bytes = limit.planned.budget, limit.total(eager_bytes)
        key = id(limit.planned), self._first_graph, first
        if budget.keeps_everything or most_bytes <= total_bytes or needed_bytes <= self._said.get(key, 0):
            return
        self._said[key] = most_bytes
        _log.warning(
            "%s may take up to %s, more than its budget of %s: it is planned as a whole from the next step on",
            "a first step" if first else "a step that runs other graphs than those before",
            format_bytes(most_bytes),
            format_bytes(total_bytes) + (f", {budget} of what is known by now" if budget.is_share else ""),
        )


@dataclass(frozen=True, slots=True)
class _Limit:
    """The budget of a step that has not been seen yet."""

    planned: PlannedGraph  # the newest graph of the step
    total_bytes: int | None  # the budget; None for a share, which is taken of the graphs known so far
    fixed_bytes: int = 0  # fixed bytes of the step
    keep_all_bytes: int = 0  # peak of the step if its graphs keep everything

    @classmethod
    def of(cls, forwards: Sequence[PendingBackward], made: Container[int]) -> _Limit:
        """The budget of a step of several graphs, as far as they are known."""
        planned = forwards[-1].planned
        unchanged = {key for f in forwards for key in f.inputs if key not in made}
        fixed = sum(size for key, size in held_in_flight(forwards).items() if key in unchanged) + planned.resident.total_bytes
        memories = [f.planned.keep_all for f in forwards]
        running = max(memory.peak_bytes - memory.saved_bytes for memory in memories)  # one at a time
        totals = [f.planned.budget.total_bytes for f in forwards]
        total = min((size for size in totals if size is not None), default=None)
        return cls(planned, total, fixed, fixed + running + sum(m.saved_bytes for m in memories))

    def total(self, eager_bytes: int) -> int:
        """The budget in bytes."""
        if self.total_bytes is not None:
            return self.total_bytes
        keep_all_bytes = self.keep_all_bytes + eager_bytes
        return self.planned.budget.within(fixed_bytes=self.fixed_bytes, keep_all_bytes=keep_all_bytes)


def held_in_flight(forwards: Iterable[PendingBackward]) -> dict[int, int]:
    """Bytes of each storage that graphs in flight hold, by its key: a storage that several graphs hold counts once."""
    found: dict[int, int] = {}
    for pending in forwards:
        found.update(pending.inputs)
        found.update(pending.held)
    return found
