"""One budget for several planned graphs that are in flight together.

A graph is in flight from the start of its forward until its backward has run, or until the tensors that it saved for the backward
are freed. A plan is made for one graph alone. After a graph break, or if two forwards run before a backward, the tensors that an
earlier graph saved are held during the peak of a later one, and the two together may exceed a budget that each of them keeps.

The peak of a step is predicted whenever a forward begins, from the plans of the graphs in flight and the storages that they hold.
The first step of several graphs runs even if that peak exceeds the budget, with a warning. When it is over, the budget is split
over its graphs, and they are compiled again with their shares. From then on a forward that would exceed the budget is
refused before it runs.
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
    """Graphs in flight would together exceed the budget."""


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a graph in a budget that was split over the graphs of a step.

    Attributes:
        order: The order of computations of its plan.
        budget_bytes: The budget of all graphs together, in bytes.
    """

    order: tuple[int, ...]
    budget_bytes: int


@dataclass(eq=False, slots=True)
class _PendingBackward:
    """One forward whose backward has not run.

    Attributes:
        planned: Its graph.
        inputs: Bytes of each input, by the key of its storage.
        gradient_bytes: Bytes of the gradients that its parameters had when the forward began.
        held: Bytes of each tensor that the forward returned, outputs and saved tensors, by the key of its storage.
    """

    planned: PlannedGraph
    inputs: dict[int, int]
    gradient_bytes: int
    held: dict[int, int] = field(default_factory=dict)


