"""Warnings before a step exceeds its budget that was not planned as a whole: what it takes comes to be known while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

import torch

from checkmate.core.budget import Budget
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes
from checkmate.torch.graph.storages import storage_key
from checkmate.torch.measure.device_memory import DeviceMemory, device_memory
from checkmate.torch.steps.program import Flight, PlannedGraph, Share
from checkmate.torch.steps.recorder import StepRecorder

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True)
class Now:
    """A step at some moment.

    Attributes:
        recorder: What it has done so far.
        pending: Its graphs in flight.
        memory: All tensors as they were when its first graph was compiled; None if that was not looked up.
        first: Whether it is a first step. If not, it was taken for another one that is planned.
        unseen_bytes: What its eager code is expected to take, where that is not seen.
    """

    recorder: StepRecorder
    pending: Sequence[Flight]
    memory: DeviceMemory | None
    first: bool
    unseen_bytes: int

    def held_bytes(self, planned: PlannedGraph, flights: Sequence[Flight] | None = None, besides: Container[int] = ()) -> int:
        """Bytes of the step that exist now, and of all else.

        Args:
            planned: A graph of the step.
            flights: Graphs in flight; those that are pending by default.
            besides: Keys of storages that are counted elsewhere.
        """
        held = {**self.recorder.present(), **held_in_flight(self.pending if flights is None else flights)}
        # What was outside of a graph when it was compiled may be another one's since then.
        outside = planned.resident.other_bytes if self.memory is None else self.memory.besides(held)
        rest = planned.resident.total_bytes - planned.resident.other_bytes
        return rest + outside + sum(size for key, size in held.items() if key not in besides)


class Announcements:
    """Says what a step may take, once for each kind of step and graph of it, and again where that was too little."""

    def __init__(self) -> None:
        self._said: dict[tuple[int, int, bool], int] = {}  # bytes, by the graph, the first one of the step, and whether it is new
        self._first_graph = 0  # of the step, by its identity
        self._limit: _Limit | None = None  # of a step whose eager code is seen for the first time
        self._besides_eager_bytes = 0  # of the step, after its newest window
        self._outside_bytes: int | None = None  # of all else, where no graph of the step has run

    @property
    def most_bytes(self) -> int:
        """The most that a step was said to take beyond its budget; 0 where nothing was said."""
        return max(self._said.values(), default=0)

    def begin_step(self) -> None:
        """Forget the step before."""
        self._limit = self._outside_bytes = None
        self._first_graph = 0

    def before_forward(self, flight: Flight, now: Now, share_of: Callable[[Graph, Budget], Share | None]) -> None:
        """Warn before a forward that may exceed the budget, or whose backward may.

        Args:
            flight: The forward that is about to run.
            now: The step.
            share_of: Returns what a graph was compiled to take in a step that was seen before; None if it was not.
        """
        planned, own, flights = flight.planned, flight.program, [*now.pending, flight]
        self._first_graph = self._first_graph or id(planned)
        alone = planned.alone and (not now.pending or not planned.replaceable or planned.options.plan is not None)
        if alone and not now.recorder.watched:
            return  # the plan of a graph alone keeps the budget, unless eager code takes more, which is seen in watched steps
        share = None if planned.replaceable else share_of(planned.interface.whole, planned.budget)
        if alone:
            counted = held_in_flight(flights)
            made_bytes = sum(size for key, size in now.recorder.made().items() if key not in counted)
            if share is not None and share.eager_bytes is not None and made_bytes <= share.eager_bytes:
                return  # it was compiled to leave as much
            needed, limit = own.result.peak_bytes + made_bytes, _Limit(planned, own.result.budget_bytes)
        else:
            needed = now.held_bytes(planned, flights) + now.unseen_bytes + own.memory.peak_bytes
            limit = _Limit.of(flights, now.recorder.made())
        self._limit = limit if now.recorder.watched and share is None else None
        self._say(limit, now.first, needed, needed)

    def after_window(self, now: Now) -> None:
        """Note what the step holds when a forward or a backward is over.

        Args:
            now: The step.
        """
        if self._limit is not None:
            self._besides_eager_bytes = now.held_bytes(self._limit.planned) - now.recorder.eager_bytes

    def of_eager_code(self, size_bytes: int, now: Now) -> None:
        """Warn where eager code, and an op of it that allocates so many bytes, exceed the budget.

        Args:
            size_bytes: What the op allocates.
            now: The step.
        """
        if self._limit is not None:
            eager_bytes = now.recorder.eager_bytes
            needed = self._besides_eager_bytes + eager_bytes + size_bytes
            # What eager code has made has gradients as large, which are still to come.
            self._say(self._limit, now.first, needed, needed + eager_bytes, 2 * eager_bytes)

    def before_any_graph(self, budget: Budget, device: torch.device, eager_bytes: int) -> None:
        """Warn where eager code exceeds the budget and no graph of the step has run: Dynamo may have made none.

        Args:
            budget: The budget of the function that is called. A share is known when a graph is.
            device: Where the code has just allocated.
            eager_bytes: What it holds.
        """
        if budget.total_bytes is None:
            return
        if self._outside_bytes is None:
            self._outside_bytes = device_memory(device).total_bytes - eager_bytes
        needed, key = self._outside_bytes + eager_bytes, (0, 0, True)
        if needed > max(budget.total_bytes, self._said.get(key, 0)):
            self._said[key] = needed + eager_bytes  # what eager code has made has gradients as large
            _log.warning(
                "a first step may take up to %s, more than its budget of %s: no graph of it has run yet",
                format_bytes(self._said[key]),
                budget,
            )

    def before_backward(self, flight: Flight, tangents: Iterable[object], now: Now) -> None:
        """Warn before a backward: what eager code and the graphs after its own hold is known now.

        Args:
            flight: The forward that belongs to it.
            tangents: Its arguments from eager code and other graphs.
            now: The step.
        """
        if self._limit is not None:
            memory = flight.program.memory
            given = {storage_key(t) for t in tangents if isinstance(t, torch.Tensor)}
            needed = now.held_bytes(self._limit.planned, besides=given) - memory.saved_bytes + memory.backward_peak_bytes
            self._say(self._limit, now.first, needed, needed, 2 * now.recorder.eager_bytes)

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
    """The budget of a step that has not been seen yet.

    Attributes:
        planned: The newest graph of the step.
        total_bytes: The budget; None for a share, which is taken of what is known so far.
        fixed_bytes: Bytes that the step cannot give up.
        keep_all_bytes: What the step takes if its graphs keep everything.
    """

    planned: PlannedGraph
    total_bytes: int | None
    fixed_bytes: int = 0
    keep_all_bytes: int = 0

    @classmethod
    def of(cls, flights: Sequence[Flight], made: Container[int]) -> _Limit:
        """The budget of a step of several graphs, as far as they are known.

        Args:
            flights: Those that have begun.
            made: Keys of storages that the step has made, which a plan may free.
        """
        planned = flights[-1].planned
        unchanged = {key for f in flights for key in f.inputs if key not in made}
        fixed = sum(size for key, size in held_in_flight(flights).items() if key in unchanged) + planned.resident.total_bytes
        memories = [f.planned.keep_all for f in flights]
        running = max(memory.peak_bytes - memory.saved_bytes for memory in memories)  # one at a time
        totals = [f.planned.budget.total_bytes for f in flights]
        total = min((size for size in totals if size is not None), default=None)
        return cls(planned, total, fixed, fixed + running + sum(m.saved_bytes for m in memories))

    def total(self, eager_bytes: int) -> int:
        """The budget in bytes.

        Args:
            eager_bytes: What eager code adds if everything is kept.
        """
        if self.total_bytes is not None:
            return self.total_bytes
        keep_all_bytes = self.keep_all_bytes + eager_bytes
        return self.planned.budget.within(fixed_bytes=self.fixed_bytes, keep_all_bytes=keep_all_bytes)


def held_in_flight(flights: Iterable[Flight]) -> dict[int, int]:
    """Bytes of each storage that graphs in flight hold, by its key: one that several hold counts once.

    Args:
        flights: The graphs.
    """
    found: dict[int, int] = {}
    for flight in flights:
        found.update(flight.inputs)
        found.update(flight.held)
    return found
