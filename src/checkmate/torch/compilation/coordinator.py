"""Several planned graphs in flight at once: one budget over what they hold together.

A plan is made for one graph by itself. A graph break, or two forwards before a backward, puts what an
earlier graph holds beside a later one's peak. The first step that does so is watched, and says what it takes; when
it is over the budget is divided over its graphs, and they are compiled anew. From then on what a forward
and its backward will take is predicted when it begins, from the plans and the storages really held, and
refused if it breaks the budget: never a silent run over it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from checkmate.core.budget import Budget
from checkmate.core.errors import CheckmateError
from checkmate.core.graph import Graph
from checkmate.core.units import format_at_least, format_bytes
from checkmate.torch.compilation.planned_graph import PlannedGraph, key_of
from checkmate.torch.compilation.rebalance import StepUsage, split_on_rank0
from checkmate.torch.distributed.wrappers import fsdp_unsharded_bytes
from checkmate.torch.graph.storages import storage_bytes, storage_key

_log = logging.getLogger("checkmate.torch")


class InFlightError(CheckmateError, RuntimeError):
    """Graphs in flight together would take more than the budget."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a division gives a graph.

    Attributes:
        order: Its plan, as the order of its computations.
        budget_bytes: The budget of all graphs together.
    """

    order: tuple[int, ...]
    budget_bytes: int


@dataclass(eq=False, slots=True)
class _PendingBackward:
    planned: PlannedGraph
    inputs: dict[int, int]  # storage -> bytes
    gradients: int  # bytes of gradients that were there when its forward began
    held: dict[int, int] = field(default_factory=dict)


class Coordinator:
    """What is in flight in this process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._flights: list[_PendingBackward] = []
        self._step: list[_PendingBackward] = []  # forwards since nothing was in flight
        self._peak_bytes = 0  # what a moment of this step was to take
        self._shares: dict[str, Share] = {}
        self._rebalanced: set[str] = set()

    def forget_splits(self) -> None:
        """Divide anew from the next step on, as in a fresh process."""
        with self._lock:
            self._shares.clear()
            self._rebalanced.clear()

    @property
    def step_bytes(self) -> int | None:
        """The most that a moment of the newest step was to take, resident bytes included; None before the first."""
        return self._peak_bytes or None

    def share(self, graph: Graph, budget: Budget) -> Share | None:
        """What a division gave a graph, if there was one."""
        return self._shares.get(key_of(graph, budget))

    def held_bytes(self) -> int:
        """Bytes that graphs in flight hold, their inputs included."""
        with self._lock:
            return sum(_union(self._flights).values())

    def forward(self, planned: PlannedGraph, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a planned forward if it fits beside what is in flight.

        Raises:
            InFlightError: It would not.
        """
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        flight = _PendingBackward(planned, _without(_storages(tensors), fsdp_unsharded_bytes()), _gradients(tensors))
        del tensors
        with self._lock:
            if not self._flights:
                self._step, self._peak_bytes = [], 0
            self._check([*self._flights, flight])
            self._step.append(flight)
        results = run(args)
        self._register(flight, results)
        return results

    def backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the backward of a flight; it is over unless what it saved is kept for another."""
        with self._lock:
            mine = {storage_key(a) for a in args if isinstance(a, torch.Tensor)}
            over = [f for f in self._flights if f.held and not mine.isdisjoint(f.held)]
        results = run(args)
        with self._lock:
            for flight in over[-1:]:
                self._retire(flight)
            if over and not self._flights:
                self._rebalance_after_step()
        return results

    def _register(self, flight: _PendingBackward, results: Sequence[Any]) -> None:
        made = [t for t in results if isinstance(t, torch.Tensor) and storage_key(t) not in flight.inputs]
        flight.held = _storages(made)
        if not made:
            return
        # Saved tensors come last. When the last of them dies without a backward, the step was given up.
        weakref.finalize(made[-1].untyped_storage(), self._retire, flight).atexit = False
        with self._lock:
            self._flights.append(flight)

    def _retire(self, flight: _PendingBackward) -> None:
        with self._lock:
            if flight in self._flights:
                self._flights.remove(flight)

    def _check(self, flights: list[_PendingBackward]) -> None:
        """Refuse the last of some flights if any moment of them together breaks the budget."""
        now, earlier = flights[-1], flights[:-1]
        unplanned = max(0, now.gradients - now.planned.planned_gradient_bytes)
        inputs = _union(flights, inputs_only=True)
        resident = now.planned.resident_bytes + unplanned + sum(size for key, size in inputs.items() if key not in now.inputs)
        budget = max(f.planned.budget_bytes for f in flights)
        worst = resident + now.planned.footprint.memory.forward_peak_bytes + _held_beside(earlier, inputs)
        for position, flight in enumerate(flights):
            # Backwards run from the last flight to the first, and leave their gradients.
            later = sum(f.planned.footprint.memory.gradient_bytes for f in flights[position + 1 :])
            held = _held_beside(flights[:position], inputs)
            worst = max(worst, resident + held + flight.planned.footprint.memory.backward_peak_bytes + later)
        self._peak_bytes = max(self._peak_bytes, worst)
        if worst <= budget:
            return
        if len(flights) == 1:
            raise InFlightError(
                f"this step would take {format_bytes(worst)}, and its budget is {format_bytes(budget)}: "
                f"{format_bytes(unplanned)} of gradients are there already that were not when it was planned",
                hint="call zero_grad(set_to_none=True) before the forward, or plan with room for them: accumulate=True",
            )
        if not all(f.planned.key in self._rebalanced or f.planned.recompile is None for f in flights):
            return  # the first of its kind: `_rebalance_after_step` says what it took
        raise InFlightError(
            f"{len(flights)} planned graphs in flight together would take {format_bytes(worst)}, and the budget is "
            f"{format_bytes(budget)}: a graph break, or a forward before the backward of the one before",
            hint=f"find the break with torch.compile(..., fullgraph=True), call backward before the next forward, or raise "
            f"the budget to at least {format_at_least(worst)}",
        )

    def _rebalance_after_step(self) -> None:
        """Divide the budget over the graphs of a step that is over, if that was not done and there is something to gain."""
        step, self._step = self._step, []
        graphs = {f.planned.key: f.planned for f in step}
        if len(step) < 2 or self._rebalanced.issuperset(graphs) or any(a.recompile is None for a in graphs.values()):
            return
        self._rebalanced.update(graphs)
        keys = list(graphs)
        sequence = tuple(keys.index(f.planned.key) for f in step)
        usage = StepUsage(tuple(keys), sequence, self._peak_bytes, _resident_bytes(step))
        found = split_on_rank0(usage, list(graphs.values()))
        if found.orders is None:
            _log.warning(
                "%d graphs were in flight together, and this first step took up to %s; no division of %s over them was found, so "
                "that the next is refused",
                len(step),
                format_bytes(found.before_bytes),
                format_bytes(found.budget_bytes),
            )
        if not found.orders:
            return
        _log.warning(
            "%d graphs were in flight together, and this first step took up to %s; with the budget of %s divided over them "
            "the next takes up to %s",
            len(step),
            format_bytes(found.before_bytes),
            format_bytes(found.budget_bytes),
            format_bytes(found.peak_bytes),
        )
        for planned, order in zip(graphs.values(), found.orders, strict=True):
            self._shares[planned.key] = Share(order, found.budget_bytes)
            assert planned.recompile is not None
            planned.recompile()


COORDINATOR = Coordinator()
"""The coordinator of this process."""


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    return {storage_key(t): storage_bytes(t) for t in tensors}


def _without(storages: dict[int, int], passing: Mapping[int, int]) -> dict[int, int]:
    """Storages, those that come and go counted as nothing: they were planned beside."""
    return {key: 0 if key in passing else size for key, size in storages.items()}


def _gradients(tensors: Iterable[torch.Tensor]) -> int:
    return sum(_storages(t.grad for t in tensors if t.is_leaf and t.grad is not None).values())


def _union(flights: Iterable[_PendingBackward], *, inputs_only: bool = False) -> dict[int, int]:
    found: dict[int, int] = {}
    for flight in flights:
        found.update(flight.inputs)
        if not inputs_only:
            found.update(flight.held)
    return found


def _resident_bytes(step: Sequence[_PendingBackward]) -> int:
    """What is resident beside the graphs of a step: the inputs that none of them made, and what was planned beside."""
    first = step[0]
    made = {key for flight in step for key in flight.held}
    outside = sum(size for key, size in _union(step, inputs_only=True).items() if key not in made)
    return outside + first.planned.resident_bytes - sum(first.inputs.values())


def _held_beside(flights: Iterable[_PendingBackward], inputs: dict[int, int]) -> int:
    return sum(size for key, size in _union(flights).items() if key not in inputs)