class Coordinator:
    """The planned graphs that are in flight in this process, and the budgets that were split over several of them."""

    def __init__(self) -> None:
        # Autograd runs backwards on other threads, and a finalizer runs on any thread, even on one that already holds the lock.
        self._lock = threading.RLock()
        self._flights: list[_PendingBackward] = []  # in the order of their forwards
        self._step: list[_PendingBackward] = []  # forwards of the present step: all since nothing was in flight
        self._peak_bytes = 0  # largest predicted peak of the present step
        self._shares: dict[str, Share] = {}  # by the key of the graph
        self._rebalanced: set[str] = set()  # keys of graphs whose step was split, or for which no split was found

    def forget_splits(self) -> None:
        """Return to the state of a new process: the next step of several graphs is a first one."""
        with self._lock:
            self._shares.clear()
            self._rebalanced.clear()

    @property
    def step_bytes(self) -> int | None:
        """Largest predicted peak of the newest step, resident bytes included; None before the first step."""
        return self._peak_bytes or None

    def share(self, graph: Graph, budget: Budget) -> Share | None:
        """The share of a graph in a budget, or None if that budget was not split."""
        return self._shares.get(key_of(graph, budget))

    def held_bytes(self) -> int:
        """Bytes that the graphs in flight hold: inputs, outputs and saved tensors."""
        with self._lock:
            return sum(_union(self._flights).values())

    def forward(self, planned: PlannedGraph, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run the forward of a planned graph, unless it would exceed the budget together with the graphs in flight.

        Args:
            planned: The graph.
            run: Its compiled forward, in AOTAutograd's boxed calling convention.
            args: Its arguments; ``run`` clears the list.

        Raises:
            InFlightError: The step would exceed the budget.
        """
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        inputs = _without(_storages(tensors), fsdp_unsharded_bytes())
        flight = _PendingBackward(planned, inputs, _gradients(tensors))
        del tensors  # a reference here would keep inputs alive that the forward frees
        with self._lock:
            if not self._flights:
                self._step, self._peak_bytes = [], 0
            self._check([*self._flights, flight])
            self._step.append(flight)
        results = run(args)
        self._register(flight, results)
        return results

    def backward(self, run: Callable[[list[Any]], Any], args: list[Any]) -> Any:
        """Run a compiled backward; its forward is then no longer in flight.

        Args:
            run: The compiled backward, in AOTAutograd's boxed calling convention.
            args: Its arguments, saved tensors among them; ``run`` clears the list.
        """
        with self._lock:
            # Nothing but the saved tensors tells which forward a backward belongs to. It also reads tensors that earlier forwards
            # returned and this one had as inputs, so that its forward is the newest of those that hold any of them.
            mine = {storage_key(a) for a in args if isinstance(a, torch.Tensor)}
            holders = [f for f in self._flights if f.held and not mine.isdisjoint(f.held)]
        results = run(args)
        with self._lock:
            for flight in holders[-1:]:
                self._retire(flight)
            if holders and not self._flights:
                self._rebalance_after_step()
        return results

    def _register(self, flight: _PendingBackward, results: Sequence[Any]) -> None:
        """Count a forward as in flight as long as the tensors that it saved are alive."""
        made = [t for t in results if isinstance(t, torch.Tensor) and storage_key(t) not in flight.inputs]
        flight.held = _storages(made)
        if not made:
            return
        # A step may end without a backward: after an exception, or if its loss is dropped. Nothing is called then; that the saved
        # tensors are freed is the only sign of it, hence the finalizer. AOTAutograd returns outputs first and saved tensors last,
        # so that the last tensor is a saved one wherever any was saved, and only autograd holds it. An output would not do: the
        # caller may hold it for longer. At exit there is nothing left to count.
        weakref.finalize(made[-1].untyped_storage(), self._retire, flight).atexit = False
        with self._lock:
            self._flights.append(flight)

    def _retire(self, flight: _PendingBackward) -> None:
        with self._lock:
            if flight in self._flights:
                self._flights.remove(flight)

    def _check(self, flights: list[_PendingBackward]) -> None:
        """Refuse the newest forward if the predicted peak of the step exceeds the budget.

        Args:
            flights: The graphs in flight, in the order of their forwards; the last is about to start.

        Raises:
            InFlightError: The peak exceeds the budget, and the step is not a first one whose budget is still to be split.
        """
        now, earlier = flights[-1], flights[:-1]
        unplanned = max(0, now.gradient_bytes - now.planned.planned_gradient_bytes)
        inputs = _union(flights, inputs_only=True)
        resident = now.planned.resident_bytes + unplanned + sum(size for key, size in inputs.items() if key not in now.inputs)
        budget = max(f.planned.budget_bytes for f in flights)
        worst = resident + now.planned.footprint.memory.forward_peak_bytes + _held_beside(earlier, inputs)
        for position, flight in enumerate(flights):
            # Backwards run from the last graph to the first. Those that have run leave gradients; those to come hold tensors.
            later = sum(f.planned.footprint.memory.gradient_bytes for f in flights[position + 1 :])
            held = _held_beside(flights[:position], inputs)
            worst = max(worst, resident + held + flight.planned.footprint.memory.backward_peak_bytes + later)
        self._peak_bytes = max(self._peak_bytes, worst)
        if worst <= budget:
            return
        if len(flights) == 1:
            raise InFlightError(
                f"this step would take {format_bytes(worst)}, and its budget is {format_bytes(budget)}: "
                f"{format_bytes(unplanned)} of gradients are there already that did not exist when it was planned",
                hint="call optimizer.zero_grad(set_to_none=True) before the forward, or set the option accumulate=True to plan "
                "with room for them",
            )
        if not all(f.planned.key in self._rebalanced or f.planned.recompile is None for f in flights):
            return  # the first step of these graphs: `_rebalance_after_step` splits the budget, and warns
        raise InFlightError(
            f"{len(flights)} planned graphs in flight together would take {format_bytes(worst)}, and the budget is "
            f"{format_bytes(budget)}: a graph break, or a second forward before the backward of the first",
            hint=f"find the graph break with torch.compile(..., fullgraph=True), call backward before the next forward, or raise "
            f"the budget to at least {format_at_least(worst)}",
        )

    def _rebalance_after_step(self) -> None:
        """Split the budget over the graphs of a step that is over, once for each set of graphs, and have them compiled again.

        A graph without `PlannedGraph.recompile` keeps the plan it has, so that a step with one is not split.
        """
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
                "%d graphs were in flight together, and this first step took up to %s; no split of the budget of %s over them "
                "was found, so that the next step is refused",
                len(step),
                format_bytes(found.before_bytes),
                format_bytes(found.budget_bytes),
            )
        if not found.orders:
            return
        _log.warning(
            "%d graphs were in flight together, and this first step took up to %s; with the budget of %s split over them "
            "the next step takes up to %s",
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
    """Bytes of each storage, by its key."""
    return {storage_key(t): storage_bytes(t) for t in tensors}


def _without(storages: dict[int, int], transient: Mapping[int, int]) -> dict[int, int]:
    """The storages, with zero bytes for the transient ones: the resident bytes of the plan already include those."""
    return {key: 0 if key in transient else size for key, size in storages.items()}


def _gradients(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the gradients that parameters have."""
    return sum(_storages(t.grad for t in tensors if t.is_leaf and t.grad is not None).values())


def _union(flights: Iterable[_PendingBackward], *, inputs_only: bool = False) -> dict[int, int]:
    """Bytes of each storage that graphs in flight hold, by its key: one that several hold counts once."""
    found: dict[int, int] = {}
    for flight in flights:
        found.update(flight.inputs)
        if not inputs_only:
            found.update(flight.held)
    return found


def _resident_bytes(step: Sequence[_PendingBackward]) -> int:
    """Resident bytes of a step: inputs that none of its graphs computed, and what its plans count as resident besides inputs."""
    first = step[0]
    made = {key for flight in step for key in flight.held}
    outside = sum(size for key, size in _union(step, inputs_only=True).items() if key not in made)
    return outside + first.planned.resident_bytes - sum(first.inputs.values())


def _held_beside(flights: Iterable[_PendingBackward], inputs: dict[int, int]) -> int:
    """Bytes that graphs in flight hold, except storages that are counted among the inputs."""
    return sum(size for key, size in _union(flights).items() if key not in inputs)
